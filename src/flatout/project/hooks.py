"""Around Kedro's runs: environment set, results in safety, runs tracked."""

from __future__ import annotations

import atexit
import logging
import re
import sys
import time
from pathlib import Path
from typing import Any

import click
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from flatout import tracking
from flatout.engine.checkpoints.checkpoint_folder import (
    finish,
    is_interrupted,
    logged_as,
    note_logged,
    was_trained_now,
)
from flatout.engine.data.split_report import split_metrics
from flatout.engine.files.atomic_write import clear_leftovers
from flatout.engine.machine import environment
from flatout.engine.parameters import SettingsModel
from flatout.engine.parameters.secrets import without_password
from flatout.places import check_store, project_path, tracking_store
from flatout.project.data_origin import short_name
from flatout.project.fitting import raw_entry
from flatout.project.parameters.hooks import TRAINING_NODES, checked_settings
from flatout.project.recording.mlflow_options import MlflowOptions
from flatout.project.recording.model_logging import (
    ModelLogger,
    ToLog,
    report_of,
    warn_where_worse,
)
from flatout.tracking import facts, models, outcomes
from flatout.tracking.process.remote import Gone, RemoteForwarder

logger = logging.getLogger(__name__)

OPENING_LIMIT_S = 15.0
NOT_IN_NAMES = re.compile(r"[^/\w.\- :]")
"""Of MLflow's parameters."""


class HandOverHooks:
    """Removes what killed runs left; ends a training's resumability where its results
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
        if "train_model" in {node.name for node in pipeline.nodes}:
            finish(self._folder)


class EnvironmentHooks:
    """Sets the variables of `runtime` before any pipeline imports torch."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        environment.apply(checked_settings(context).runtime)


