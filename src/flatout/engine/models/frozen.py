"""Parameters of a model that are not trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from flatout.engine.parameters import SettingsError, near_or_all

if TYPE_CHECKING:
    from torch import nn


def freeze(model: nn.Module, patterns: Sequence[str]) -> None:
    """Freeze parameters whose name matches one of `patterns` between two dots: autograd
    then stops at the lowest trained one. Raises SettingsError for a pattern without a
    match, and if no parameter is left to train."""
    for pattern in patterns:
        fits = re.compile(rf"(^|\.)({pattern})(\.|$)").search
        found = [p for name, p in model.named_parameters() if fits(name)]
        if not found:
            parts = {
                part for name, _ in model.named_modules() for part in name.split(".")
            }
            near = near_or_all(pattern, [part for part in parts if part.isidentifier()])
            raise SettingsError(f"train.freeze: {pattern!r} matches no module; {near}")
        for parameter in found:
            parameter.requires_grad_(False)
    if not any(p.requires_grad for p in model.parameters()):
        raise SettingsError("train.freeze leaves nothing to train: remove a pattern")
