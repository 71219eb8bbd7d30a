"""Texts -> a saved model's prediction of each."""

from flatout.pipelines.predict.pipeline import create_pipeline

__all__ = ["create_pipeline"]
