"""Around Kedro's runs: environment set, results in safety, runs tracked."""

from __future__ import annotations

import atexit
import logging
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from flatout.engine.checkpoints.checkpoint_folder import (
    finish,
    is_interrupted,
    was_trained_now,
)
from flatout.engine.data.split_report import split_metrics
from flatout.engine.files.atomic_write import clear_leftovers
from flatout.engine.machine import environment
from flatout.engine.parameters import SettingsModel
from flatout.engine.parameters.secrets import without_password
from flatout.project.data_origin import short_name
from flatout.project.fitting import raw_entry, short_names
from flatout.project.mlflow_options import login, mlflow_options
from flatout.project.parameters.hooks import TRAINING_NODES, checked_settings
from flatout.project.saved_model import report_of, saved_model, warn_where_worse
from flatout.tracking import RunFolder, RunRecord, begin, facts, outcomes
from flatout.tracking.program import Program
from flatout.tracking.record import DROPPED

logger = logging.getLogger(__name__)

NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")
"""Of MLflow's parameters."""
PARAMETERS = "params:"


class HandOverHooks:
    """Removes what killed runs left; ends a training's resumability when its results
    are safe in the catalog."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        settings = checked_settings(context)
        self._folder = Path(settings.paths.checkpoints)
        self._data = Path(context.project_path, settings.data_dir or "data")

    @hook_impl
    def before_pipeline_run(self) -> None:
        """What killed runs left half-written goes."""
        if environment.current_ranks().is_main:
            for folder in sorted(self._data.glob("*/")):
                clear_leftovers(folder)

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline) -> None:
        if "train_model" in short_names(pipeline):
            finish(self._folder)


class EnvironmentHooks:
    """Sets the variables of `runtime` before any pipeline imports torch."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        environment.apply(checked_settings(context).runtime)


class TrackingHooks:
    """Writes `run.json`, which the tracking program follows: no tracking store can
    hurt a run."""

    def __init__(self) -> None:
        self.folder: RunFolder | None = None
        self.reused = False
        """The training was finished already: nothing was trained in this run."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Raises SettingsError."""
        self._context, self.folder, self.reused = context, None, False
        self._settings = checked_settings(context)
        self._options = mlflow_options(context)
        self._trained: tuple[Any, dict[str, Any]] | None = None

    @property
    def record(self) -> RunRecord | None:
        """None: the run is not tracked."""
        return self.folder.record if self.folder else None

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> None:
        """Only the main process of the first machine has a run. Raises
        SettingsError."""
        is_first = self._settings.train.distributed.machine_rank == 0
        if not (
            is_first
            and environment.current_ranks().is_main
            and self._options.tracks(run_params["pipeline_names"])
        ):
            return
        self._options.check()
        self._catalog = catalog
        self.folder = self._begin(run_params, pipeline, catalog)
        self._program = Program(self.folder, login(self._context, self._options))
        atexit.register(self._end, "KILLED", "interrupted")

    @hook_impl
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        """Note the node's parameters, flat."""
        if self.folder is None or self.record is None:
            return
        self.record.params.update(flat_parameters(inputs))
        if node.short_name in TRAINING_NODES:
            facts.note_rows(self.record, inputs, self._settings.train.rows)
        self.folder.save()

    @hook_impl
    def after_node_run(
        self,
        node: Node,
        catalog: DataCatalog,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
    ) -> None:
        """Kedro saves the outputs after it: the catalog has those of the run before."""
        if node.short_name == "train_model":
            report, rows = outputs["train_report"], self._settings.train.rows
            checkpoints = Path(self._settings.paths.checkpoints)
            self.reused = not was_trained_now(checkpoints)
            if not self.reused:
                warn_where_worse(report_of(catalog), report)
            if self._settings.tracking.log_model:
                self._trained = inputs[f"test_{rows}"], report
        if self.folder is None or self.record is None:
            return
        outcomes.note_outputs(self.record, outputs)
        if self.reused:
            self.record.tags["exit_reason"] = "finished already"
        self.folder.save()

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """The model is logged from where the catalog has put it."""
        folder = self.folder
        if folder is None or (self.reused and folder.earlier):
            return  # the earlier run has the model
        if dataset_name == "model" and self._trained:
            entry = self._catalog.get("model")
            saved = saved_model(
                entry, data, folder.path, self._settings, *self._trained
            )
            folder.record.model = asdict(saved)
            folder.save()

    def _begin(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> RunFolder:
        settings, options = self._settings, self._options
        nodes = short_names(pipeline)
        trains = "train_model" in nodes
        points = Path(settings.paths.metrics)
        record = RunRecord(
            tracking_uri=options.store,
            registry_uri=options.server.mlflow_registry_uri,
            experiment=options.tracking.experiment.name,
            artifact_location=options.artifact_location,
            name=facts.plain_name(
                options.tracking.run.name or self._run_name(nodes, catalog)
            ),
            run_id=options.tracking.run.id,
            reporting=str(points.parent),
            points=str(points) if trains else None,
            tags=facts.starting_tags(self._context.project_path, run_params),
            system_metrics=settings.tracking.system_metrics,
        )
        interrupted = is_interrupted(Path(settings.paths.checkpoints))
        goes_on = trains and interrupted and settings.train.resume == "auto"
        return begin(points.with_name("tracking"), record, goes_on=goes_on)

    def _run_name(self, nodes: set[str], catalog: DataCatalog) -> str:
        settings = self._settings
        data = short_name(catalog, raw_entry(settings))
        if "run_trials" in nodes:
            kind = f"benchmark-{settings.benchmark.mode}"
            return facts.run_name(data, settings, kind)
        if "run_sweep" in nodes:
            return facts.run_name(data, settings, "sweep")
        return facts.run_name(data, settings if "train_model" in nodes else None)

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        if self.record and "split_report" in pipeline.all_outputs():
            # The node gave a recipe; the catalog has what came of it.
            self.record.figures.update(split_metrics(catalog.load("split_report")))
        self._end("FINISHED", "finished")

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        self._end("FAILED", type(error).__name__)

    def _end(self, status: str, reason: str) -> None:
        """End the run once, whatever ended it."""
        folder, self.folder = self.folder, None
        if folder is None:
            return
        atexit.unregister(self._end)
        if folder.record.tags.get("exit_reason") == "running":  # no report told better
            folder.record.tags["exit_reason"] = reason
        folder.end(DROPPED if self.reused and folder.earlier else status)
        self._program.finish()
        if folder.record.status == DROPPED:
            shutil.rmtree(folder.path, ignore_errors=True)
        else:
            folder.forget_earlier()


def flat_parameters(inputs: dict[str, Any]) -> dict[str, str]:
    """`train.loader.num_workers: auto`, of a node's `params:` inputs."""
    found = {
        name.removeprefix(PARAMETERS): _plain(value)
        for name, value in inputs.items()
        if name.startswith(PARAMETERS)
    }
    return {
        NOT_IN_NAMES.sub("_", name): without_password(str(value))
        for name, value in _flat(found).items()
    }


def _flat(found: dict[str, Any]) -> dict[str, Any]:
    """A group's values under `group.name`."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        inner = {"": value} if not isinstance(value, dict) else _flat(value)
        flat |= {
            f"{name}.{key}" if key else name: known for key, known in inner.items()
        }
    return flat


def _plain(value: Any) -> Any:
    """Kedro hands a node a group of parameters as its annotation has it."""
    return value.model_dump() if isinstance(value, SettingsModel) else value
