"""Image files -> pixels of one size in three splits."""

from flatout.pipelines.images.pipeline import create_pipeline

__all__ = ["create_pipeline"]
