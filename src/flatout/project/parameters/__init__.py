"""Parameters of a command: checks, and a table of their sources."""
