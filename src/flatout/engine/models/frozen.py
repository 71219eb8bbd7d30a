"""Parts of a model that stay as they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.engine.parameters import SettingsError, near_or_all

if TYPE_CHECKING:
    from torch import nn


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Parameters whose name has a part that fits one of `patterns`, as whole words
    between its dots, take no gradient: autograd goes no deeper than it must. Raises
    SettingsError for a pattern that fits nothing, and where nothing is left."""
    for pattern in patterns:
        fits = re.compile(rf"(^|\.)({pattern})(\.|$)").search
        found = [p for name, p in model.named_parameters() if fits(name)]
        if not found:
            parts = {
                part for name, _ in model.named_modules() for part in name.split(".")
            }
            near = near_or_all(pattern, [part for part in parts if part.isidentifier()])
            raise SettingsError(f"train.freeze: {pattern!r} fits no module; {near}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise SettingsError("train.freeze leaves nothing to train: take a pattern out")
