"""Checked rows -> tokenizer and token rows."""

from flatout.pipelines.tokenize.pipeline import create_pipeline

__all__ = ["create_pipeline"]
