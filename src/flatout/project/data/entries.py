"""Catalog entries: Kedro's own types for results of nodes, and the user's own splits
and models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kedro.io import DataCatalog
from kedro.pipeline import Pipeline

from flatout.datasets import OwnSplits, TransformersModel
from flatout.datasets.generic import RECIPES, GenericEntry, fault_of, is_generic
from flatout.engine.data.forms.given_splits import entry_of
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.parameters import SettingsError


def adapt(catalog: DataCatalog, conf_catalog: Mapping[str, Any]) -> dict[str, str]:
    """Make entries of Kedro's own types accept results of nodes; return reasons by name
    for those that would lose data. Entries of flatout's own types are not built here:
    some import torch. Raises SettingsError for given splits without train."""
    faults: dict[str, str] = {}
    _join_splits(catalog, conf_catalog)
    for name in sorted(RECIPES & conf_catalog.keys()):
        if str(conf_catalog[name].get("type")).startswith("flatout."):
            continue
        dataset = catalog.get(name)
        if fault := fault_of(name, dataset):
            faults[name] = fault
        elif is_generic(dataset):
            catalog[name] = GenericEntry(dataset)
    return faults


def refuse(faults: Mapping[str, str], pipeline: Pipeline) -> None:
    """Raises SettingsError for unsuitable entries that the pipeline uses."""
    names = sorted(faults.keys() & pipeline.datasets())
    if names:
        raise SettingsError(f"catalog: {'; '.join(faults[name] for name in names)}")


def _join_splits(catalog: DataCatalog, conf_catalog: Mapping[str, Any]) -> None:
    """Combine the user's own splits into `raw_texts`."""
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


def trust_own_model(pipeline: Pipeline, catalog: DataCatalog) -> None:
    """Let a node load the model that another one trains in the same run, with its
    custom code (`model.trust_remote_code`). Any other model needs `load_args`."""
    if "model" in {n for node in pipeline.nodes for n in node.inputs} & (
        pipeline.all_outputs()
    ):
        entry = catalog.get("model")
        if isinstance(entry, TransformersModel):
            entry.trust_code()
