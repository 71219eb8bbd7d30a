"""Check that a part of a model is an unchanged class of PyTorch or transformers.

Fused parts read weights without calling the layers that own them. They would silently
bypass changed layers (adapters, quantised or parametrised layers, custom code of a
checkpoint), so every fused part performs this check first.
"""

from __future__ import annotations

from typing import Any

from torch import nn

OWN = ("torch.nn.modules.", "transformers.models.", "transformers.activations")
"""The prefixes of the modules that define PyTorch's and transformers' layers."""


def is_plain(*layers: nn.Module) -> bool:
    """Return whether the class of each layer is from PyTorch or transformers, and no
    layer has another forward method assigned to it, as some libraries do."""
    own = (type(layer).__module__.startswith(OWN) for layer in layers)
    return all(own) and not any("forward" in vars(layer) for layer in layers)


def are_matrices(*layers: Any) -> bool:
    """Return whether each layer is an unchanged Linear without hooks. Either all or
    none of the layers must have a bias."""
    plain = all(type(layer) is nn.Linear and is_alone(layer) for layer in layers)
    return plain and len({layer.bias is None for layer in layers}) == 1


def are_called(*layers: Any) -> bool:
    """Return whether each layer is an unchanged Linear or has a peft adapter."""
    return all(are_matrices(layer) or _is_adapted(layer) for layer in layers)


def _is_adapted(layer: nn.Module) -> bool:
    return type(layer).__module__.startswith("peft.tuners.lora.")


def is_alone(*layers: nn.Module) -> bool:
    """Return whether each layer is unchanged and calling it runs no hooks."""
    hooks = any(m._forward_hooks or m._forward_pre_hooks for m in layers)
    return is_plain(*layers) and not hooks
