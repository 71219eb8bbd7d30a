"""Parameters of a command: read once, checked and listed."""
