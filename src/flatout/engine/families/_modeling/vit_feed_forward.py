"""The feed-forward part of a vision transformer's layers, bias and GELU as one kernel.

Its gradient has the bias's in the same pass (kernels/bias_gelu.py): Inductor reads all
of it once more.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.vit.modeling_vit import ViTMLP

from flatout.engine.ops.gelu import Gelu


class FeedForward(ViTMLP):  # type: ignore[misc]
    """In place of one, with its weights."""

    fc1: nn.Linear

    def forward(self, hidden_states: Tensor) -> Tensor:
        """(B, T, hidden) -> the same."""
        from flatout.engine.ops.kernels.bias_gelu import bias_gelu

        product = F.linear(hidden_states, self.fc1.weight)
        inner = bias_gelu(product.flatten(0, -2), self.fc1.bias)
        result: Tensor = self.fc2(inner.view(product.shape))
        return result


def fuse_feed_forward(model: Any) -> int:
    """In every layer, after `replace_gelu`; how many."""
    found = [m for m in model.modules() if type(m) is ViTMLP]
    fitting = [m for m in found if isinstance(m.activation_fn, Gelu)]
    for module in fitting:
        module.__class__ = FeedForward
    return len(fitting)
