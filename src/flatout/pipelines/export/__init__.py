"""A saved model -> ONNX, ONNX int8, torch.export and compiled, measured."""

from flatout.pipelines.export.pipeline import create_pipeline

__all__ = ["create_pipeline"]
