"""The Trainer's arguments for each contender."""

from __future__ import annotations

import math
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.machine.environment import usable_cores
from flatout.engine.machine.runtime import Runtime
from flatout.engine.parameters import TrainSettings
from flatout.engine.tasks import TaskError
from flatout.engine.train.setup.job import TrainJob

MAX_WORKERS = 8
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant_with_warmup",
}
OURS_ALONE = (
    "class_weights",
    "label_smoothing",
    "focal_gamma",
    "min_learning_rate_share",
    "optimizer",
    "layer_decay",
    "freeze",
)


def total_steps(job: TrainJob) -> int:
    train, seed = job.settings.train, job.settings.runtime.seed
    batches = GlobalBatches(len(job.train), train.global_batch_size, seed)
    return batches.total_steps(train.epochs, train.max_steps)


def parts_of(name: str) -> frozenset[str]:
    """What a contender's name says of it: `trainer-flattened-liger` is flattened, and
    has Liger's kernels. Best flags are meant unless it is the default."""
    return frozenset(name.split("-")[1:])


def flags_of(name: str, job: TrainJob, runtime: Runtime) -> dict[str, Any]:
    """Arguments that are not the Trainer's defaults. `trainer-default`: only those that
    make the optimisation the same; all others: the best ones. Rows are sorted by length
    but where they are not padded (flattened) and in `trainer-unsorted`, because batches
    of one length learn worse. Raises TaskError for what is not installed."""
    same, parts = _optimisation(job), parts_of(name)
    if not runtime.is_cuda:
        same["use_cpu"] = True
    if "default" in parts:
        return same
    workers = min(MAX_WORKERS, usable_cores() // 2) if runtime.is_cuda else 0
    best = {
        "bf16": runtime.precision == "bf16",
        "fp16": runtime.precision == "fp16",
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": workers,
        "dataloader_persistent_workers": workers > 0,
        "dataloader_pin_memory": runtime.is_cuda,
        "logging_nan_inf_filter": False,
    }
    if not parts & {"unsorted", "flattened"} and job.vocabulary:
        best |= _grouped_by_length()
    if runtime.is_cuda:
        best["tf32"] = True
    if workers:
        best["dataloader_prefetch_factor"] = 4
    if "compiled" in parts:
        best["torch_compile"] = True
    if "liger" in parts:
        _check_liger()
        best["use_liger_kernel"] = True
    return {**same, **best}


def _check_liger() -> None:
    """Raises TaskError without the package: it is no dependency of flatout."""
    if find_spec("liger_kernel") is None:
        raise TaskError(
            "liger-kernel is not installed, so this contender was left out: "
            "pip install liger-kernel"
        )


def _grouped_by_length() -> dict[str, Any]:
    """transformers renamed the flag in version 5."""
    from transformers import TrainingArguments

    names = {entry.name for entry in fields(TrainingArguments)}
    if "train_sampling_strategy" in names:
        return {"train_sampling_strategy": "group_by_length"}
    return {"group_by_length": True}


def _optimisation(job: TrainJob) -> dict[str, Any]:
    train, total = job.settings.train, total_steps(job)
    return {
        "per_device_train_batch_size": train.global_batch_size,
        "max_steps": total,
        "learning_rate": train.peak_learning_rate,
        "lr_scheduler_type": SCHEDULES[train.schedule],
        "warmup_steps": math.ceil(train.warmup_fraction * total),
        "weight_decay": train.weight_decay,
        "adam_beta1": train.adam_beta1,
        "adam_beta2": train.adam_beta2,
        "adam_epsilon": train.adam_epsilon,
        "max_grad_norm": train.max_grad_norm or 0.0,
        "seed": job.settings.runtime.seed,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "remove_unused_columns": job.vocabulary is not None,
    }


def check_optimisation(job: TrainJob) -> None:
    """Raises TaskError for what the Trainer does not do, or not by a flag of ours."""
    if foreign := foreign_to_the_trainer(job.settings.train):
        raise TaskError(f"benchmark.mode peers does not support {foreign}")


def foreign_to_the_trainer(train: TrainSettings) -> str | None:
    """The first setting that the Trainer has no flag for; None where it has all."""
    default = TrainSettings()
    if train.schedule not in SCHEDULES:
        return f"train.schedule: {train.schedule}"
    changed = (n for n in OURS_ALONE if getattr(train, n) != getattr(default, n))
    return next((f"train.{name}" for name in changed), None)
