"""Products with the same input as one product: query, key and value; gate and up.

A 768 x 768 product runs at 460 of the 710 TFLOP/s that a 768 x 3072 one reaches on an
H200. The weights stay where they are, so checkpoints do not change: their rows are
laid under one another for the product, and its columns are handed out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def _linear(states: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    if bias is None or not states.is_cuda:
        return F.linear(states, weight, bias)
    product = F.linear(states, weight, bias.detach())
    result: Tensor = _BiasGradient.apply(product, bias)  # type: ignore[no-untyped-call]
    return result


class _BiasGradient(torch.autograd.Function):
    """The product as it is; its gradient summed over rows by our own kernel, because
    Inductor's takes twice the time that reading needs (column_sum.py)."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, bias: Tensor) -> Tensor:
        return product.view_as(product)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        from flatout.engine.ops.kernels.column_sum import column_sum

        return grad, column_sum(grad.flatten(0, -2))


class _Group:
    """Layers of one input, the first of which computes for all."""

    def __init__(self, members: list[nn.Linear], keeps_product: bool) -> None:
        self.members = members
        self.keeps_product = keeps_product
        self.product: Tensor | None = None
        self.waiting: list[Tensor] = []

    def fused(self, states: Tensor) -> Tensor:
        """(..., in) -> all layers' products side by side."""
        weights: list[Tensor] = [member.weight for member in self.members]
        biases: list[Tensor] = [m.bias for m in self.members if m.bias is not None]
        bias = torch.cat(biases) if biases else None
        return _linear(states, torch.cat(weights), bias)

    def compute(self, states: Tensor) -> Tensor:
        """(..., in) -> the first layer's (..., out); the others' wait to be fetched."""
        product = self.fused(states)
        sizes = [member.out_features for member in self.members]
        first, *rest = product.split_with_sizes(sizes, -1)
        self.waiting = list(rest)  # to Dynamo `rest` is a tuple
        if self.keeps_product:
            self.product = product
        return first


def fused_product(first: Any, states: Tensor) -> Tensor:
    """(..., in) -> what `first` and the layers fused with it give, side by side."""
    product: Tensor = first.group.fused(states)
    return product


def is_fused(layer: nn.Module) -> bool:
    """Whether it computes for others too."""
    return isinstance(layer, _First)


def take_product(module: nn.Module) -> Tensor | None:
    """Query, key and value of an attention module side by side (..., 3 H D), once;
    None where they were computed apart, or are changed before they meet."""
    first = getattr(module, "query", None) or getattr(module, "q_lin", None)
    group = getattr(first, "group", None)
    if group is None:
        return None
    product, group.product = group.product, None
    result: Tensor | None = product
    return result


class _First(nn.Linear):
    group: _Group

    def forget(self) -> None:
        """Drop what a pass that failed left here: it holds that pass's activations."""
        self.group.product, self.group.waiting = None, []

    def forward(self, states: Tensor) -> Tensor:
        return self.group.compute(states)


class _Next(nn.Linear):
    group: _Group

    def forward(self, states: Tensor) -> Tensor:
        return self.group.waiting.pop(0)


def fuse_projections(
    model: Any, groups: Sequence[tuple[str, ...]], *, keep_products: bool = False
) -> int:
    """Fuse layers that one module applies, in the order of a group of names, to one
    input; how many groups. `keep_products`: for an attention that asks for them with
    `take_product`, where query, key and value reach it without a rotation or norm."""
    found = [
        members
        for module in model.base_model.modules()
        for names in groups
        if (members := _members(module, names))
    ]
    for members in found:
        group = _Group(members, keep_products)
        for kind, member in zip((_First, *[_Next] * 8), members, strict=False):
            member.__class__ = kind
            member.group = group  # type: ignore[assignment]
    return len(found)


def _members(module: nn.Module, names: tuple[str, ...]) -> list[nn.Linear]:
    """The named layers of a module; none where one is missing or of another kind."""
    layers = [getattr(module, name, None) for name in names]
    plain = [layer for layer in layers if type(layer) is nn.Linear]
    alike = len({layer.bias is None for layer in plain}) == 1
    return plain if len(plain) == len(names) and alike else []
