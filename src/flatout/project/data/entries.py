"""Adapt catalog entries: wrap Kedro's dataset types so that they accept node results,
join splits that the user provides, and trust the code of custom models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from kedro.io import AbstractDataset, DataCatalog
from kedro.pipeline import Pipeline

from flatout.datasets import OwnSplits, TransformersModel
from flatout.datasets._entry import dataset_errors
from flatout.engine.data.given_splits import entry_of
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.parameters import SettingsError

OURS_ALONE = frozenset(
    {
        *(f"{split}_{kind}" for split in SPLITS for kind in ("rows", "tokens")),
        *("tokenizer", "tokenizer_file", "model", "last_model"),
    }
)
"""Entries that must have flatout's own format, because other pipelines read them."""
DIGITS = "flatout.datasets.Digits"
RECIPES = OURS_ALONE | {
    "predictions",
    "rejected_rows",
    "split_report",
    "triplets",
}


class GenericEntry(AbstractDataset[Any, Any]):
    """Wrapper around one of Kedro's own datasets. If a node returns a recipe, the
    wrapper executes it and saves the result in a form that the dataset accepts."""

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
        return data  # data that a custom node returned
    if package == "huggingface":
        from datasets import Dataset

        return Dataset(table)
    return table.to_pandas()


def adapt(catalog: DataCatalog, conf_catalog: Mapping[str, Any]) -> None:
    """Wrap the catalog entries of Kedro's own types so that they accept node results.
    Entries of flatout's types are not created here, because some import torch. Raises
    SettingsError if a type would lose data, or if the user provides splits without a
    train split."""
    _join_splits(catalog, conf_catalog)
    _predict_own_files(catalog, conf_catalog)
    for name in sorted(RECIPES & conf_catalog.keys()):
        if str(conf_catalog[name].get("type")).startswith("flatout."):
            continue
        dataset = catalog.get(name)
        kind = type(dataset)
        origin = kind.__module__.partition(".")[0]
        if name in OURS_ALONE and origin in ("kedro", "kedro_datasets"):
            raise SettingsError(
                f"catalog: {name}: {_package(dataset)}.{kind.__name__} cannot store "
                "it; remove this entry, so that the one in conf/base is used"
            )
        if origin == "kedro_datasets":
            catalog[name] = GenericEntry(dataset)


def _join_splits(catalog: DataCatalog, conf_catalog: Mapping[str, Any]) -> None:
    """Combine the splits that the user provides into the entry `raw_texts`. Raises
    SettingsError if there is no train split."""
    given = [name for name in SPLITS if entry_of(name) in conf_catalog]
    if not given:
        return
    if "train" not in given:
        names = " and ".join(map(entry_of, given))
        raise SettingsError(
            f"catalog: {names} without raw_train_texts: give train's rows an entry of "
            "that name, or all rows as raw_texts"
        )
    catalog["raw_texts"] = OwnSplits({n: catalog.get(entry_of(n)) for n in given})


def _predict_own_files(catalog: DataCatalog, conf_catalog: Mapping[str, Any]) -> None:
    """Predict the files of the user's raw entry, instead of the digits, if the user has
    not defined the files to predict."""
    for kind in ("arrays", "images"):
        raw = conf_catalog.get(f"raw_{kind}", {"type": DIGITS})
        predicted = conf_catalog.get(f"predict_{kind}", {})
        is_default = predicted.get("type") == DIGITS and not predicted.get("path")
        if is_default and raw.get("type") != DIGITS:
            catalog[f"predict_{kind}"] = catalog.get(f"raw_{kind}")


def trust_own_model(pipeline: Pipeline, catalog: DataCatalog) -> None:
    """Allow nodes to run the custom code of the model that the same run trains. For
    models from other runs, the entry's `load_args` must allow this."""
    if "model" in {n for node in pipeline.nodes for n in node.inputs} & (
        pipeline.all_outputs()
    ):
        entry = catalog.get("model")
        if isinstance(entry, TransformersModel):
            entry.trust_code()
