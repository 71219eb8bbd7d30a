"""The training engine; it does not import Kedro, MLflow or YAML."""
