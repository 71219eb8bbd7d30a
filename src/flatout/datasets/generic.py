"""Kedro's own entries where flatout's nodes give recipes: tables, figures, reports.

They save a DataFrame, a `datasets.Dataset` or a plain value, and know no recipe.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pyarrow as pa
from kedro.io import AbstractDataset

from flatout.datasets._entry import dataset_errors
from flatout.engine.data.raw_texts import SPLITS

READ_AGAIN = frozenset(
    f"{split}_{kind}" for split in SPLITS for kind in ("rows", "tokens")
)
"""Tables that another pipeline reads, and needs as they were."""
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
    }
)
KEEP_TYPES = ("ArrowDataset", "ParquetDataset", "FeatherDataset")


def is_generic(dataset: AbstractDataset[Any, Any]) -> bool:
    return type(dataset).__module__.startswith("kedro_datasets.")


def fault_of(name: str, dataset: AbstractDataset[Any, Any]) -> str | None:
    """Why the entry `name` cannot be of that type, and what to write instead."""
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


def accept_recipes(name: str, dataset: AbstractDataset[Any, Any]) -> None:
    """Let a generic `dataset` save what a recipe makes, in the form that it knows, and
    load rows as a `datasets.Dataset`."""
    dataset.save = partial(_save, dataset.save, _package(dataset))  # type: ignore[method-assign]
    if name in READ_AGAIN:
        dataset.load = partial(_load, dataset.load)  # type: ignore[method-assign]


def _package(dataset: AbstractDataset[Any, Any]) -> str:
    return type(dataset).__module__.split(".")[1]


def _save(save: Any, package: str, data: Any) -> None:
    with dataset_errors():
        plain = _plain(data, package)
    save(plain)


def _plain(data: Any, package: str) -> Any:
    if hasattr(type(data), "value"):
        return data.value()
    if hasattr(type(data), "batches"):
        table = pa.Table.from_batches(data.batches(), data.schema)
    elif hasattr(type(data), "table"):
        table = data.table()
    else:
        return data  # of a node of the user's own
    if package == "huggingface":
        from datasets import Dataset

        return Dataset(table)
    return table.to_pandas()


def _load(load: Any) -> Any:
    from datasets import Dataset

    data = load()
    if isinstance(data, dict):  # of the Hub's readers: splits by name
        (data,) = data.values()
    if isinstance(data, Dataset):
        return data
    return Dataset(pa.Table.from_pandas(data, preserve_index=False))
