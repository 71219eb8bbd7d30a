"""Around Kedro's runs: environment set, results in safety, runs tracked."""

from __future__ import annotations

import atexit
import logging
import time
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook
from kedro_mlflow.framework.hooks.utils import _assert_mlflow_enabled, _flatten_dict
from kedro_mlflow.io.catalog.switch_catalog_logging import switch_catalog_logging
from mlflow import MlflowClient

from flatout import tracking
from flatout.engine.checkpoints.checkpoint_folder import (
    finish,
    is_interrupted,
    logged_as,
    note_logged,
    was_trained_now,
)
from flatout.engine.data.split_report import split_metrics
from flatout.engine.files.checked_paths import sweep
from flatout.engine.machine import environment
from flatout.engine.parameters import SettingsModel
from flatout.engine.parameters.secrets import without_password
from flatout.places import project_path, tracking_store
from flatout.project.parameters.hooks import TRAINING_NODES, checked_settings
from flatout.tracking import facts, models, outcomes

logger = logging.getLogger(__name__)

OPENING_LIMIT_S = 15.0


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
                sweep(folder)

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline) -> None:
        if "train_model" in {node.name for node in pipeline.nodes}:
            finish(self._folder)


class EnvironmentHooks:
    """Sets the variables of `runtime` before any pipeline imports torch."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        environment.apply(checked_settings(context).runtime)


class TrackingHooks(MlflowHook):
    """kedro-mlflow's hook with the promise that no tracking store can hurt a run.

    Nothing here waits for the store: parameters, points, tags and artifacts go through
    the outbox (`flatout.tracking`), whose thread opens the run and sends them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.outbox: tracking.Outbox | None = None
        self.forwarder: tracking.Forwarder | None = None
        self._has_mlflow_entries = False
        self.reused = False
        """The training was finished already: nothing was trained in this run."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Read mlflow.yml. Unlike kedro-mlflow's own, this asks no store anything."""
        self._context = context
        self._settings = checked_settings(context)
        self.mlflow_config = KedroMlflowConfig.model_validate(
            context.config_loader["mlflow"]
        )
        server = self.mlflow_config.server
        given = context.config_loader.runtime_params or {}
        if server.mlflow_tracking_uri is None:
            server.mlflow_tracking_uri = tracking_store(given.get("data_dir", "data"))
        tracking.use(server.mlflow_tracking_uri)  # for notebooks
        context.__setattr__("mlflow", self.mlflow_config)  # for `kedro mlflow ui`

    @hook_impl
    def after_catalog_created(
        self, catalog: DataCatalog, conf_catalog: dict[str, Any]
    ) -> None:
        """kedro-mlflow's, which names MLflow's metrics after their entries. It builds
        every entry, and so imports what each needs: only where there are such."""
        self._has_mlflow_entries = "Mlflow" in str(conf_catalog)
        if self._has_mlflow_entries:
            super().after_catalog_created(catalog, conf_catalog, {}, {}, "", {})

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> None:
        names = run_params["pipeline_names"] or ["__default__"]
        if not self._tracks(names):
            if self._has_mlflow_entries:
                switch_catalog_logging(catalog, False)
            return
        self.outbox = self._begin(run_params, pipeline)
        self.outbox.save()
        system = self._settings.tracking.system_metrics
        self.forwarder = tracking.Forwarder(
            self.outbox, self._connect, system_metrics=system
        )
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
            # Opening takes seconds of Python, which would slow steps beside it.
            self.forwarder.wait_until_tried(OPENING_LIMIT_S)
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
        if trains:
            champion = None
            if not known:
                rows = inputs[f"test_{self._settings.train.rows}"]
                champion = self._log_model(outputs["model"], rows)
            if not self.reused:
                models.warn_where_worse(catalog, outputs["train_report"], champion)

    def _checkpoints(self) -> Path:
        return Path(self._settings.paths.checkpoints)

    def _is_logged(self) -> bool:
        """Whether MLflow has this very model; somebody may have deleted it there. A
        store that gives no answer has it."""
        where = self._registry()
        uri = logged_as(self._checkpoints(), where)
        if uri is None or self.forwarder is None:
            return False
        return not self.forwarder.flush() or models.is_there(uri, where["name"])

    def _registry(self) -> dict[str, str | None]:
        """Where a model is registered, and under which name."""
        store = self.mlflow_config.server.mlflow_tracking_uri
        return {"store": store, "name": self._settings.tracking.registered_model}

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        if self.outbox is not None and "split_report" in pipeline.all_outputs():
            # The node gave a recipe; the catalog has what came of it.
            report = catalog.load("split_report")
            self.outbox.record.metrics.update(split_metrics(report))
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
            and _assert_mlflow_enabled(pipeline_names, self.mlflow_config)
        )

    def _connect(self) -> MlflowClient:
        """Log in and make the experiment as mlflow.yml says; called in the thread."""
        # Else it calls mlflow.autolog(disable=True), whose import hooks deadlock with a
        # main thread that imports transformers. Autologging is off anyhow.
        self.mlflow_config.tracking.disable_tracking.disable_autologging = False
        with environment.tracking_uri_kept():
            self.mlflow_config.setup(self._context)
        return MlflowClient()

    def _begin(self, run_params: dict[str, Any], pipeline: Pipeline) -> tracking.Outbox:
        settings, options = self._settings, self.mlflow_config.tracking
        nodes = {node.name for node in pipeline.nodes}
        trains = "train_model" in nodes
        metrics = Path(settings.paths.metrics)
        points = metrics if trains else metrics.with_name("run.jsonl")
        tags = facts.starting_tags(self._context.project_path, run_params)
        given = settings if TRAINING_NODES & nodes else None
        name = options.run.name or facts.run_name(given, tags["git_commit"])
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
        facts.write_environment(points.with_name("environment.json"))
        return outbox

    def _log_model(self, parts: tuple[Any, ...], rows: Any) -> str | None:
        """Model (`parts`: with its tokenizer, where it has one) and registry, where
        MLflow takes them; training is over by now. The URI of the best version on the
        same rows, where there is a registry."""
        settings = self._settings.tracking
        if self.outbox is None or self.forwarder is None or not settings.log_model:
            return None
        record = self.outbox.record
        if not self.forwarder.flush():
            logger.warning("The model was not logged: MLflow takes nothing now.")
            return None
        self.forwarder.activate_run()  # the store may not have had it before
        try:
            uri = models.log_with_example(parts, rows, self._settings.model.task)
            champion = None
            if name := settings.registered_model:
                loss, key = record.metrics["validation_loss"], record.tags["token_key"]
                trained = models.Trained(loss, key)
                champion = models.register(uri, name, trained, self._keep_models())
            note_logged(self._checkpoints(), self._registry(), uri)
            return champion
        except Exception as error:  # tracking never ends a run
            logger.warning("The model was not logged: %s", tracking.one_line(error))
        return None

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
        flat = _flatten_dict(found, options.recursive, options.sep)
        return {
            self.sanitize_param_name(name): without_password(str(v))
            for name, v in flat.items()
        }

    def _end(self, status: str, reason: str) -> None:
        """End the run once, whatever ended it."""
        if self.outbox is None or self.forwarder is None:
            return
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


def _plain(value: Any) -> Any:
    """Kedro hands a node a group of parameters as its annotation has it."""
    return value.model_dump() if isinstance(value, SettingsModel) else value
