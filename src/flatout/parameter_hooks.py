"""Before a run: parameters, runners and machines that cannot work are refused."""

from __future__ import annotations

from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline import Pipeline

from flatout.engine import environment
from flatout.engine.model_keys import check_model_keys
from flatout.engine.settings import (
    DistributedSettings,
    Settings,
    SettingsError,
    parse_settings,
)
from flatout.engine.sweep.samplers import check_sweep
from flatout.parameter_checks import check_sources

# Nodes that start processes of their own and must not run inside a runner's.
TRAINING_NODES = frozenset({"train_model", "run_trials", "run_sweep"})


def checked_settings(context: KedroContext) -> Settings:
    """All parameters of the run; imports no pipeline. Raises SettingsError."""
    return parse_settings(context.config_loader["parameters"])


def check_machine(settings: DistributedSettings, pipeline: Pipeline) -> None:
    """Raises SettingsError where several processes would do the same work."""
    tasks = environment.slurm_tasks()
    if not environment.launched_from_outside() and tasks > settings.num_machines:
        raise SettingsError(
            f"srun started this command {tasks} times, and each would do all of it in "
            f"the same data folder (train.distributed.num_machines is "
            f"{settings.num_machines}): start one task a machine "
            "(--ntasks-per-node=1) and name the machines to each, as "
            "conf/clusters/slurm.sh does; flatout starts a process a GPU by itself"
        )
    others = pipeline - _from_training_on(pipeline)
    if settings.machine_rank > 0 and others.nodes:
        names = ", ".join(sorted(node.name for node in others.nodes))
        raise SettingsError(
            f"train.distributed.machine_rank={settings.machine_rank}: machines other "
            f"than 0 only train, and {names} would write what machine 0 writes. Type "
            "kedro run --pipelines=train with the same parameters here, and before it, "
            "once, on one machine, kedro run --pipelines=split,tokenize"
        )


def _from_training_on(pipeline: Pipeline) -> Pipeline:
    """`train_model` and what uses its results; empty without it."""
    trains = "train_model" in {node.name for node in pipeline.nodes}
    return pipeline.from_nodes("train_model") if trains else Pipeline([])


class ParameterHooks:
    """Refuses parameters and runners that cannot work, before anything has run."""

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = checked_settings(context)
        check_sources(context.config_loader)

    @hook_impl
    def before_pipeline_run(
        self, run_params: dict[str, Any], pipeline: Pipeline
    ) -> None:
        runner = str(run_params["runner"])
        names = {node.name for node in pipeline.nodes}
        if "run_sweep" in names:
            check_sweep(self._settings)
        if "params:model" in pipeline.inputs():
            check_model_keys(self._settings.model)
        check_machine(self._settings.train.distributed, pipeline)
        trains = TRAINING_NODES & names
        if trains and ("ParallelRunner" in runner or "ThreadRunner" in runner):
            raise SettingsError(
                f"{', '.join(sorted(trains))} cannot run in a ParallelRunner or "
                "ThreadRunner: training starts its own processes, one a device. Leave "
                "--runner out; train.distributed.num_processes sets how many."
            )
