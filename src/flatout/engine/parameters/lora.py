"""Parameters of adapters."""

from __future__ import annotations

from pydantic import Field, model_validator

from flatout.engine.parameters.common import (
    EXECUTION,
    UNTIMED,
    Count,
    Names,
    SettingsModel,
    parameter,
)


class LoraSettings(SettingsModel):
    """LoRA (Hu et al. 2021) with peft: the checkpoint's weights are frozen, and a small
    product of two matrices is trained next to each target layer."""

    rank: Count | None = None
    """Inner size of the product. null: no adapter, all weights are trained."""
    alpha: int = Field(16, ge=1)
    """Scale of the product: it is multiplied by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout of the product's input."""
    targets: Names = []
    """Ends of layer names, for example `query` and `value`. Empty: all linear layers of
    the blocks. A head of a classifier is trained whole."""
    use_dora: bool = False
    """Train the lengths of the columns separately (DoRA, Liu et al. 2024)."""
    merged: bool = parameter(False, EXECUTION, UNTIMED)
    """Also save the model with the adapter merged into its weights."""

    @property
    def is_on(self) -> bool:
        return self.rank is not None

    @model_validator(mode="after")
    def _has_a_rank(self) -> LoraSettings:
        known = type(self).model_fields.items()
        given = [name for name, field in known if getattr(self, name) != field.default]
        if given and self.rank is None:
            names = ", ".join(given)
            raise ValueError(f"{names} without rank: set rank too, for example to 16")
        return self
