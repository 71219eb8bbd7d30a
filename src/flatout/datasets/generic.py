"""Kedro's entry types for the recipes of flatout: tables, figures, reports.

They save a DataFrame, a `datasets.Dataset` or a plain value, and know no recipe.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from kedro.io import AbstractDataset

from flatout.datasets._entry import dataset_errors
from flatout.engine.data.raw_texts import SPLITS

OURS_ALONE = frozenset(
    {
        *(f"{split}_{kind}" for split in SPLITS for kind in ("rows", "tokens")),
        *("tokenizer", "tokenizer_file"),
    }
)
"""Entries that another pipeline reads, in the form in which flatout writes them."""
RECIPES = OURS_ALONE | {
    "predictions",
    "rejected_rows",
    "split_report",
    "test_figures",
    "test_predictions",
    "triplets",
}


def is_generic(dataset: AbstractDataset[Any, Any]) -> bool:
    return type(dataset).__module__.startswith("kedro_datasets.")


def fault_of(name: str, dataset: AbstractDataset[Any, Any]) -> str | None:
    """Why the entry `name` cannot have this type; None if it can."""
    if name not in OURS_ALONE or not is_generic(dataset):
        return None
    return (
        f"{name}: {_package(dataset)}.{type(dataset).__name__} cannot hold it; leave "
        "out this entry: conf/base has one"
    )


class GenericEntry(AbstractDataset[Any, Any]):
    """An entry of one of Kedro's types that saves the result of a recipe in the form
    that the type accepts."""

    def __init__(self, dataset: AbstractDataset[Any, Any]) -> None:
        self._dataset = dataset
        self.metadata = getattr(dataset, "metadata", None)

    def load(self) -> Any:
        return self._dataset.load()

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
