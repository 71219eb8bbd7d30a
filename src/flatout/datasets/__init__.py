"""Kedro datasets of our own."""

from flatout.datasets.transformers_model import TransformersModel

__all__ = ["TransformersModel"]
