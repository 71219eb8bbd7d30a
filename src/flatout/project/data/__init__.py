"""Data folder and catalog around a run: lock, entries, what can be written, origins."""
