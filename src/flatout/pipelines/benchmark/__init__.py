"""Token rows -> measured trials, their analysis, and settings to train with."""

from flatout.pipelines.benchmark.pipeline import create_pipeline

__all__ = ["create_pipeline"]
