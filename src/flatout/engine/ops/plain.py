"""Check that a part of a model is the unchanged class of PyTorch or transformers.

Fused parts read weights without calling the layer that has them. They would silently
bypass replacements (adapters, quantised or parametrised layers, code of a checkpoint),
so every fused part checks this first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

OWN = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
"""Prefixes of modules with layers of PyTorch and transformers."""


def is_plain(*layers: nn.Module) -> bool:
    """Return whether each is a layer of PyTorch or transformers with an unchanged
    forward method: some libraries set another one on the layer itself."""
    own = (type(layer).__module__.startswith(OWN) for layer in layers)
    return all(own) and not any("forward" in vars(layer) for layer in layers)


def are_matrices(*layers: Any) -> bool:
    """Return whether each is a Linear without hooks, with a bias in all or in none."""
    plain = all(type(layer) is nn.Linear and _is_alone(layer) for layer in layers)
    return plain and len({layer.bias is None for layer in layers}) == 1


def are_called(*layers: Any) -> bool:
    """Return whether each is a Linear or has an adapter of peft, so that calling them
    one by one gives the outputs of linear layers."""
    return all(are_matrices(layer) or _is_adapted(layer) for layer in layers)


def _is_adapted(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("peft.tuners.lora.")


def is_exact_gelu(layer: nn.Module) -> bool:
    """Return whether this is GELU with the error function, not an approximation."""
    from transformers.activations import GELUActivation

    is_gelu = type(layer) in (GELUActivation, nn.GELU) and _is_alone(layer)
    return is_gelu and getattr(layer, "approximate", "none") == "none"


def _is_alone(layer: nn.Module) -> bool:
    """Return whether calling the plain `layer` runs only its forward pass."""
    hooks = layer._forward_hooks or layer._forward_pre_hooks
    return is_plain(layer) and not hooks
