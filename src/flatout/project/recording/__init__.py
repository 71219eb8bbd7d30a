"""What of a run reaches MLflow: its options, its model."""
