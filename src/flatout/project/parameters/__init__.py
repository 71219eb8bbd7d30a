"""Check the parameters of a command, and show them with their sources."""
