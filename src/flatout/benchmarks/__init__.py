"""What people see of the benchmark, and the peer that it measures beside the engine."""
