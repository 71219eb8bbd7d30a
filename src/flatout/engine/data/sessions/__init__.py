"""Sessions of log keys, either read from logs or synthetic."""
