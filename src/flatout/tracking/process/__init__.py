"""MLflow in a process of its own: no run waits for its imports, or for what it does."""
