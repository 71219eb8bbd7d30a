"""Models that transformers lacks. Their source files are saved next to the weights."""
