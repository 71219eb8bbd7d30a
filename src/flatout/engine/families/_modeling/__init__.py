"""Models that transformers has not: their files are saved beside their weights."""
