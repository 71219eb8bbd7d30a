"""Token rows -> a trained model, its report and its history."""

from flatout.pipelines.train.pipeline import create_pipeline

__all__ = ["create_pipeline"]
