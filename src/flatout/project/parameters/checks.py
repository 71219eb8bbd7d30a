"""Reject runs that cannot work, and parameters and entries that no code reads."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from kedro.framework.project import pipelines
from kedro.pipeline import Pipeline

from flatout.engine.data.raw_texts import SPLITS
from flatout.engine.families import import_own
from flatout.engine.machine import environment
from flatout.engine.models.model_keys import check_model_keys
from flatout.engine.parameters import (
    DistributedSettings,
    Settings,
    SettingsError,
    refusal,
)
from flatout.engine.parameters.faults import nearest
from flatout.engine.sweep.space import check_sweep
from flatout.engine.tasks import check_options
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.fitting import TRAINING_NODES, raw_entry, short_names


def check_sources(loader: ProjectConfigLoader) -> None:
    """Raise SettingsError if globals.yml sets `corpus`, if the raw data is in an entry
    that the task does not read, or if the name of a catalog entry is misspelt."""
    if "corpus" in loader["globals"]:
        raise SettingsError(
            "corpus in globals.yml is no longer read since version 0.2: move it to "
            "conf/local/parameters.yml"
        )
    own, raw = _entries(loader, loader.default_run_env), raw_entry(loader.settings)
    if raw == "raw_sessions" and "raw_texts" in own and raw not in own:
        raise SettingsError(
            "model.task: next-key reads the catalog entry raw_sessions: rename "
            f"raw_texts in conf/{loader.default_run_env}"
        )
    refuse_misspelt_catalog_entries(loader)


def refuse_misspelt_catalog_entries(loader: ProjectConfigLoader) -> None:
    """Raise SettingsError for catalog entries with a misspelt name. Kedro would accept
    them and read the entry in conf/base instead."""
    base = _entries(loader, loader.base_env)
    known = {name.replace("{split}", one) for name in base for one in SPLITS}
    known |= {f"raw_{one}_texts" for one in SPLITS if "raw_texts" in base}
    own = {name.partition("@")[0] for name in loader["catalog"].keys() - base} - known
    given = _entries(loader, loader.default_run_env)
    for name in sorted(own):
        if name.startswith("_") or "{" in name:
            continue
        near = nearest(name, known - given)
        if near and not any(name in p.datasets() for p in pipelines.values()):
            raise SettingsError(
                f"catalog entry {name}: no pipeline uses it; did you mean {near}? "
                "Rename it, or remove it; names that begin with _ are not checked"
            )


def _entries(loader: ProjectConfigLoader, environment: str) -> set[str]:
    """Return the names of the catalog entries in one environment."""
    if not Path(loader.conf_source, environment).is_dir():  # an archive of conf/
        return set()
    return set(loader.folder(environment, "catalog"))


def check_groups(given: Mapping[str, Any], inputs: Collection[str]) -> None:
    """Raise SettingsError for groups in `given` (the values of --params) that neither
    flatout nor a node of the run reads. `inputs` are the pipeline's input names."""
    read = {name.removeprefix("params:").partition(".")[0] for name in inputs}
    valid = sorted(Settings.model_fields)
    unread = sorted(set(given) - set(valid) - read)
    if unread and "parameters" not in inputs:
        why = f"unknown parameter, no node of this run reads it; valid: {valid}"
        raise refusal([f"{name}: {why}" for name in unread])


def check_run(
    settings: Settings, run_params: Mapping[str, Any], pipeline: Pipeline
) -> None:
    """Raise SettingsError if the parameters or the runner cannot work for this run."""
    check_groups(run_params.get("runtime_params") or {}, pipeline.inputs())
    names = short_names(pipeline)
    if "run_sweep" in names:
        check_sweep(settings)
    if "cross_validate" in names:
        check_sweep(settings, settings.split.folds)
    measures = settings.benchmark
    if "run_trials" in names and measures.free_global_batch and measures.mode != "grid":
        raise SettingsError(
            "benchmark.free_global_batch applies to benchmark.mode=grid, and mode "
            f"{measures.mode} keeps the global batch: set mode grid, or false"
        )
    if "params:model" in pipeline.inputs():
        check_model_keys(settings.model)
    if "model" in pipeline.inputs():  # the catalog loads it before any node runs
        import_own(settings.model)
    check_machine(settings.train.distributed, pipeline)
    trains = TRAINING_NODES & names
    if trains:
        check_options(settings)
    runner = str(run_params["runner"])
    if trains and ("ParallelRunner" in runner or "ThreadRunner" in runner):
        raise SettingsError(
            f"{', '.join(sorted(trains))} cannot run in a ParallelRunner or "
            "ThreadRunner: training starts its own processes, one per device. Omit "
            "--runner; train.distributed.num_processes sets how many."
        )


def check_machine(settings: DistributedSettings, pipeline: Pipeline) -> None:
    """Raise SettingsError if several machines or Slurm tasks would do the same work and
    write the same files."""
    tasks = environment.slurm_tasks()
    if not environment.launched_from_outside() and tasks > settings.num_machines:
        raise SettingsError(
            f"srun started this command {tasks} times, and each would do all of it in "
            f"the same data folder (train.distributed.num_machines is "
            f"{settings.num_machines}): start one task per machine "
            "(--ntasks-per-node=1) and set the number of machines in each, like "
            "deploy/slurm.sh; flatout starts one process per GPU"
        )
    training = [n.name for n in pipeline.nodes if n.short_name == "train_model"]
    others = pipeline - pipeline.from_nodes(*training) if training else pipeline
    if settings.machine_rank > 0 and others.nodes:
        names = ", ".join(sorted(short_names(others)))
        raise SettingsError(
            f"train.distributed.machine_rank={settings.machine_rank}: machines other "
            f"than 0 only train, and {names} would write what machine 0 writes. Type "
            "kedro run --pipelines=train with the same parameters here, and before it, "
            "once, on one machine, kedro run --pipelines=split,tokenize"
        )
