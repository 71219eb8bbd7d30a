"""Files of numbers, or images -> samples of one shape in three splits."""

from flatout.pipelines.arrays.pipeline import create_pipeline

__all__ = ["create_pipeline"]
