"""Token rows -> measured trials, what they say, and settings to train with."""

from flatout.pipelines.benchmark.pipeline import create_pipeline

__all__ = ["create_pipeline"]
