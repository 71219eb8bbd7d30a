"""The training engine, which does not import Kedro, MLflow or YAML."""
