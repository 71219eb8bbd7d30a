"""Data folder and catalog around a run: lock, entries, writable places, origins."""
