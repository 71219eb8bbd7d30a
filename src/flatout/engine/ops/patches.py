"""Compute convolutions over non-overlapping patches as one matmul.

cuDNN pads three channels to eight and runs a convolution. For the patches of 512 images
in ViT-S/16, this takes 2.9 ms forward and backward on an H200. The kernel that writes
the pixels can instead arrange the patches as the rows of a matrix at no extra cost.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class PatchProduct(nn.Conv2d):
    """A replacement for a convolution over patches, with the same weights."""

    def forward(self, pixels: Tensor) -> Tensor:
        """Return features (B, N, H / p, W / p), with channels last in memory, for
        `pixels` (B, C, H, W) and patches of p x p pixels."""
        (high, wide), (rows, columns) = self.kernel_size, pixels.shape[2:]
        pixels = pixels[..., : rows // high * high, : columns // wide * wide]
        down, across = rows // high, columns // wide
        # Keep channels last, as in memory: channels first would read every third value.
        laid = pixels.permute(0, 2, 3, 1)
        parts = laid.reshape(len(laid), down, high, across, wide, -1)
        patches = parts.permute(0, 1, 3, 2, 4, 5).flatten(3)
        weight = self.weight.permute(0, 2, 3, 1).flatten(1)
        return F.linear(patches, weight, self.bias).permute(0, 3, 1, 2)


def replace_patches(model: nn.Module) -> int:
    """Replace convolutions over non-overlapping patches, and return their number."""
    places = [m for m in model.modules() if type(m) is nn.Conv2d and _is_product(m)]
    for place in places:
        place.__class__ = PatchProduct
    return len(places)


def _is_product(layer: nn.Conv2d) -> bool:
    apart = layer.kernel_size == layer.stride and max(layer.kernel_size) > 1
    plain = layer.groups == 1 and not any(layer.padding) and set(layer.dilation) == {1}
    return apart and plain
