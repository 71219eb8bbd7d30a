"""A dataset that stores a Hugging Face model in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kedro.io import DatasetError

from flatout.datasets._entry import PathDataset
from flatout.engine.files.atomic_write import clear_leftovers, write_folder

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class TransformersModel(PathDataset):
    """A folder with a Hugging Face model.

    The model is saved with `save_pretrained` (safetensors) and loaded with the
    architecture given in its config. If a tokenizer is saved with the model,
    `transformers.pipeline` needs only the folder. The folder is written under a
    temporary name and then renamed, so it is never incomplete. Code in the folder runs
    only if `load_args` contains `trust_remote_code: true`.

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
        super().__init__(filepath=filepath, metadata=metadata)
        self._load_args = dict(load_args or {})

    def save(self, data: Any) -> None:
        """Replace the folder with `data`, a model or a tuple of model and tokenizer."""
        parts = data if isinstance(data, tuple) else (data,)
        self._path.parent.mkdir(parents=True, exist_ok=True)
        clear_leftovers(self._path.parent)

        def fill(folder: Path) -> None:
            for part in parts:
                part.save_pretrained(folder)

        write_folder(self._path, fill)

    def load(self) -> PreTrainedModel:
        """Return the model in evaluation mode, on the CPU. Raises DatasetError if the
        model cannot be loaded."""
        from flatout.engine.models.building import ModelError, load_pretrained

        self._check_not_empty()
        try:
            model = load_pretrained(self._path, **self._load_args)
        except ModelError as error:
            where = "(load_args of this entry, in conf/local/catalog.yml)"
            raise DatasetError(f"{error} {where}") from error
        result: PreTrainedModel = model.eval()
        return result

    def trust_code(self) -> None:
        """Allow `load` to run code in the folder, unless `load_args` forbids it. This
        is meant for models that were trained with `model.trust_remote_code`."""
        self._load_args.setdefault("trust_remote_code", True)

    def _missing(self) -> str:
        found = "has none" if self._path.exists() else "is not there"
        return (
            f"no model to load: {self._path} must be a folder with config.json and "
            f"model.safetensors, and it {found}. Train one (kedro run), or let the "
            "entry of the catalog name the folder of one"
        )

    def _exists(self) -> bool:
        return (self._path / "config.json").is_file()

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._path), "load_args": self._load_args}
