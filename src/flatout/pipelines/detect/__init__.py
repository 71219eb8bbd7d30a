"""Sessions of log keys -> which of them are abnormal."""

from flatout.pipelines.detect.pipeline import create_pipeline

__all__ = ["create_pipeline"]
