"""Models that transformers lacks. Their source files are saved with the weights."""
