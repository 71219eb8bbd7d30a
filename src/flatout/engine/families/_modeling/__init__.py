"""Models that transformers does not have. Their files are saved with the weights."""
