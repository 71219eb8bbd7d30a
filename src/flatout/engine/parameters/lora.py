"""Parameters of LoRA adapters."""

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
    """LoRA (Hu et al. 2021) with peft. The weights of the checkpoint are frozen, and
    the product of two small matrices is trained alongside each target layer."""

    rank: Count | None = None
    """Rank of the two matrices. If null, no adapter is used and all weights are
    trained."""
    alpha: int = Field(16, ge=1)
    """Scale of the adapter: the product of the matrices is multiplied by alpha /
    rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability for the input of the adapter's matrices."""
    targets: Names = []
    """Suffixes of layer names, for example `query` and `value`. If empty, all linear
    layers of the blocks are adapted. A classifier's head is always trained in full."""
    use_dora: bool = False
    """Train the magnitudes of the columns separately (DoRA, Liu et al. 2024)."""
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
