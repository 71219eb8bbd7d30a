"""The identity of a run: the settings that must not change when it is resumed.

A checkpoint can only be resumed by a run with the same identity. The identity includes
all settings except those with the role EXECUTION. These change the speed, location or
output of a run, but never its result.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from flatout import __version__
from flatout.engine.files.content_key import file_hash
from flatout.engine.files.identity import digest_of, source_of
from flatout.engine.parameters import Settings, in_role, is_in
from flatout.engine.parameters.common import EXECUTION, MACHINE, by_path
from flatout.engine.parameters.own_parts import is_own
from flatout.engine.train.setup.job import TrainJob

SKIPPED = "skipped rows"


def identity(job: TrainJob) -> dict[str, Any]:
    """Return the settings that determine the result, by dotted name, and entries for
    the data, the custom code and the weights of the base model."""
    return {
        **{
            name: value
            for name, value in by_path(job.settings.model_dump(mode="json"))
            if not is_in(name, in_role(EXECUTION))
        },
        "label_names": list(job.label_names),
        "train rows": len(job.train),
        "token rows": job.data_key,
        **_own_code(job.settings),
        **_base_weights(job.settings),
    }


def _base_weights(settings: Settings) -> dict[str, str]:
    """Return hashes of an adapter's base weights, which checkpoints do not contain.
    Models on the Hub are identified by the token key, which includes the commit."""
    if not settings.model.lora.is_on:
        return {}
    folder = Path(settings.model.name_or_path or "")
    found = sorted(folder.rglob("*.safetensors")) if folder.name else []
    return {
        f"base {file.relative_to(folder)}": _hash(file, file.stat().st_mtime_ns)
        for file in found
    }


@cache
def _hash(file: Path, changed_ns: int) -> str:
    return file_hash(file)


def _own_code(settings: Settings) -> dict[str, str]:
    """Return digests of the modules with custom code, except PyTorch's own."""
    train, model = settings.train, settings.model
    own_parts = (train.optimizer, train.schedule, train.compute_metrics)
    named = (*own_parts, train.rows, model.task, model.family)
    modules = {p.rpartition(".")[0] for p in named if p is not None and is_own(p)}
    own = {m: source_of(m) for m in modules if m.partition(".")[0] != "torch"}
    return {f"code of {m}": digest_of([file]) for m, file in own.items() if file}


def result_identity(job: TrainJob) -> dict[str, Any]:
    """Return the values that must be equal before the result of a finished run is
    reused: the identity, skipped rows, the settings of evaluation and audit, and the
    version of flatout."""
    skipped = {SKIPPED: list(job.batches.skipped)} if job.batches.skipped else {}
    return {
        **identity(job),
        **skipped,
        "train.evaluate_every": job.settings.train.evaluate_every,
        "train.audit": job.settings.train.audit,
        "flatout": __version__,
    }


def equal_on_all_ranks(job: TrainJob) -> dict[str, Any]:
    """Return the values that must be equal on all ranks: the identity, and the settings
    that affect how steps are divided, logged, evaluated and saved."""
    settings = {"train": job.settings.train.model_dump(mode="json")}
    return identity(job) | {
        name: value
        for name, value in by_path(settings)
        if not is_in(name, in_role(MACHINE))
    }
