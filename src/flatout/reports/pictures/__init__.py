"""Pictures, for Kedro-Viz, MLflow and pages."""
