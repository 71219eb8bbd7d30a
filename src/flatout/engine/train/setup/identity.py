"""What makes a training the same training, and what may change from run to run.

A checkpoint goes on only under the same identity. Settings belong to it unless their
fields have the role of execution: how fast, where and how visibly, never what.
"""

from __future__ import annotations

from typing import Any

from flatout import __version__
from flatout.engine.files.own_code import digest_of, source_of
from flatout.engine.parameters import TrainSettings
from flatout.engine.parameters.common import EXECUTION, MACHINE, by_path
from flatout.engine.parameters.own_parts import is_own
from flatout.engine.parameters.roles import in_role, is_in
from flatout.engine.train.setup.job import TrainJob


def identity(job: TrainJob) -> dict[str, Any]:
    """Settings that decide what is trained, by dotted name, and the data."""
    return {
        **{
            name: value
            for name, value in by_path(job.settings.model_dump(mode="json"))
            if not is_in(name, in_role(EXECUTION))
        },
        "label_names": list(job.label_names),
        "train rows": len(job.train),
        "token rows": job.data_key,
        **_own_code(job.settings.train),
    }


def _own_code(train: TrainSettings) -> dict[str, str]:
    """Digests of the modules of parts of one's own; not of PyTorch's, whose version
    may change."""
    named = (train.optimizer, train.schedule, train.compute_metrics)
    modules = {p.rpartition(".")[0] for p in named if p is not None and is_own(p)}
    own = {m: source_of(m) for m in modules if m.partition(".")[0] != "torch"}
    return {f"code of {m}": digest_of([file]) for m, file in own.items() if file}


def result_identity(job: TrainJob) -> dict[str, Any]:
    """What a finished training must have the same of to stand for `job`: also what
    chooses the best model, and the code."""
    return identity(job) | {
        "train.evaluate_every": job.settings.train.evaluate_every,
        "flatout": __version__,
    }


def execution(job: TrainJob) -> dict[str, Any]:
    """How `job` is trained, by dotted name: a result is the same with other values."""
    kept_apart = ("train.resume", "train.evaluate_every")
    return {
        name: value
        for name, value in by_path(job.settings.model_dump(mode="json"))
        if is_in(name, in_role(EXECUTION))
        and is_in(name, ("train", "runtime"))
        and name not in kept_apart
    }


def agreed(job: TrainJob) -> dict[str, Any]:
    """What all ranks must have the same of: what is trained, and how a step is cut,
    logged, judged and saved, where they meet."""
    settings = {"train": job.settings.train.model_dump(mode="json")}
    return identity(job) | {
        name: value
        for name, value in by_path(settings)
        if not is_in(name, in_role(MACHINE))
    }
