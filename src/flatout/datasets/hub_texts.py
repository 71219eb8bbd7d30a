"""A data set of the Hugging Face Hub as raw rows."""

from __future__ import annotations

from typing import Any

from kedro.io import AbstractDataset, DatasetError


class HubTexts(AbstractDataset[None, Any]):
    """Read-only rows of `name` on the Hub (or of a folder), by `datasets.load_dataset`.

    `split` may join several (`train+test`); null: its own, as they are. `revision`, a
    commit, keeps the rows the same for ever. (Kedro's HFDataset asks the Hub again
    each time its name is printed, so it fails without network, and imports torch.)
    """

    def __init__(
        self,
        *,
        name: str,
        split: str | None = "train",
        subset: str | None = None,
        revision: str | None = None,
        cache_dir: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self._name, self._subset = name, subset
        self._options = {"split": split, "revision": revision, "cache_dir": cache_dir}
        self.metadata = metadata

    def load(self) -> Any:
        from datasets import config, load_dataset

        try:
            return load_dataset(self._name, self._subset, **self._options)
        except (OSError, ValueError, RuntimeError) as error:
            cache = self._options["cache_dir"] or config.HF_DATASETS_CACHE
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise DatasetError(
                f"the data set {self._name!r} could not be loaded ({lines[0]}). It was "
                f"looked for as a folder, in the cache {cache} and on the Hugging Face "
                "Hub. Check its name, subset and split; without network fill the cache "
                "elsewhere, or give the files themselves (flatout.datasets.TextFiles)"
            ) from error

    def save(self, data: None) -> None:
        raise DatasetError("a data set of the Hub is read-only here")

    def _describe(self) -> dict[str, Any]:
        return {"name": self._name, "subset": self._subset, **self._options}
