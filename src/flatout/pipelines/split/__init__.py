"""Raw rows -> checked rows in three splits."""

from flatout.pipelines.split.pipeline import create_pipeline

__all__ = ["create_pipeline"]