class TrackingHooks:
    """What kedro-mlflow's hook does, with the promise that no tracking store can hurt a
    run.

    Nothing here waits for the store: parameters, points, tags and artifacts go through
    the outbox (`flatout.tracking`). A process that has MLflow opens the run and sends
    them; a thread of this one, where somebody has imported MLflow already.
    """

    def __init__(self) -> None:
        self.outbox: tracking.Outbox | None = None
        self.forwarder: Any = None  # tracking.Forwarder | RemoteForwarder | None
        self._models: ModelLogger | None = None
        self._to_log: ToLog | None = None
        self._has_mlflow_entries = False
        self.reused = False
        """The training was finished already: nothing was trained in this run."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Read mlflow.yml. Unlike kedro-mlflow's own, this asks no store anything.
        Raises SettingsError."""
        self._context = context
        self._settings = checked_settings(context)
        self.mlflow_config = MlflowOptions.model_validate(
            context.config_loader["mlflow"]
        )
        server = self.mlflow_config.server
        given = context.config_loader.runtime_params or {}
        if server.mlflow_tracking_uri is None:
            server.mlflow_tracking_uri = tracking_store(given.get("data_dir", "data"))
        if _has_mlflow() or click.get_current_context(silent=True) is None:
            tracking.use(server.mlflow_tracking_uri)  # for notebooks
        else:
            tracking.prepare(server.mlflow_tracking_uri)
        context.__setattr__("mlflow", self.mlflow_config)  # for `kedro mlflow ui`

    @hook_impl
    def after_catalog_created(
        self, catalog: DataCatalog, conf_catalog: dict[str, Any]
    ) -> None:
        """kedro-mlflow's, which names MLflow's metrics after their entries. It builds
        every entry, and so imports what each needs: only where there are such."""
        self._has_mlflow_entries = "Mlflow" in str(conf_catalog)
        if self._has_mlflow_entries:
            from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook

            MlflowHook().after_catalog_created(catalog, conf_catalog, {}, {}, "", {})

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> None:
        names = run_params["pipeline_names"] or ["__default__"]
        if not self._tracks(names):
            if self._has_mlflow_entries:
                from kedro_mlflow.io.catalog.switch_catalog_logging import (
                    switch_catalog_logging,
                )

                switch_catalog_logging(catalog, False)
            return
        check_store(
            self.mlflow_config.server.mlflow_tracking_uri,
            self.mlflow_config.tracking.experiment.create_experiment_kwargs.artifact_location,
        )
        self._catalog, self._models, self._to_log = catalog, None, None
        self.outbox = self._begin(run_params, pipeline, catalog)
        self.outbox.save()
        system = self._settings.tracking.system_metrics
        connect = self.mlflow_config.connect(self._context)
        kind = (
            tracking.Forwarder
            if _has_mlflow() or self._has_mlflow_entries or connect.context
            else RemoteForwarder
        )
        self.forwarder = kind(self.outbox, connect, system_metrics=system)
        if not self.forwarder.is_apart:  # the other process does so itself
            facts.write_environment(self.outbox.points)
        self.forwarder.start()
        atexit.register(self._end, "KILLED", "interrupted")

    @hook_impl
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        """Note the node's parameters, flat; the thread sends them in one call."""
        if self.outbox is None or self.forwarder is None:
            return
        self.outbox.record.params.update(self._flat_parameters(inputs))
        if node.name in TRAINING_NODES:
            facts.note_rows(self.outbox.record, inputs, self._settings.train.rows)
            if not self.forwarder.is_apart:
                # Opening takes seconds of Python, which would slow steps beside it.
                self.forwarder.wait_until_tried(OPENING_LIMIT_S)
        self.forwarder.update()
        if not self.forwarder.is_apart or not _is_own(node):
            self.forwarder.activate_run()

    @hook_impl
    def after_node_run(
        self,
        node: Node,
        catalog: DataCatalog,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
    ) -> None:
        """Kedro saves the outputs after it: the catalog has those of the run before."""
        trains = node.name == "train_model"
        self.reused = trains and not was_trained_now(self._checkpoints())
        known = trains and self._is_logged()
        if self.outbox is not None:
            if not (self.reused and known):
                outcomes.note_outputs(self.outbox.record, outputs)
            if self.reused:
                self.outbox.record.tags["exit_reason"] = "finished already"
        if trains and not known:
            self._to_log = self._described(catalog, inputs, outputs["train_report"])
        elif trains and not self.reused:
            warn_where_worse(report_of(catalog), outputs["train_report"], None)

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any, node: Node) -> None:
        """The model is logged from where the catalog has put it."""
        if dataset_name != "model" or self._to_log is None or self.forwarder is None:
            return
        self._models = ModelLogger(self.forwarder)
        self._models.start(self._to_log, self._catalog, data)
        self._to_log = None

    def _described(
        self, catalog: DataCatalog, inputs: dict[str, Any], report: dict[str, Any]
    ) -> ToLog | None:
        """None where no model is to be logged."""
        settings = self._settings.tracking
        if self.outbox is None or not settings.log_model:
            if not self.reused:
                warn_where_worse(report_of(catalog), report, None)
            return None
        record, registration = self.outbox.record, None
        if name := settings.registered_model:
            loss, key = record.metrics["validation_loss"], record.tags["token_key"]
            registration = models.Registration(
                name, models.Trained(loss, key), self._keep_models()
            )
        where = self._registry()
        return ToLog(
            rows=inputs[f"test_{self._settings.train.rows}"],
            task=self._settings.model.task,
            registration=registration,
            report=report,
            run_id=lambda: record.run_id,
            before={} if self.reused else report_of(catalog),
            done=lambda uri: note_logged(self._checkpoints(), where, uri),
        )

    def _checkpoints(self) -> Path:
        return Path(self._settings.paths.checkpoints)

    def _is_logged(self) -> bool:
        """Whether MLflow has this very model; somebody may have deleted it there. A
        store that gives no answer has it."""
        where = self._registry()
        uri = logged_as(self._checkpoints(), where)
        if uri is None or self.forwarder is None:
            return False
        if not self.forwarder.flush():
            return True
        try:
            return bool(self.forwarder.call(models.is_there, uri, where["name"]))
        except Gone:
            return True

    def _registry(self) -> dict[str, str | None]:
        """Where a model is registered, and under which name."""
        store = self.mlflow_config.server.mlflow_tracking_uri
        return {"store": store, "name": self._settings.tracking.registered_model}

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        if self.outbox is not None and "split_report" in pipeline.all_outputs():
            # The node gave a recipe; the catalog has what came of it.
            report = catalog.load("split_report")
            self.outbox.record.figures.update(split_metrics(report))
        self._end("FINISHED", "finished")

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        self._end("FAILED", type(error).__name__)

    def _tracks(self, pipeline_names: list[str]) -> bool:
        """Only the main process of the first machine has a run."""
        first = self._settings.train.distributed.machine_rank == 0
        return (
            first
            and environment.current_ranks().is_main
            and self.mlflow_config.tracks(pipeline_names)
        )

    def _begin(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> tracking.Outbox:
        settings, options = self._settings, self.mlflow_config.tracking
        nodes = {node.name for node in pipeline.nodes}
        trains = "train_model" in nodes
        metrics = Path(settings.paths.metrics)
        points = metrics if trains else metrics.with_name("run.jsonl")
        tags = facts.starting_tags(self._context.project_path, run_params)
        name = options.run.name or self._run_name(nodes, catalog)
        record = tracking.RunRecord(
            tracking_uri=self.mlflow_config.server.mlflow_tracking_uri,
            experiment=options.experiment.name,
            artifact_location=options.experiment.create_experiment_kwargs.artifact_location,
            name=facts.plain_name(name),
            run_id=options.run.id,
            tags=tags,
        )
        interrupted = is_interrupted(Path(settings.paths.checkpoints))
        goes_on = trains and interrupted and settings.train.resume == "auto"
        outbox = tracking.begin(points, record, goes_on=goes_on)
        return outbox

    def _run_name(self, nodes: set[str], catalog: DataCatalog) -> str:
        settings = self._settings
        data = short_name(catalog, raw_entry(settings))
        if "run_trials" in nodes:
            return facts.run_name(
                data, settings, f"benchmark-{settings.benchmark.mode}"
            )
        if "run_sweep" in nodes:
            return facts.run_name(data, settings, "sweep")
        return facts.run_name(data, settings if "train_model" in nodes else None)

    def _keep_models(self) -> int | None:
        """None, where the store is not the data folder's own: other projects may have
        models there."""
        own = f"sqlite:///{project_path(self._settings.data_dir or 'data')}/mlflow.db"
        is_own = self.mlflow_config.server.mlflow_tracking_uri == own
        return self._settings.tracking.keep_models if is_own else None

    def _flat_parameters(self, inputs: dict[str, Any]) -> dict[str, str]:
        """`train.loader.num_workers: auto`, of a node's `params:` inputs."""
        options, prefix = self.mlflow_config.tracking.params.dict_params, "params:"
        found = {
            name.removeprefix(prefix): _plain(value)
            for name, value in inputs.items()
            if name.startswith(prefix)
        }
        return {
            NOT_IN_NAMES.sub("_", name): without_password(str(v))
            for name, v in _flat(found, options.recursive, options.sep).items()
        }

    def _end(self, status: str, reason: str) -> None:
        """End the run once, whatever ended it."""
        if self.outbox is None or self.forwarder is None:
            return
        if self._models is not None:
            self._models.wait()
        outbox, forwarder = self.outbox, self.forwarder
        self.outbox = self.forwarder = None
        atexit.unregister(self._end)
        if outbox.record.tags.get("exit_reason") == "running":  # no report told better
            outbox.record.tags["exit_reason"] = reason
        is_well, verdict = forwarder.gpu_verdict()
        if verdict:
            logger.log(logging.INFO if is_well else logging.WARNING, verdict)
            outbox.record.tags["gpu_watch"] = verdict
        forwarder.finish(status, int(time.time() * 1000))


def _has_mlflow() -> bool:
    return "mlflow" in sys.modules


def _is_own(node: Node) -> bool:
    """Whether the node is one of flatout's, which never ask MLflow."""
    return str(node.func.__module__).partition(".")[0] == "flatout"


def _flat(found: dict[str, Any], recursive: bool, separator: str) -> dict[str, Any]:
    """A group's values under `group.name`."""
    flat: dict[str, Any] = {}
    for name, value in found.items():
        if not isinstance(value, dict):
            flat[name] = value
            continue
        inner = _flat(value, recursive, separator) if recursive else value
        flat |= {f"{name}{separator}{key}": known for key, known in inner.items()}
    return flat


def _plain(value: Any) -> Any:
    """Kedro hands a node a group of parameters as its annotation has it."""
    return value.model_dump() if isinstance(value, SettingsModel) else value
