"""What all groups of parameters share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

Strategy = Literal["fixed", "random", "grouped", "packed"]
Task = Literal["sequence-classification", "regression", "causal-lm", "masked-lm"]
Precision = Literal["fp32", "bf16", "fp16"]
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]

CLASSIFIES: frozenset[str] = frozenset({"sequence-classification", "regression"})
"""Tasks with one target a row; the others have one a token."""


class SettingsError(ValueError):
    """Parameters that cannot be used; the text lists every fault with its path."""


class SettingsModel(BaseModel):
    """Unknown keys are refused; nothing changes once it is checked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
    )
