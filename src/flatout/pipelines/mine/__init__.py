"""Pairs -> triplets with the negatives that the current model confuses."""

from flatout.pipelines.mine.pipeline import create_pipeline

__all__ = ["create_pipeline"]
