"""Models that transformers does not have; their files are saved with the weights."""
