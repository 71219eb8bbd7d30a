"""Around Kedro's runs: parameters checked, environment set, runs tracked."""

from __future__ import annotations

import atexit
import logging
import time
from pathlib import Path
from typing import Any

import mlflow
from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.io import DataCatalog
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node
from kedro_mlflow.config.kedro_mlflow_config import KedroMlflowConfig
from kedro_mlflow.framework.hooks.mlflow_hook import MlflowHook
from kedro_mlflow.framework.hooks.utils import _assert_mlflow_enabled, _flatten_dict

from flatout import tracking
from flatout.engine import environment
from flatout.engine.settings import Settings, SettingsError, parse_settings
from flatout.tracking import facts, store

logger = logging.getLogger(__name__)

# Nodes that start processes of their own and must not run inside a runner's.
TRAINING_NODES = frozenset({"train_model", "run_trials"})


def checked_settings(context: KedroContext) -> Settings:
    """All parameters of the run; imports no pipeline. Raises SettingsError."""
    return parse_settings(context.config_loader["parameters"])


class ParameterHooks:
    """Refuses parameters and runners that cannot work, before anything has run."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        checked_settings(context)

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline
    ) -> None:
        runner = str(run_params["runner"])
        trains = TRAINING_NODES & {node.name for node in pipeline.nodes}
        if trains and ("ParallelRunner" in runner or "ThreadRunner" in runner):
            raise SettingsError(
                f"{', '.join(sorted(trains))} cannot run in a ParallelRunner or "
                "ThreadRunner: training starts its own processes, one a device. Leave "
                "--runner out; train.distributed.num_processes sets how many."
            )


class EnvironmentHooks:
    """Sets the variables of `runtime` before any pipeline imports torch."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        environment.apply(checked_settings(context).runtime)


class TrackingHooks(MlflowHook):
    """kedro-mlflow's hook with the promise that no tracking store can hurt a run.

    kedro-mlflow opens the run; parameters, points, tags and artifacts go through the
    outbox (`flatout.tracking`), in a thread. Where the store does not answer at the
    start, the run goes on without it and the thread keeps trying.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outbox: tracking.Outbox | None = None
        self._forwarder: tracking.Forwarder | None = None

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Read mlflow.yml. Unlike kedro-mlflow's own, this asks no store anything."""
        self._context = context
        self._settings = checked_settings(context)
        self._already_active_mlflow = False
        self.mlflow_config = KedroMlflowConfig.model_validate(
            context.config_loader["mlflow"]
        )
        mlflow.set_tracking_uri(self.mlflow_config.server.mlflow_tracking_uri)
        context.__setattr__("mlflow", self.mlflow_config)  # `kedro mlflow ui` reads it

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> None:
        names = run_params["pipeline_names"] or ["__default__"]
        self._is_mlflow_enabled = self._tracks(names)
        if not self._is_mlflow_enabled:
            return
        self._outbox = outbox = self._begin(pipeline)
        uri = outbox.record.tracking_uri
        store.prepare(uri)
        reason = store.unusable_because(uri)
        if reason is None:
            reason = self._open_run(outbox.record, run_params, pipeline, catalog)
        if reason is not None:
            logger.warning(
                "MLflow at %s cannot be used (%s). The run goes on without it: every "
                "point is in %s, and `kedro flatout sync` sends them later.",
                uri,
                reason,
                outbox.points,
            )
        outbox.save()
        self._forwarder = tracking.Forwarder(outbox)
        self._forwarder.start()
        atexit.register(self._end, "KILLED", "interrupted")

    @hook_impl
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        """Note the node's parameters, flat; the thread sends them in one call."""
        if self._outbox is None:
            return
        options = self.mlflow_config.tracking.params.dict_params
        prefix = "params:"
        found = {
            name.removeprefix(prefix): value
            for name, value in inputs.items()
            if name.startswith(prefix)
        }
        flat = _flatten_dict(found, options.recursive, options.sep)
        texts = {self.sanitize_param_name(k): str(v) for k, v in flat.items()}
        self._outbox.record.params.update(texts)

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        report = outputs.get("train_report")
        if self._outbox is not None and report:
            self._outbox.record.metrics.update(facts.report_metrics(report))
            self._outbox.record.tags.update(facts.report_tags(report))

    @hook_impl
    def after_pipeline_run(self) -> None:
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

    def _begin(self, pipeline: Pipeline) -> tracking.Outbox:
        config, settings = self.mlflow_config, self._settings
        trains = "train_model" in {node.name for node in pipeline.nodes}
        metrics, checkpoints = settings.paths.metrics, settings.paths.checkpoints
        points = Path(metrics) if trains else Path(metrics).with_name("run.jsonl")
        facts.write_environment(points.with_name("environment.json"))
        tags = facts.starting_tags(self._context.project_path, self._context.env)
        own_name = config.tracking.run.name
        record = tracking.RunRecord(
            tracking_uri=config.server.mlflow_tracking_uri,
            experiment=config.tracking.experiment.name,
            artifact_location=(
                config.tracking.experiment.create_experiment_kwargs.artifact_location
            ),
            name=facts.plain_name(own_name)
            if own_name
            else facts.run_name(settings, tags["git_commit"]),
            run_id=config.tracking.run.id,
            tags=tags,
        )
        goes_on = trains and settings.train.resume != "never"
        started = any(Path(checkpoints).glob("[!.]*"))
        return tracking.begin(points, record, goes_on=goes_on and started)

    def _open_run(
        self,
        record: tracking.RunRecord,
        run_params: dict[str, Any],
        pipeline: Pipeline,
        catalog: DataCatalog,
    ) -> str | None:
        """Open the run as kedro-mlflow does; the reason where that failed."""
        options = self.mlflow_config.tracking.run
        options.id, options.name = record.run_id, record.name
        try:
            self.mlflow_config.setup(self._context)
            super().before_pipeline_run(run_params, pipeline, catalog)
        except Exception as error:  # tracking never ends a run
            return store.one_line(error)
        record.run_id = self.run_id
        return None

    def _end(self, status: str, reason: str) -> None:
        """End the run once, whatever ended it."""
        if self._outbox is None or self._forwarder is None:
            return
        outbox, forwarder = self._outbox, self._forwarder
        self._outbox = self._forwarder = None
        atexit.unregister(self._end)
        outbox.record.tags["exit_reason"] = reason
        forwarder.finish(status, int(time.time() * 1000))
        store.forget_active_run()
