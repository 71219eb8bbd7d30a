"""Token rows -> many trainings, and the settings of the best."""

from flatout.pipelines.sweep.pipeline import create_pipeline

__all__ = ["create_pipeline"]
