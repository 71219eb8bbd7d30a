"""Whether a part of a model is as PyTorch and transformers bring it.

Fused parts read weights without calling the layer that holds them. What somebody put in
its place (adapters, quantised or parametrised layers, code of a checkpoint) would be
bypassed without a word, so every fused part asks here first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

OWN = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
"""Modules of the layers that PyTorch and transformers bring."""


def is_plain(*layers: nn.Module) -> bool:
    """Whether each is a layer of PyTorch's or transformers' own, with its own forward
    pass: some libraries put another one on the layer itself."""
    own = (type(layer).__module__.startswith(OWN) for layer in layers)
    return all(own) and not any("forward" in vars(layer) for layer in layers)


def are_matrices(*layers: Any) -> bool:
    """Whether each is a plain matrix without hooks, and all have a bias or none has."""
    plain = all(type(layer) is nn.Linear and _is_alone(layer) for layer in layers)
    return plain and len({layer.bias is None for layer in layers}) == 1


def is_exact_gelu(layer: nn.Module) -> bool:
    """GELU by the error function, not by an approximation of it."""
    from transformers.activations import GELUActivation

    is_gelu = type(layer) in (GELUActivation, nn.GELU) and _is_alone(layer)
    return is_gelu and getattr(layer, "approximate", "none") == "none"


def _is_alone(layer: nn.Module) -> bool:
    """Whether calling the plain `layer` runs nothing but its forward pass."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    return is_plain(layer) and not hooks
