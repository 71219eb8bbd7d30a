"""A last layer whose output is a quantity, in fp32.

bf16 would give 276 for 274.54, and steps of 8 from 1,024 on.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class _FullPrecision(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        """(K, hidden) of any type -> (K, outputs) fp32."""
        bias = None if self.bias is None else self.bias.float()
        with torch.autocast(input.device.type, enabled=False):
            return F.linear(input.float(), self.weight.float(), bias)


def keep_output_precise(model: Any) -> None:
    """The last layer computes in fp32, whatever the model does."""
    outputs = [
        module
        for module in model.modules()
        if type(module) is nn.Linear and module.out_features == model.config.num_labels
    ]
    if outputs:
        outputs[-1].__class__ = _FullPrecision
