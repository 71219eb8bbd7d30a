"""Scripts that repeat the published comparisons from a checkout."""
