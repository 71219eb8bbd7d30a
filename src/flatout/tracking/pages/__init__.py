"""What a person meets in MLflow: pictures, descriptions, the list of runs."""
