"""Precision other than autocast's: the residual stream in the type of the matrix
products, and a last layer in fp32.

Autocast runs LayerNorm in fp32 and keeps its output in fp32, so everything except a
matrix product moves twice the bytes: a third of a BERT-base step on an H200. Here a
block's output and a norm's output are rounded to the autocast type, like in models that
train in bf16 throughout; norms, softmax, loss, weights and optimizer stay fp32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def round_residual_stream(model: Any) -> int:
    """Round the outputs of hidden-size norms and of blocks; return their number."""
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
    """Convert states, also in a tuple, to autocast's type if it is active."""
    if isinstance(output, tuple):
        return (_rounded(output[0]), *output[1:])
    return _rounded(output)


def _rounded(states: Tensor) -> Tensor:
    device = states.device.type
    if not torch.is_autocast_enabled(device):
        return states
    return states.to(torch.get_autocast_dtype(device))


class _FullPrecision(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        """(K, hidden) of any type -> (K, outputs) fp32."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


def keep_output_precise(model: Any) -> None:
    """Compute the last layer, whose output is a quantity, in fp32 for any precision of
    the model: bf16 would give 276 for 274.54, and steps of 8 from 1,024 on."""
    outputs = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.out_features == model.config.num_labels
    ]
    if outputs:
        outputs[-1].__class__ = _FullPrecision
