"""Hooks that lock the data, adapt catalog entries, and reject outdated rows."""

from __future__ import annotations

import logging
from typing import Any

from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog, MemoryDataset
from kedro.pipeline import Pipeline

from flatout.engine.files.atomic_write import clear_leftovers
from flatout.engine.machine.environment import current_ranks
from flatout.project.data import entries
from flatout.project.data.lock import DataLock, changes_data
from flatout.project.data.origin import note_origin, origin_of, stale_fault
from flatout.project.data.outputs import local_paths
from flatout.project.fitting import raw_entry
from flatout.project.hooks.run import Run

logger = logging.getLogger(__name__)


class DataHooks:
    """Hooks that lock the data folder, record the origin of rows, and prevent training
    on outdated rows."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._lock = DataLock()

    @hook_impl
    def after_catalog_created(
        self, catalog: DataCatalog, conf_catalog: dict[str, Any]
    ) -> None:
        """Make the entries accept node results, and add the entry `this_run`. Raises
        SettingsError if an entry cannot store the results."""
        entries.adapt(catalog, conf_catalog)
        catalog["this_run"] = MemoryDataset(data=self._run.loader.this_run())

    @hook_impl
    def before_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """Lock the data folder and check the rows. Raises SettingsError if another run
        has locked the folder, and StaleTokensError if the rows are outdated."""
        run = self._run
        self._lock.release()
        if run.is_main and changes_data(pipeline):
            self._lock.take(run.data)
        if current_ranks().is_main:  # remove partial files left by killed runs
            for folder in sorted(run.data.glob("*/")):
                clear_leftovers(folder)
        if run.settings.model.trust_remote_code:
            entries.trust_own_model(pipeline, catalog)
        if fault := stale_fault(catalog, run.settings, pipeline):
            from flatout.engine.tokenizing.token_keys import StaleTokensError

            raise StaleTokensError(fault)
        self._catalog, self._raw = catalog, raw_entry(run.settings)
        self._origin: dict[str, str] | None = None

    @hook_impl
    def before_node_run(self, inputs: dict[str, Any]) -> None:
        """If the node reads the raw data, log its name and record its state."""
        if self._raw in inputs:
            self._origin = origin_of(self._catalog, self._raw, fetched=True)
            if self._origin:
                logger.info("%s: %s", self._raw, self._origin["name"])

    @hook_impl
    def after_dataset_saved(self, dataset_name: str) -> None:
        """Store the origin when `train_rows` is saved. This includes rows that are
        reused, because the name of the raw data may have changed."""
        if dataset_name == "train_rows":
            note_origin(self._catalog, self._origin)

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline) -> None:
        self._lock.release()
        shown = {"predictions", "benchmark_report"} & pipeline.all_outputs()
        for name in sorted(shown):
            for path in local_paths(self._run.context, [name]):
                logger.info("%s: %s", name, path)

    @hook_impl
    def on_pipeline_error(self) -> None:
        self._lock.release()
