"""Parameters of a command: read once, checked, listed."""
