"""Around the catalog: entries of Kedro's own types, and that a run can write what it
leaves, so that none ends in vain."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline

from flatout.datasets import OwnSplits, TransformersModel
from flatout.datasets.generic import RECIPES, GenericEntry, fault_of, is_generic
from flatout.engine.data.forms.given_splits import entry_of
from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.files.writable import ELSEWHERE, first_fault
from flatout.engine.parameters import Settings, SettingsError
from flatout.project.fitting import short_names
from flatout.project.mlflow_options import mlflow_options, store_file
from flatout.project.parameters.hooks import checked_settings

logger = logging.getLogger(__name__)


class CatalogHooks:
    """Lets entries of Kedro's own types take what nodes give, or refuses them."""

    @hook_impl
    def after_catalog_created(
        self, catalog: DataCatalog, conf_catalog: dict[str, Any]
    ) -> None:
        """Entries of flatout's own types are not built here: some import torch."""
        self._faults: dict[str, str] = {}
        _join_splits(catalog, conf_catalog)
        for name in sorted(RECIPES & conf_catalog.keys()):
            if str(conf_catalog[name].get("type")).startswith("flatout."):
                continue
            dataset = catalog.get(name)
            if fault := fault_of(name, dataset):
                self._faults[name] = fault
            elif is_generic(dataset):
                catalog[name] = GenericEntry(name, dataset)

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline) -> None:
        """Raises SettingsError for entries that the pipeline uses and cannot."""
        names = sorted(self._faults.keys() & pipeline.datasets())
        if names:
            told = "; ".join(self._faults[name] for name in names)
            raise SettingsError(f"catalog: {told}")

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        if "predictions" in pipeline.all_outputs():
            entry = catalog.get("predictions")._describe()
            logger.info("predictions: %s", entry.get("filepath") or entry.get("path"))


def _join_splits(catalog: DataCatalog, conf_catalog: Collection[str]) -> None:
    """Splits of one's own stand for `raw_texts`. Raises SettingsError without train."""
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


class TrustHooks:
    """Lets a model be evaluated that was trained in the same run with code of its
    own (`model.trust_remote_code`). Any other asks for `load_args`."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._trusts = checked_settings(context).model.trust_remote_code

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        if self._trusts and _trains_and_loads(pipeline):
            entry = catalog.get("model")
            if isinstance(entry, TransformersModel):
                entry.trust_code()


def _trains_and_loads(pipeline: Pipeline) -> bool:
    """Whether a node of the run reads the model that another one makes."""
    read = {name for node in pipeline.nodes for name in node.inputs}
    return "model" in read & pipeline.all_outputs()


WORK: dict[str, Callable[[Settings], tuple[str, ...]]] = {
    "train_model": lambda found: (found.paths.checkpoints, found.paths.metrics),
    "run_trials": lambda found: (found.benchmark.folder,),
    "run_sweep": lambda found: (found.sweep.folder,),
}
"""What nodes write beside their outputs."""
KINDS = ("texts", "arrays", "images")
INPUTS = frozenset(
    {
        *(f"{use}_{kind}" for use in ("raw", "predict") for kind in KINDS),
        *map(entry_of, SPLITS),
    }
)


class UnwritableError(ValueError):
    """Results of the run could not be kept where they belong."""


class OutputHooks:
    """Refuses a run whose results cannot be saved."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._context = context

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline
    ) -> None:
        settings = checked_settings(self._context)
        names = short_names(pipeline)
        paths = [Path(p) for n in names & WORK.keys() for p in WORK[n](settings)]
        paths += local_paths(self._context, pipeline.all_outputs())
        if mlflow_options(self._context).tracks(run_params["pipeline_names"]):
            paths += store_file(self._context, settings.data_dir)
        if fault := first_fault(paths):
            raise UnwritableError(f"{fault}: {ELSEWHERE}")
        _check_source(settings.model.name_or_path, paths)


def _check_source(name: str | None, written: Collection[Path]) -> None:
    """Raises SettingsError if a run would write over the model that it begins with."""
    source = Path(name or "").resolve()
    if name and source in {path.resolve() for path in written}:
        raise SettingsError(
            f"model.name_or_path is {source}, which this run would write over: copy "
            f"it (cp -r {name} {source.parent}/before) and name the copy, or keep the "
            "new one elsewhere (--params=data_dir=...)"
        )


def local_paths(context: KedroContext, names: Collection[str] = ()) -> list[Path]:
    """Of the catalog's entries with these names, or of all but INPUTS. From their
    configuration: building them imports what they need."""
    entries = context.config_loader["catalog"]
    chosen = set(names) or entries.keys() - INPUTS
    found = (_local_path(_entry(entries, name)) for name in sorted(chosen))
    return [context.project_path / path for path in found if path]


def _entry(entries: dict[str, Any], name: str) -> Any:
    """The entry of that name, or of the pattern that it matches: `{split}_rows`."""
    for pattern, entry in entries.items() if name not in entries else ():
        expression = re.sub(r"\\{(\w+)\\}", r"(?P<\1>.+)", re.escape(pattern))
        found = re.fullmatch(expression, name) if "{" in pattern else None
        if found and isinstance(entry, dict):
            path = str(entry.get("filepath")).format(**found.groupdict())
            return {**entry, "filepath": path}
    return entries.get(name)


def _local_path(entry: Any) -> str | None:
    """None of what has none, lies elsewhere, or has a place to fall back on."""
    path = entry.get("filepath") if isinstance(entry, dict) else None
    usable = isinstance(path, str) and "://" not in path and "fallback" not in entry
    return path if usable else None
