"""The stem of a ResNet, whose images are largest, for compiled steps.

Its convolution is 7 x 7 with a stride of 2 on three channels. Tensor cores take
channels by eights: cuDNN pads three to eight, and works on five of nothing. With four
pixels at a place the same sum is a convolution of 4 x 4 with a stride of 1 on twelve
channels. The ReLU and the max pooling behind it are one kernel
(kernels/rectified_pool.py).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EIGHTS = 8


class FoldedConvolution(nn.Conv2d):
    """In place of such a convolution, with its weights."""

    def forward(self, pixels: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, N, H / 2, W / 2), rounded up."""
        if torch.compiler.is_compiling() and not any(s % 2 for s in pixels.shape[2:]):
            return self.folded(pixels)
        plain: Tensor = super().forward(pixels)
        return plain

    def folded(self, pixels: Tensor) -> Tensor:
        """Of even sides. An eighth row and column of weights, of zeros, come first, so
        that each window begins at an even place."""
        kind = pixels.device.type
        if torch.is_autocast_enabled(kind):
            pixels = pixels.to(torch.get_autocast_dtype(kind))
        windows = _folded(F.pad(pixels, (4, 2, 4, 2)))
        return F.conv2d(windows, _folded(F.pad(self.weight, (1, 0, 1, 0))), self.bias)


def _folded(values: Tensor) -> Tensor:
    """(B, C, 2 H, 2 W) -> (B, 4 C, H, W), channels last in memory, and channels of
    zeros up to eights."""
    count, channels, high, wide = values.shape
    parts = values.reshape(count, channels, high // 2, 2, wide // 2, 2)
    laid = parts.permute(0, 2, 4, 1, 3, 5).flatten(3)
    return F.pad(laid, (0, -laid.shape[3] % EIGHTS)).permute(0, 3, 1, 2)


class RectifiedPool(nn.MaxPool2d):
    """In place of the max pooling and the ReLU before it."""

    def forward(self, states: Tensor) -> Tensor:
        """(B, N, H, W) -> (B, N, H / 2, W / 2), rounded up."""
        if states.is_cuda and torch.compiler.is_compiling():
            from flatout.engine.ops.kernels.rectified_pool import rectified_pool

            out: Tensor = rectified_pool(states.permute(0, 2, 3, 1))[0]
            return out.permute(0, 3, 1, 2)
        plain: Tensor = super().forward(states.relu())
        return plain


def fold_stem(model: Any) -> bool:
    """Put it in the place of the convolution; whether it is one."""
    layer = model.base_model.embedder.embedder.convolution
    shape = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    usual = shape == ((7, 7), (2, 2), (3, 3), (1, 1)) and layer.groups == 1
    if type(layer) is not nn.Conv2d or not usual or layer.in_channels >= EIGHTS:
        return False
    layer.__class__ = FoldedConvolution
    return True


def rectify_pool(model: Any) -> bool:
    """Put it in the place of ReLU and pooling; whether they are so."""
    layer, pool = model.base_model.embedder.embedder, model.base_model.embedder.pooler
    shape = pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.ceil_mode
    usual = type(pool) is nn.MaxPool2d and shape == (3, 2, 1, 1, False)
    if not usual or type(layer.activation) is not nn.ReLU:
        return False
    pool.__class__, layer.activation = RectifiedPool, nn.Identity()
    return True
