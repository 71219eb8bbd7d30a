"""Model whose samples all have one shape, compiled for it as one graph.

With known sizes Inductor can choose layouts for convolutions, and fuse operations
between blocks: cropping and standardising become part of the first kernel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Shapes = tuple[torch.Size, ...]


class OneShape(nn.Module):
    """Compiles for the first batch's shape, and for one that occurs twice in a row.
    Others, such as an epoch's last batch, run uncompiled: compilation is slow."""

    def __init__(self, model: nn.Module, backend: str = "inductor") -> None:
        super().__init__()
        self.model = model
        self._fast: Any = torch.compile(model.forward, dynamic=False, backend=backend)
        self._compiled: set[Shapes] = set()
        self._last: Shapes | None = None

    def forward(self, batch: dict[str, Tensor]) -> Any:
        """Run `model`, compiled or not."""
        shapes = tuple(tensor.shape for tensor in batch.values())
        if self._last in (None, shapes) and not _is_recorded():
            self._compiled.add(shapes)
        self._last = shapes
        return self._fast(batch) if shapes in self._compiled else self.model(batch)


def _is_recorded() -> bool:
    """Return whether a CUDA graph is recorded, which compilation would break."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
