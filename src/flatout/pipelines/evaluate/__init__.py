"""A saved model's predictions of a split -> metrics, confusion, wrong rows."""

from flatout.pipelines.evaluate.pipeline import create_pipeline

__all__ = ["create_pipeline"]
