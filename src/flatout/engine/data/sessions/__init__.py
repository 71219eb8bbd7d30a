"""Sessions of log keys, read from logs or synthetic."""
