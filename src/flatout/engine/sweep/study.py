"""Create or resume the Optuna study of a sweep."""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import optuna
from filelock import FileLock
from optuna.study import Study

import flatout
from flatout.engine.benchmark.recommend import versions
from flatout.engine.files.identity import digest_of, sources_of
from flatout.engine.parameters import ModelSettings
from flatout.engine.sweep.queued import fail_running, queue_again
from flatout.engine.sweep.space import objective
from flatout.engine.sweep.storage import database_file
from flatout.engine.train.setup.identity import result_identity
from flatout.engine.train.setup.job import TrainJob

logger = logging.getLogger(__name__)

QUEUE_LOCK = ".queue.lock"
"""Name of a lock file. Without the lock, machines that start at the same time would
queue the grid twice."""
SAMPLERS: dict[str, Any] = {
    "grid": optuna.samplers.RandomSampler,  # never samples: the grid is queued
    "tpe": optuna.samplers.TPESampler,
}
PRUNERS: dict[str, Any] = {
    "none": optuna.pruners.NopPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "median": optuna.pruners.MedianPruner,
}


def open_study(job: TrainJob, storage: Any) -> Study:
    """Create or resume the study of a sweep, and queue its remaining combinations.
    Different settings, data, code or versions result in a different study."""
    options = job.settings.sweep
    text = json.dumps(identity(job), sort_keys=True, default=str)
    name = f"{options.study}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    _, higher = objective(job.settings)
    with FileLock(job.work_folder / QUEUE_LOCK):
        is_known = name in optuna.get_all_study_names(storage)
        # With a seed, a resumed study would repeat the samples of the first run.
        seed = None if is_known else job.settings.runtime.seed
        study = optuna.create_study(
            storage=storage,
            study_name=name,
            load_if_exists=True,
            direction="maximize" if higher else "minimize",
            sampler=SAMPLERS[options.sampler](seed=seed),
            pruner=PRUNERS[options.pruner](),
        )
        if database_file(options.storage) is not None:
            fail_running(study)
        queue_again(study, options)
    logger.info("study %s %s", name, "continues" if is_known else "begins")
    return study


def identity(job: TrainJob) -> dict[str, Any]:
    """Return everything that must be the same on all machines of a sweep: the search
    space, data, code and versions."""
    options = job.settings.sweep
    swept = {*options.grid, *options.ranges}
    fixed = {n: v for n, v in result_identity(job).items() if n not in swept}
    tried = options.model_dump(include={"sampler", "pruner", "grid", "ranges"})
    chosen_by, _ = objective(job.settings)
    by = trained_by(job.settings.model)
    return {**fixed, **by, "tried": tried, "chosen_by": chosen_by}


def trained_by(model: ModelSettings) -> dict[str, str]:
    """Return package versions and digests of the code that trains `model`: the code of
    flatout and of a custom task or family. Results and checkpoints created by different
    code are not reused."""
    engine = Path(flatout.__file__).parent / "engine"
    named = (model.task.rpartition(".")[0], model.family)
    own = {f"code of {name}": digest_of(sources_of(name)) for name in named if name}
    return {**versions(), "code": digest_of(engine.rglob("*.py")), **own}
