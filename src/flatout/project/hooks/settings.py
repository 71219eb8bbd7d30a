"""Hooks that check parameters before any node runs."""

from __future__ import annotations

from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from flatout.engine.files.calibration import check_rows
from flatout.engine.machine import environment
from flatout.project.data.outputs import check_outputs
from flatout.project.hooks.run import Run
from flatout.project.parameters.checks import check_run, check_sources
from flatout.project.tuned import log_rate_check, tuned_mismatches


class SettingsHooks:
    """Hooks that raise an error if the run cannot work with its parameters, its runner,
    its machine rank or its output folders. They also warn if tuned parameters were
    measured under different conditions."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._is_as_measured = False

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        """Read the parameters, and set environment variables before torch is imported.
        Raises SettingsError if parameters or catalog entries are invalid."""
        self._run.begin(context)
        self._is_as_measured = False
        check_sources(self._run.loader)
        environment.apply(self._run.settings.runtime)

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline
    ) -> None:
        """Raise SettingsError if the run cannot work with these parameters, and
        UnwritableError if an output cannot be written."""
        settings, options = self._run.settings, self._run.options
        check_run(settings, run_params, pipeline)
        is_tracked = options.tracks(run_params["pipeline_names"])
        stores = options.store_files(settings.data_dir) if is_tracked else []
        check_outputs(settings, pipeline, self._run.context, stores)

    @hook_impl
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        settings, kind = self._run.settings, self._run.kind
        if node.short_name == "train_model" and f"validation_{kind}" in inputs:
            check_rows(len(inputs[f"validation_{kind}"]), settings)
        if node.short_name == "train_model" and settings.tuned:
            rows = inputs[f"train_{kind}"]
            self._is_as_measured = not tuned_mismatches(settings, rows)

    @hook_impl
    def after_node_run(self, node: Node, outputs: dict[str, Any]) -> None:
        if node.short_name == "train_model" and self._is_as_measured:
            log_rate_check(self._run.settings.tuned, outputs["train_report"])
