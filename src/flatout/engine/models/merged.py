"""Files next to an adapter in the folder of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flatout.engine.models.adapters import MARK, MERGED, has_adapter
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import ModelSettings


@dataclass(frozen=True)
class AdapterFiles:
    """The config of an adapted model, and the model with the adapter merged into its
    weights, which is saved after the adapter."""

    config: Any
    parts: Sequence[Any]
    """Parts that the folder of the merged model also needs."""
    merged: bool
    trust_remote_code: bool = False

    @classmethod
    def of(
        cls, model: Any, parts: Sequence[Any], settings: ModelSettings
    ) -> tuple[AdapterFiles, ...]:
        """The files of `model`; none without an adapter."""
        if not has_adapter(model):
            return ()
        lora, trusts = settings.lora, settings.trust_remote_code
        return (cls(model.config, parts, lora.merged, trusts),)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save next to the adapter."""
        self.config.save_pretrained(folder)
        if not self.merged:
            return
        trusts = self.trust_remote_code
        whole = load_pretrained(Path(folder), trust_remote_code=trusts)
        setattr(whole.config, MARK, True)
        for part in (whole, *self.parts):
            part.save_pretrained(Path(folder, MERGED))
