"""Kedro's entry types for the recipes of flatout: tables, figures, reports.

They save a DataFrame, a `datasets.Dataset` or a plain value, and know no recipe.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from kedro.io import AbstractDataset

from flatout.datasets._entry import dataset_errors
from flatout.engine.data.raw_texts import SPLITS

READ_AGAIN = frozenset(
    f"{split}_{kind}" for split in SPLITS for kind in ("rows", "tokens")
)
"""Tables that another pipeline reads, which must be unchanged."""
OURS_ALONE = frozenset({"tokenizer", "tokenizer_file", "token_figure"})
RECIPES = (
    READ_AGAIN
    | OURS_ALONE
    | {
        "predictions",
        "rejected_rows",
        "split_report",
        "test_figures",
        "test_predictions",
        "token_report",
        "triplets",
    }
)
KEEP_TYPES = ("ArrowDataset", "ParquetDataset", "FeatherDataset")


def is_generic(dataset: AbstractDataset[Any, Any]) -> bool:
    return type(dataset).__module__.startswith("kedro_datasets.")


def fault_of(name: str, dataset: AbstractDataset[Any, Any]) -> str | None:
    """Why the entry `name` cannot have this type, and the type to use instead."""
    if not is_generic(dataset):
        return None
    kind = type(dataset).__name__
    entry = f"{name}: {_package(dataset)}.{kind}"
    if name in OURS_ALONE:
        return f"{entry} cannot hold it; leave out this entry: conf/base has one"
    if name in READ_AGAIN and kind not in KEEP_TYPES:
        return (
            f"{entry} loses the types of columns, and texts as NA and null, which the "
            "next pipeline reads; write type: pandas.ParquetDataset (or "
            "huggingface.ArrowDataset), or leave out this entry: conf/base has one"
        )
    return None


class GenericEntry(AbstractDataset[Any, Any]):
    """An entry of one of Kedro's types that saves the result of a recipe in the form
    that the type accepts, and loads rows as a `datasets.Dataset`."""

    def __init__(self, name: str, dataset: AbstractDataset[Any, Any]) -> None:
        self._name, self._dataset = name, dataset
        self.metadata = getattr(dataset, "metadata", None)

    def load(self) -> Any:
        data = self._dataset.load()
        return _rows(data) if self._name in READ_AGAIN else data

    def save(self, data: Any) -> None:
        with dataset_errors():
            plain = _plain(data, _package(self._dataset))
        self._dataset.save(plain)

    def _exists(self) -> bool:
        return self._dataset.exists()

    def _describe(self) -> dict[str, Any]:
        return self._dataset._describe()


def _package(dataset: AbstractDataset[Any, Any]) -> str:
    return type(dataset).__module__.split(".")[1]


def _plain(data: Any, package: str) -> Any:
    if hasattr(type(data), "value"):
        return data.value()
    if hasattr(type(data), "batches"):
        table = pa.Table.from_batches(data.batches(), data.schema)
    elif hasattr(type(data), "table"):
        table = data.table()
    else:
        return data  # from a node of the user
    if package == "huggingface":
        from datasets import Dataset

        return Dataset(table)
    return table.to_pandas()


def _rows(data: Any) -> Any:
    from datasets import Dataset

    if isinstance(data, dict):  # the Hub's readers return splits by name
        (data,) = data.values()
    if isinstance(data, Dataset):
        return data
    return Dataset(pa.Table.from_pandas(data, preserve_index=False))
