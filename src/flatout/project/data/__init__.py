"""The data folder and the catalog: locks, entries, outputs and origins of the data."""
