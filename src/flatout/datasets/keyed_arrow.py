"""Arrow folders that are written only when their content would change."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from kedro.io import AbstractDataset, DatasetError

from flatout.datasets._keyed import dataset_errors, log_changes
from flatout.engine.files.arrow_folder import ArrowRecipe, TableRecipe, write_recipe
from flatout.engine.files.atomic_folder import is_current, stored_key

logger = logging.getLogger(__name__)


class KeyedArrowDataset(AbstractDataset[Any, Any]):
    """A folder in the format of `huggingface.ArrowDataset` with a content key.

    Saving takes a recipe: where the folder's key is the recipe's, nothing is done;
    otherwise the changed fields are named and the folder is replaced as a whole.
    Loading gives a memory-mapped `datasets.Dataset`. (Not a subclass of Kedro's class:
    importing that imports torch, which split must not.)
    """

    def __init__(
        self, *, filepath: str, metadata: dict[str, Any] | None = None
    ) -> None:
        self._folder = Path(filepath)
        self.metadata = metadata

    def load(self) -> Any:
        from datasets import load_from_disk

        if not self._exists():
            raise DatasetError(
                f"{self._folder} holds no finished data: run the pipelines "
                "that make it (kedro run --pipelines=split,tokenize)"
            )
        return load_from_disk(str(self._folder))

    def save(self, data: ArrowRecipe | Any) -> None:
        recipe = data if isinstance(data, ArrowRecipe) else _of_dataset(data)
        if is_current(self._folder, recipe.key):
            logger.info("%s: unchanged, kept", self._folder.name)
            return
        log_changes(self._folder.name, recipe.key, stored_key(self._folder))
        recipe.prepare(self._folder.parent)
        with dataset_errors():
            rows = write_recipe(self._folder, recipe)
        logger.info("%s: %s rows written", self._folder.name, f"{rows:,}")

    def _exists(self) -> bool:
        return stored_key(self._folder) is not None or (
            (self._folder / "state.json").is_file()
        )

    def _describe(self) -> dict[str, Any]:
        return {"filepath": str(self._folder)}


def _of_dataset(data: Any) -> ArrowRecipe:
    """Rows made by somebody else: a `datasets.Dataset`."""
    if type(data).__name__ != "Dataset":
        raise DatasetError(
            f"a recipe or a datasets.Dataset is saved here, not {type(data).__name__}"
        )
    flat = data.flatten_indices() if data._indices is not None else data
    return TableRecipe(flat.data.table)
