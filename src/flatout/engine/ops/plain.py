"""Whether a part of a model is as PyTorch and transformers bring it.

Fused parts read weights without calling the layer that holds them. What somebody put in
its place (adapters, quantised or parametrised layers, code of a checkpoint) would be
bypassed without a word, so every fused part asks here first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

OWN = ("torch.nn.modules.", "transformers.models.")
"""Modules of the layers that PyTorch and transformers bring."""


def is_plain(*layers: nn.Module) -> bool:
    """Whether each is a layer of PyTorch's or transformers' own."""
    return all(type(layer).__module__.startswith(OWN) for layer in layers)


def are_matrices(*layers: Any) -> bool:
    """Whether each is a plain matrix, and all have a bias or none has one."""
    plain = all(type(layer) is nn.Linear for layer in layers)
    return plain and len({layer.bias is None for layer in layers}) == 1


def is_exact_gelu(layer: nn.Module) -> bool:
    """GELU by the error function, not by an approximation of it."""
    from transformers.activations import GELUActivation

    is_gelu = type(layer) in (GELUActivation, nn.GELU)
    return is_gelu and getattr(layer, "approximate", "none") == "none"
