"""Before a run: parameters, runners and machines that cannot work are refused; tuned
parameters that were measured elsewhere are told of."""

from __future__ import annotations

import logging
from typing import Any, cast

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline import Pipeline
from kedro.pipeline.node import Node

from flatout.engine.families import import_own
from flatout.engine.machine import environment
from flatout.engine.models.model_keys import check_model_keys
from flatout.engine.parameters import (
    DistributedSettings,
    Settings,
    SettingsError,
)
from flatout.engine.sweep.space import check_sweep
from flatout.engine.tasks import check_options
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.fitting import short_names
from flatout.project.parameters.checks import check_groups, check_sources

logger = logging.getLogger(__name__)

# Nodes that start processes of their own and must not run inside a runner's.
TRAINING_NODES = frozenset({"train_model", "run_trials", "run_sweep"})


def checked_settings(context: KedroContext) -> Settings:
    """All parameters of the run, which the loader has parsed once. Raises
    SettingsError."""
    return loader_of(context).settings


def loader_of(context: KedroContext) -> ProjectConfigLoader:
    """The one that settings.py names."""
    return cast(ProjectConfigLoader, context.config_loader)


def check_machine(settings: DistributedSettings, pipeline: Pipeline) -> None:
    """Raises SettingsError where several processes would do the same work."""
    tasks = environment.slurm_tasks()
    if not environment.launched_from_outside() and tasks > settings.num_machines:
        raise SettingsError(
            f"srun started this command {tasks} times, and each would do all of it in "
            f"the same data folder (train.distributed.num_machines is "
            f"{settings.num_machines}): start one task a machine "
            "(--ntasks-per-node=1) and name the machines to each, as "
            "deploy/slurm.sh does; flatout starts a process a GPU by itself"
        )
    others = pipeline - _from_training_on(pipeline)
    if settings.machine_rank > 0 and others.nodes:
        names = ", ".join(sorted(short_names(others)))
        raise SettingsError(
            f"train.distributed.machine_rank={settings.machine_rank}: machines other "
            f"than 0 only train, and {names} would write what machine 0 writes. Type "
            "kedro run --pipelines=train with the same parameters here, and before it, "
            "once, on one machine, kedro run --pipelines=split,tokenize"
        )


def _from_training_on(pipeline: Pipeline) -> Pipeline:
    """`train_model` and what uses its results; empty without it."""
    training = [n.name for n in pipeline.nodes if n.short_name == "train_model"]
    return pipeline.from_nodes(*training) if training else Pipeline([])


class ParameterHooks:
    """Refuses parameters and runners that cannot work, before anything has run."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = checked_settings(context)
        check_sources(loader_of(context))

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline
    ) -> None:
        check_groups(run_params.get("runtime_params") or {}, pipeline.inputs())
        runner = str(run_params["runner"])
        names = short_names(pipeline)
        if "run_sweep" in names:
            check_sweep(self._settings)
        if "params:model" in pipeline.inputs():
            check_model_keys(self._settings.model)
        if "model" in pipeline.inputs():  # loaded before any node could know its class
            import_own(self._settings.model)
        check_machine(self._settings.train.distributed, pipeline)
        trains = TRAINING_NODES & names
        if trains:
            check_options(self._settings)
        if trains and ("ParallelRunner" in runner or "ThreadRunner" in runner):
            raise SettingsError(
                f"{', '.join(sorted(trains))} cannot run in a ParallelRunner or "
                "ThreadRunner: training starts its own processes, one a device. Leave "
                "--runner out; train.distributed.num_processes sets how many."
            )


class TunedHooks:
    """Warns where tuned settings were measured on something else than this; else says
    at the end whether the rate of their trials came."""

    _is_measured = False
    _kept: tuple[bool, str] | None = None

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = checked_settings(context)
        self._is_measured, self._kept = False, None

    @hook_impl
    def before_node_run(self, node: Node, inputs: dict[str, Any]) -> None:
        if node.short_name != "train_model" or not self._settings.tuned:
            return
        trained_on = inputs[f"train_{self._settings.train.rows}"]
        differences = tuned_mismatches(self._settings, trained_on)
        if differences:
            logger.warning(
                "The tuned parameters were measured with another %s. They still train "
                "right, but may be slow: kedro run --pipelines=benchmark measures "
                "again",
                "; another ".join(differences),
            )
        self._is_measured = not differences

    @hook_impl
    def after_node_run(self, node: Node, outputs: dict[str, Any]) -> None:
        if node.short_name != "train_model" or not self._settings.tuned:
            return
        from flatout.engine.benchmark.promise import kept

        report = outputs["train_report"]
        if self._is_measured and report["samples_per_s"]:
            self._kept = kept(
                report["samples_per_s"], self._settings.tuned, report["train_wall_s"]
            )

    @hook_impl
    def after_pipeline_run(self) -> None:
        if self._kept is not None:
            inside, text = self._kept
            logger.log(logging.INFO if inside else logging.WARNING, text)


def tuned_mismatches(settings: Settings, trained_on: Any) -> list[str]:
    """What differs between where the tuned parameters were measured and here."""
    # They import torch, as training is about to.
    from flatout.engine.benchmark.recommend import mismatches, provenance
    from flatout.engine.launch.job_files import token_key
    from flatout.engine.launch.launch import resolve_processes
    from flatout.engine.machine.environment import device_name
    from flatout.engine.rows.opening import rows_from_dataset

    here = provenance(
        settings,
        device_name(),
        resolve_processes(settings.train.distributed),
        token_key(rows_from_dataset(trained_on)),
    )
    return mismatches(_sound(settings.tuned), here)


def _sound(tuned: dict[str, Any]) -> dict[str, Any]:
    """`tuned` without the key that is not as the benchmark writes it, after a
    warning."""
    versions = tuned.get("versions", {})
    if isinstance(versions, dict):
        return tuned
    logger.warning(
        "tuned.versions in conf/tuned/parameters.yml is %r, not a version by package: "
        "not compared; kedro run --pipelines=benchmark writes the file again",
        versions,
    )
    return {key: value for key, value in tuned.items() if key != "versions"}
