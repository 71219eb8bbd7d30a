"""Check that a part of a model is an unchanged class of PyTorch or transformers.

Fused parts read weights without calling the layers that own them. They would silently
bypass replaced layers (adapters, quantised or parametrised layers, a checkpoint's
custom code), so every fused part performs this check first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

OWN = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
"""The prefixes of the modules that define PyTorch's and transformers' layers."""


def is_plain(*layers: nn.Module) -> bool:
    """Return whether each layer is from PyTorch or transformers and has its original
    forward method, which some libraries replace on the layer itself."""
    own = (type(layer).__module__.startswith(OWN) for layer in layers)
    return all(own) and not any("forward" in vars(layer) for layer in layers)


def are_matrices(*layers: Any) -> bool:
    """Return whether each layer is a Linear without hooks, and whether either all or
    none of them have a bias."""
    plain = all(type(layer) is nn.Linear and is_alone(layer) for layer in layers)
    return plain and len({layer.bias is None for layer in layers}) == 1


def are_called(*layers: Any) -> bool:
    """Return whether each layer is a Linear or has a peft adapter, so that calling the
    layers one by one gives the outputs of linear layers."""
    return all(are_matrices(layer) or _is_adapted(layer) for layer in layers)


def _is_adapted(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("peft.tuners.lora.")


def is_exact_gelu(layer: nn.Module) -> bool:
    """Return whether `layer` is GELU with the error function, not an approximation."""
    from transformers.activations import GELUActivation

    is_gelu = type(layer) in (GELUActivation, nn.GELU) and is_alone(layer)
    return is_gelu and getattr(layer, "approximate", "none") == "none"


def is_alone(*layers: nn.Module) -> bool:
    """Return whether calling each layer runs only its original forward method."""
    hooks = any(m._forward_hooks or m._forward_pre_hooks for m in layers)
    return is_plain(*layers) and not hooks
