"""Hooks that write `run.json`. A separate tracking program reads this file and sends
its data to MLflow, so that a failing store cannot disturb a run."""

from __future__ import annotations

import atexit
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

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
from flatout.engine.files.calibration import requested
from flatout.places import check_store
from flatout.project.data.origin import short_name
from flatout.project.fitting import TRAINING_NODES, raw_entry, short_names
from flatout.project.guard import Guard
from flatout.project.hooks.run import Run
from flatout.project.mlflow_options import login
from flatout.project.saved_model import saved_model, write_own_card
from flatout.tracking import RunFolder, RunRecord, begin, facts, outcomes
from flatout.tracking.program import Program
from flatout.tracking.record import DROPPED


class TrackingHooks:
    """Hooks that record a run for MLflow and let the guard check the run's speed."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._node_begun = False

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline, catalog: DataCatalog
    ) -> None:
        """If the run is tracked, create its record and start the tracking program. Only
        the main process of the first machine does this. Raises SettingsError if MLflow
        would misinterpret the URI of the store."""
        run = self._run
        self._trained: tuple[Any, dict[str, Any]] | None = None
        self._described: dict[str, Any] | None = None
        self._node_begun = False
        self._guard, self._catalog = Guard(run.settings), catalog
        if run.is_main and run.options.tracks(run_params["pipeline_names"]):
            check_store(run.options.store, run.options.artifact_location)
            run.tracked = self._begin(run_params, pipeline)
            variables = login(run.context, run.options)
            self._program = Program(run.tracked, variables, run.data_option)
            atexit.register(self._end, "KILLED", "interrupted")

    @hook_impl
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        """Record the node's parameters by path, such as `train.epochs`. Before
        training, also start the guard."""
        self._node_begun = True
        if (folder := self._run.tracked) is None:
            return
        folder.record.params |= facts.flat_parameters(inputs)
        if node.short_name in TRAINING_NODES:
            from flatout.engine.tokenizing.token_keys import token_key

            rows = inputs[f"train_{self._run.kind}"]
            folder.record.tags["token_key"] = token_key(rows)
        if node.short_name == "train_model":
            self._guard.start(folder)
        folder.save()

    @hook_impl
    def after_node_run(
        self,
        node: Node,
        catalog: DataCatalog,
        inputs: dict[str, Any],
        outputs: dict[str, Any],
    ) -> None:
        """Record the node's results before the catalog saves them."""
        run = self._run
        if is_training := node.short_name == "train_model":
            report = outputs["train_report"]
            run.reused = not was_trained_now(run.checkpoints)
            if run.settings.tracking.log_model:
                self._trained = inputs[f"test_{run.kind}"], report
        if (folder := run.tracked) is None:
            return
        outcomes.record_node_outputs(folder.record, outputs)
        if run.reused:
            folder.record.tags["exit_reason"] = "finished already"
        elif is_training:
            self._guard.trained(folder, outputs["train_history"])
        folder.save()

    @hook_impl
    def after_dataset_saved(self, dataset_name: str, data: Any) -> None:
        """Record where the catalog has saved the model, so that the tracking program
        can log it."""
        folder = self._run.tracked
        if folder is None or (self._run.reused and folder.earlier):
            return  # the earlier run has logged the model
        if dataset_name == "model" and self._trained:
            entry, settings = self._catalog.get("model"), self._run.settings
            saved = saved_model(entry, data, folder.path, settings, *self._trained)
            self._described = asdict(saved)
            # Otherwise, the model is logged after evaluate has added a file to it.
            if not requested(settings):
                folder.record.model = self._described
                folder.save()

    @hook_impl
    def after_pipeline_run(self, pipeline: Pipeline, catalog: DataCatalog) -> None:
        """End the run after all its results have been saved. Raises SlowRunError if the
        run was slow and `guard.on_slow` is `fail`."""
        folder = self._run.tracked
        if folder and "split_report" in pipeline.all_outputs():
            # The node returned a recipe, and the catalog has stored its result.
            folder.record.figures |= split_metrics(catalog.load("split_report"))
        if self._run.is_main and "evaluation_report" in pipeline.all_outputs():
            name = self._run.context.project_path.name
            write_own_card(catalog.get("model"), name, self._run.settings)
        self._end("FINISHED", "finished")
        if "train_model" in short_names(pipeline):
            finish(self._run.checkpoints)
        self._guard.ended()

    @hook_impl
    def on_pipeline_error(self, error: Exception) -> None:
        self._end("FAILED", type(error).__name__)

    def _begin(self, run_params: dict[str, Any], pipeline: Pipeline) -> RunFolder:
        settings, options = self._run.settings, self._run.options
        nodes = short_names(pipeline)
        trains = "train_model" in nodes
        points = Path(settings.paths.metrics)
        record = RunRecord(
            tracking_uri=options.store,
            experiment=options.experiment,
            artifact_location=options.artifact_location,
            name=self._name(nodes),
            reporting=str(points.parent),
            points=str(points) if trains else None,
            tags=facts.starting_tags(self._run.context.project_path, run_params),
            system_metrics=settings.tracking.system_metrics,
        )
        interrupted = is_interrupted(self._run.checkpoints)
        goes_on = trains and interrupted and settings.train.resume == "auto"
        return begin(points.with_name("tracking"), record, goes_on=goes_on)

    def _name(self, nodes: set[str]) -> str:
        settings = self._run.settings
        data = short_name(self._catalog, raw_entry(settings))
        kinds = {
            "run_trials": f"benchmark-{settings.benchmark.mode}",
            "run_sweep": "sweep",
            "cross_validate": "cross_validate",
            "train_model": "",
        }
        kind = next((kind for node, kind in kinds.items() if node in nodes), None)
        return facts.run_name(data, None if kind is None else settings, kind or "")

    def _end(self, status: str, reason: str) -> None:
        """End the run with this status and reason. Only the first call has an
        effect."""
        folder, self._run.tracked = self._run.tracked, None
        if folder is None:
            return
        atexit.unregister(self._end)
        folder.record.model = folder.record.model or self._described
        if folder.record.tags.get("exit_reason") == "running":  # no other reason is set
            folder.record.tags["exit_reason"] = reason
        if status != "FINISHED" and not (self._node_begun or folder.record.params):
            status = DROPPED  # nothing has been recorded
        folder.end(DROPPED if self._run.reused and folder.earlier else status)
        self._program.finish()
        if folder.record.status == DROPPED:
            shutil.rmtree(folder.path, ignore_errors=True)
        else:
            folder.forget_earlier()
