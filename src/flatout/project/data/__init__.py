"""The data folder and the catalog: lock, entries, outputs, and origin of the data."""
