"""Crop, flip and resize images on the device.

The task draws the crops. A crop is a row (left, top, width, height, flip). The first
four values are fractions of the image size, and flip is 1 for flipped crops and 0 for
others. The cropped area is resized to the full image size with bilinear interpolation.
Edge pixels are repeated beyond the image.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample


def cropped(pixels: Tensor, crops: Tensor) -> Tensor:
    """Apply `crops` (B, 5) to `pixels` (B, H, W, C), which are bytes or floats. The
    result is an fp32 tensor of the same shape."""
    if torch.compiler.is_compiling():
        return gathered(pixels, crops)
    return sampled(pixels, crops)


def sampled(pixels: Tensor, crops: Tensor) -> Tensor:
    """Apply `crops` (B, 5) to `pixels` (B, H, W, C) with PyTorch's `grid_sample`."""
    left, top, width, height, mirrored = crops.unbind(1)
    zero, sign = torch.zeros_like(left), 1 - 2 * mirrored
    rows = [
        torch.stack([sign * width, zero, 2 * left + width - 1], 1),
        torch.stack([zero, height, 2 * top + height - 1], 1),
    ]
    planes = pixels.permute(0, 3, 1, 2).float()
    grid = affine_grid(torch.stack(rows, 1), list(planes.shape), align_corners=False)
    cut = grid_sample(planes, grid, padding_mode="border", align_corners=False)
    return cut.permute(0, 2, 3, 1)


def gathered(pixels: Tensor, crops: Tensor) -> Tensor:
    """Apply `crops` (B, 5) to `pixels` (B, H, W, C) by indexing. When compiled, this
    needs no intermediate tensors and takes 0.4 ms for 512 images of 224 x 224 pixels on
    an H200."""
    _, high, wide, _ = pixels.shape
    left, top, width, height, mirrored = crops.unbind(1)
    up, down, below = _between(_places(high, top, height), high)
    across = _places(wide, left, width)
    flipped = torch.where(mirrored[:, None] > 0, across.flip(1), across)
    west, east, to_right = _between(flipped, wide)
    image = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    below, to_right = below[:, :, None, None], to_right[:, None, :, None]

    def at(row: Tensor, column: Tensor) -> Tensor:
        return pixels[image, row[:, :, None], column[:, None, :]].float()

    first = torch.lerp(at(up, west), at(up, east), to_right)
    second = torch.lerp(at(down, west), at(down, east), to_right)
    return torch.lerp(first, second, below)


def _places(size: int, start: Tensor, share: Tensor) -> Tensor:
    """Return the position (B, size) of each output pixel's centre in the input. The
    crop begins at `start` (B,) and has the width `share` (B,). Both are fractions."""
    middles = (torch.arange(size, device=start.device) + 0.5) / size
    return (start[:, None] + middles * share[:, None]) * size - 0.5


def _between(places: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of the two pixels next to each of `places` (B, size), and the
    weight of the second pixel, all of shape (B, size)."""
    inside = places.clamp(0, size - 1)
    low = inside.floor()
    return low.long(), (low + 1).clamp(max=size - 1).long(), inside - low
