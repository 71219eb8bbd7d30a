"""Trace a transformers model that runs on padded rows, for use in other programs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from flatout.engine.families._family import row_means
from flatout.engine.machine.environment import set_defaults
from flatout.engine.models.building import ModelError
from flatout.engine.tasks import HeadKind, Task, has_custom_head

OUTPUT, ONNX, PROGRAM = "output", "model.onnx", "model.pt2"
SAMPLES = ("inputs", "pixel_values")
"""Inputs with a fixed shape per row. Token inputs (B, T) may have any length."""
NO_TELEMETRY = {"ORT_DISABLE_TELEMETRY": "1"}
"""ONNX Runtime sends usage data to Microsoft unless this variable is set."""
Inputs = dict[str, Tensor]
Run = Callable[[Inputs], Tensor]
"""A function from named input tensors to the output of `Forward`."""


class Forward(nn.Module):
    """Computes the logits (B, ...), or the vectors (B, H) of an embedding model, from
    named tensors. Raises ModelError if a single forward pass cannot produce the task's
    predictions."""

    def __init__(self, model: Any, task: Task) -> None:
        super().__init__()
        self.model, self.pooling = model, task.pooling
        is_language = task.head_kind in (HeadKind.VOCABULARY, HeadKind.DIRECTIONS)
        if is_language or (has_custom_head(task) and task.pooling is None):
            why = "is a language model's" if is_language else "has a custom head"
            raise ModelError(
                f"export: one forward pass of the saved model does not answer this: "
                f"the task {task.settings.task} {why}. Use kedro run "
                "--pipelines=predict, or load the model's folder with transformers"
            )

    def forward(self, inputs: Inputs) -> Tensor:
        found = self.model(**inputs)
        if self.pooling is None:
            logits: Tensor = found.logits
            return logits
        states: Tensor = found.last_hidden_state
        if self.pooling == "mean":
            return normalize(row_means(states, inputs), dim=1)
        if self.pooling == "first":
            return normalize(states[:, 0], dim=1)
        mask = inputs["attention_mask"]
        last = mask * (mask.cumsum(1) == mask.sum(1, keepdim=True))
        return normalize((states * last.unsqueeze(-1)).sum(1), dim=1)


class Exported:
    """A model that is traced once for all batch sizes and sequence lengths."""

    def __init__(self, forward: Forward, example: Inputs) -> None:
        set_defaults(NO_TELEMETRY)
        self._forward, self._example = forward, example

    @cached_property
    def _program(self) -> torch.export.ExportedProgram:
        axes = {
            n: dict.fromkeys(range(1 if n in SAMPLES else 2), torch.export.Dim.DYNAMIC)
            for n in self._example
        }
        return torch.export.export(
            self._forward, (self._example,), dynamic_shapes=(axes,), strict=False
        )

    @cached_property
    def _onnx(self) -> Any:
        return torch.onnx.export(
            self._program,
            dynamo=True,
            verbose=False,
            input_names=[*self._example],
            output_names=[OUTPUT],
        )

    def write(self, name: str, folder: Path) -> None:
        """Write the model in the format `name` to `folder`."""
        if name == "onnx":
            self._onnx.save(folder / ONNX)
        elif name == "onnx_int8":
            from onnxruntime.quantization import quantize_dynamic

            model = self._onnx.model_proto
            # PyTorch 2.11 also stores the shapes of weights before they are transposed.
            # The quantizer infers all shapes itself and fails on the stored ones.
            del model.graph.value_info[:]
            quantize_dynamic(model, folder / ONNX)
        else:
            torch.export.save(self._program, folder / PROGRAM)


def load(name: str, folder: Path) -> Run:
    """Load the format `name` from `folder`, and return a function that runs it with as
    many threads as PyTorch uses."""
    if (folder / ONNX).is_file():
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        session = onnxruntime.InferenceSession(folder / ONNX, options)
        return lambda inputs: torch.from_numpy(
            session.run(None, {n: tensor.numpy() for n, tensor in inputs.items()})[0]
        )
    run: Run = torch.export.load(folder / PROGRAM).module()
    return torch.compile(run, dynamic=True) if name == "compiled" else run
