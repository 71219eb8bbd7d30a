"""Scripts that reproduce the published comparisons. They need a checkout."""
