"""Sessions of log keys, which are either read from logs or generated."""
