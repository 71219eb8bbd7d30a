"""A Hugging Face model as a folder of its own."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from kedro.io import AbstractDataset, DatasetError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersModel(AbstractDataset[Any, "PreTrainedModel"]):
    """Saves with `save_pretrained` (safetensors), loads the architecture that it names.

    What is saved is a model, or a model and its tokenizer, so that the folder serves
    `from_pretrained` and `transformers.pipeline` alone. The folder is whole or absent:
    it is written beside its place and then renamed. Code from the folder never runs.

    Example:
        ```yaml
        model:
          type: flatout.datasets.TransformersModel
          filepath: data/06_models/model
          load_args:
            dtype: bfloat16 # default: float32
        ```
    """

    def __init__(
        self,
        *,
        filepath: str,
        load_args: dict[str, Any] | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self._filepath = PurePosixPath(filepath)
        self._load_args = {"dtype": "float32", **(load_args or {})}
        self.metadata = metadata

    def save(self, data: Any) -> None:
        """Write `data` (a model, or model and tokenizer) in place of what was there."""
        parts = data if isinstance(data, tuple) else (data,)
        target = Path(self._filepath)
        target.parent.mkdir(parents=True, exist_ok=True)
        written = target.with_name(f".{target.name}-{uuid.uuid4().hex}")
        try:
            for part in parts:
                part.save_pretrained(written)
            _replace(target, written)
        finally:
            shutil.rmtree(written, ignore_errors=True)

    def load(self) -> PreTrainedModel:
        """The model in evaluation mode, on the CPU. Raises DatasetError."""
        import transformers

        folder = Path(self._filepath)
        self._check_there()
        config = transformers.AutoConfig.from_pretrained(
            folder, trust_remote_code=False
        )
        names = config.architectures or []
        architecture = getattr(transformers, names[0], None) if names else None
        if architecture is None:
            raise DatasetError(
                f"{folder}/config.json names {names or 'no architecture'}: not a model "
                f"of transformers {transformers.__version__}, and code from the folder "
                "is not run"
            )
        return architecture.from_pretrained(
            folder, config=config, use_safetensors=True, **self._load_args
        ).eval()

    def _check_there(self) -> None:
        if self._exists():
            return
        found = "is not there" if not Path(self._filepath).exists() else "has none"
        raise DatasetError(
            f"no model to load: {self._filepath} must be a folder with config.json and "
            f"model.safetensors, and it {found}. Train one (kedro run), or let the "
            "entry of the catalog name the folder of one"
        )

    def _exists(self) -> bool:
        return Path(self._filepath, "config.json").is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._filepath), "load_args": self._load_args}


def _replace(target: Path, written: Path) -> None:
    """Put the folder `written` at `target`; what was there goes only after that."""
    old = target.with_name(f".{target.name}-old-{uuid.uuid4().hex}")
    if target.exists():
        os.replace(target, old)
    os.replace(written, target)
    shutil.rmtree(old, ignore_errors=True)
