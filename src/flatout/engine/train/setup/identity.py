"""What makes a training the same training, and what may change from run to run.

A checkpoint goes on only under the same identity. Settings belong to it unless they
are named here as execution: how fast, where and how visibly, never what.
"""

from __future__ import annotations

from typing import Any

from flatout import __version__
from flatout.engine.files.own_code import digest_of, source_of
from flatout.engine.parameters import TrainSettings
from flatout.engine.parameters.common import by_path
from flatout.engine.parameters.own_parts import is_own
from flatout.engine.train.setup.job import TrainJob

EXECUTION = (
    "data_dir",
    "pipelines",
    "corpus",  # what comes of these is in the rows: `data_key`
    "split",
    "arrays",
    "images",
    "tokenize.vocab_size",
    "tokenize.join_texts",
    "benchmark",
    "detect",
    "evaluate",
    "guard",
    "predict",
    "sweep",
    "paths",
    "tracking",
    "tuned",
    "runtime.deterministic",
    "runtime.tf32",
    "runtime.cudnn_benchmark",
    "runtime.flash_sdp",
    "runtime.attention",
    "runtime.memory_limit_gib",
    "runtime.threads",
    "runtime.environment",
    "model.trust_remote_code",
    "model.family",  # how a model runs; what it is, its config says
    "train.batching",
    "train.token_budget",
    "train.log_every",
    "train.metrics_every",
    "train.error_analysis_every",
    "train.evaluate_every",
    "train.compile",
    "train.cuda_graphs",
    "train.gradient_checkpointing",
    "train.fused_optimizer",
    "train.resume",
    "train.on_oom",
    "train.deadline_hours",
    "train.synchronize_every_step",
    "train.history",
    "train.empty_cache_every",
    "train.callbacks",
    "train.loader",
    "train.checkpoint",
    "train.distributed",
)
"""Settings, or groups of them, that a run may be resumed with another value of."""
EACH_MACHINES_OWN = (
    "train.compile",
    "train.loader",
    "train.resume",
    "train.deadline_hours",
    "train.history",
    "train.empty_cache_every",
    "train.checkpoint.keep",
    "train.checkpoint.every_minutes",
    "train.distributed.heartbeat_timeout_s",
    "train.distributed.num_processes",
    "train.distributed.machine_rank",
    "train.distributed.rendezvous_endpoint",
)
"""Of the settings of training."""


def identity(job: TrainJob) -> dict[str, Any]:
    """Settings that decide what is trained, by dotted name, and the data."""
    return {
        **{
            name: value
            for name, value in by_path(job.settings.model_dump(mode="json"))
            if not _is_one_of(name, EXECUTION)
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
        if _is_one_of(name, EXECUTION)
        and _is_one_of(name, ("train", "runtime"))
        and name not in kept_apart
    }


def agreed(job: TrainJob) -> dict[str, Any]:
    """What all ranks must have the same of: what is trained, and how a step is cut,
    logged, judged and saved, where they meet."""
    settings = {"train": job.settings.train.model_dump(mode="json")}
    return identity(job) | {
        name: value
        for name, value in by_path(settings)
        if not _is_one_of(name, EACH_MACHINES_OWN)
    }


def _is_one_of(name: str, entries: tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in entries)
