"""The same job for a Trainer script: what it is told, or why there is none."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch

from flatout.engine.benchmark.peers.flags import flags_of, foreign_to_the_trainer
from flatout.engine.benchmark.trials.processes import one_gpu
from flatout.engine.machine.environment import (
    Ranks,
    nvidia_gpu_count,
    training_environment,
)
from flatout.engine.machine.runtime import Runtime, fast_bf16
from flatout.engine.parameters import RuntimeSettings, Settings
from flatout.engine.tasks import HeadKind, Task, TaskError
from flatout.engine.train.setup.job import TrainJob

MODULE = "flatout.engine.benchmark.peers.trainer_script"
SCRIPTS = ("trainer-default", "trainer-best")
"""Contenders that are scripts too."""
EVALUATION_BATCHES = 4
"""Times the training batch: nothing is kept for a backward pass."""
SERIAL_TOKENIZERS = "TOKENIZERS_PARALLELISM"
SPLITS = ("train", "validation", "test")
LABELS = {
    pa.string(): "class",
    pa.float64(): "number",
    pa.list_(pa.string()): "several",
}


def no_script(job: TrainJob) -> str | None:
    """Why there is no Trainer script for a job; None where there is one."""
    settings = job.settings
    if job.vocabulary is None:
        return f"train.rows is {settings.train.rows}, and the scripts read texts"
    if foreign := foreign_to_the_trainer(settings.train):
        return f"the Trainer has no {foreign}"
    if fault := _foreign_model(settings):
        return fault
    if _labels(job.task, settings) is None:
        return f"they are not written for model.task {settings.model.task}"
    if settings.tokenize.join_texts:
        return "they do not join texts (tokenize.join_texts)"
    return None


def _foreign_model(settings: Settings) -> str | None:
    """Models that transformers alone does not build."""
    model = settings.model
    if model.family or model.trust_remote_code:
        return "model.family and model.trust_remote_code bring code of their own"
    kind = model.config.get("model_type")
    file = Path(model.name_or_path or "", "config.json")
    if model.name_or_path and file.is_file():
        kind = json.loads(file.read_text(encoding="utf-8")).get("model_type")
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    known = kind is None or kind in CONFIG_MAPPING_NAMES
    return None if known else f"transformers has no model of type {kind}"


def _labels(task: Task, settings: Settings) -> str | None:
    """How the script makes labels; None where it cannot. A task of one's own has a
    loss of its own."""
    if "." in settings.model.task:
        return None
    if task.head is HeadKind.ROW:
        return LABELS.get(task.label_type)
    return "tokens" if task.causal and task.head is HeadKind.VOCABULARY else None


def write_rows(source: Path, target: Path) -> None:
    """Rows of a split, as its pipeline left them, as Parquet. Raises TaskError."""
    import pyarrow.parquet as pq
    from datasets import load_from_disk

    rows = load_from_disk(str(source))
    if "text" not in rows.column_names:
        columns = ", ".join(rows.column_names)
        raise TaskError(f"no script: rows have no column text but {columns}")
    if target.is_file():
        return
    table = rows.data.table.replace_schema_metadata()
    target.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, target)


def script_job(
    name: str, job: TrainJob, rows: Path, made: Mapping[str, Path], folder: Path
) -> dict[str, Any]:
    """What trainer_script.py reads. `rows`: a Parquet file a split; `made`: flatout's
    `tokenizer` and `model`, whose config is the job's; `folder`: for what it leaves."""
    model, train = job.settings.model, job.settings.train
    evaluations = _evaluations(train.evaluate_every)
    size = EVALUATION_BATCHES * train.global_batch_size
    batch = {"per_device_eval_batch_size": size}
    return {
        "rows": {split: str(rows / f"{split}.parquet") for split in SPLITS},
        "tokenizer": model.name_or_path or str(made["tokenizer"]),
        "config": str(made["model"]),
        "checkpoint": model.name_or_path,
        "revision": model.revision,
        "auto_class": job.task.auto_class,
        "labels": _labels(job.task, job.settings),
        "max_length": job.settings.tokenize.max_length,
        "evaluate_at_end": not evaluations,
        "arguments": {**_flags(name, job), **evaluations, **batch},
        "work": str(folder / "work"),
        "model": str(folder / "model"),
        "result": str(folder / "result.json"),
    }


def script_variables(name: str, runtime: RuntimeSettings) -> dict[str, str]:
    """One GPU: over several the Trainer would make each batch as often larger. The best
    flags come with flatout's variables too: threads that wait without spinning make a
    step on shared cores five times as fast. Tokenizers keep all cores."""
    if name == "trainer-default":
        return one_gpu(1)
    own = training_environment(runtime)
    return {k: v for k, v in own.items() if k != SERIAL_TOKENIZERS} | one_gpu(1)


def _evaluations(every: int | str | None) -> dict[str, Any]:
    """The Trainer's arguments for them."""
    if every is None:
        return {}
    if every == "epoch":
        return {"eval_strategy": "epoch"}
    return {"eval_strategy": "steps", "eval_steps": every}


def _flags(name: str, job: TrainJob) -> dict[str, Any]:
    """Of the machine as far as it is known without touching a GPU: bf16 None means
    that the script asks the device."""
    precision = job.settings.runtime.precision
    gpu = nvidia_gpu_count() > 0
    device = torch.device("cuda" if gpu else "cpu")
    asked = gpu and precision == "auto"
    if precision == "auto":
        precision = "bf16" if gpu or fast_bf16(device) else "fp32"
    flags = flags_of(name, job, Runtime(device, "", precision, Ranks(), 1))
    return {**flags, "bf16": None} if asked and flags.get("bf16") else flags
