"""Change the precision that autocast chooses for the residual stream and for the
outputs of regression models.

Autocast runs LayerNorm in fp32 and keeps its output in fp32, so all operations between
matmuls move twice as many bytes. This costs a third of a BERT-base step on an H200.
This module casts the outputs of blocks and norms to the autocast dtype, as in models
that train entirely in bf16. Norms, softmax, loss, weights and optimizer stay in fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def round_residual_stream(model: Any) -> int:
    """Cast the outputs of blocks, and of norms over the hidden size, to the autocast
    dtype. Return the number of modules whose outputs are cast."""
    hidden = getattr(model.config, "hidden_size", None)
    blocks = getattr(model, "_no_split_modules", None) or ()
    places = [
        module
        for module in model.base_model.modules()
        if _is_norm(module, hidden) or type(module).__name__ in blocks
    ]
    for module in places:
        module.register_forward_hook(_round)
    return len(places)


def _is_norm(module: nn.Module, hidden: int | None) -> bool:
    weight = getattr(module, "weight", None)
    named = type(module).__name__.endswith(("LayerNorm", "RMSNorm"))
    return named and weight is not None and tuple(weight.shape) == (hidden,)


def _round(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Convert the states in `output` to autocast's dtype if autocast is active."""
    states, *rest = output if isinstance(output, tuple) else (output,)
    device = states.device.type
    if torch.is_autocast_enabled(device):
        states = states.to(torch.get_autocast_dtype(device))
    return (states, *rest) if isinstance(output, tuple) else states


class _FullPrecision(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        """Return fp32 outputs (K, outputs) for `input` (K, hidden) of any dtype."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


def keep_output_precise(model: Any) -> None:
    """Make the last linear layer compute in fp32, because it predicts a quantity. bf16
    would round 274.54 to 276, and values above 1,024 to multiples of 8."""
    outputs = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.out_features == model.config.num_labels
    ]
    if outputs:
        outputs[-1].__class__ = _FullPrecision
