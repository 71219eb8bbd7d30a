"""The training engine: knows nothing of Kedro, MLflow or YAML."""
