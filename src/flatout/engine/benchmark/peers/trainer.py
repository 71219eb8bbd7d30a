"""The Hugging Face Trainer as a contender, at default flags and at its best ones."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.benchmark.peers.clock import PeerClock
from flatout.engine.benchmark.peers.samples import (
    OnDevice,
    RowNumbers,
    SampleCollator,
)
from flatout.engine.families import family_of
from flatout.engine.machine.environment import usable_cores
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.model import TaskModel
from flatout.engine.parameters import TrainSettings
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.tasks import TaskError
from flatout.engine.train.evaluate import evaluate
from flatout.engine.train.recording.report import Evaluation
from flatout.engine.train.setup.assemble import build_model
from flatout.engine.train.setup.job import TrainJob, check_rows
from flatout.engine.train.setup.resolved_config import resolve
from flatout.engine.train.setup.step_data import make_collator, make_planner

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
NOT_SPEED = frozenset(
    {
        *("output_dir", "seed", "max_steps", "report_to", "disable_tqdm"),
        "remove_unused_columns",
    }
)


def train_with_trainer(
    job: TrainJob,
    runtime: Runtime,
    name: str,
    folder: Path,
    timing: Mapping[str, Any],
) -> dict[str, Any]:
    """Train with the contender's flags; the same seed gives the same first weights.
    `timing`: rules of the clock."""
    check_rows(job)
    job.task.trainer_collator(None)  # refuses before anything is built
    _check_optimisation(job)
    model = _built(job)
    flags = flags_of(name, job, runtime)
    judge = _judge(job, runtime, model)
    clock = PeerClock(runtime, total_steps(job), judge, **timing)
    trainer = _trainer(model, job, flags, folder, clock)
    clock.start()
    trainer.train()
    return {
        **clock.figures(),
        "flags": {k: v for k, v in flags.items() if k not in NOT_SPEED},
        "strategy": flags.get("train_sampling_strategy", "random"),
        "attention": "sdpa" if family_of(model.config).attends else "none",
        "compile": flags.get("torch_compile", False),
        "cuda_graphs": False,
        "num_workers": flags.get("dataloader_num_workers", 0),
    }


def _built(job: TrainJob) -> Any:
    """As transformers builds it, with PyTorch's attention where it has any."""
    model = build_model(job)
    if family_of(model.config).attends:
        model.set_attn_implementation("sdpa")
    return model


def total_steps(job: TrainJob) -> int:
    train, seed = job.settings.train, job.settings.runtime.seed
    batches = GlobalBatches(len(job.train), train.global_batch_size, seed)
    return batches.total_steps(train.epochs, train.max_steps)


def flags_of(name: str, job: TrainJob, runtime: Runtime) -> dict[str, Any]:
    """Arguments that are not the Trainer's defaults. `trainer-default`: only those that
    make the optimisation the same; `trainer-unsorted`: the best ones, but rows in
    random order, because batches of one length learn worse."""
    same = _optimisation(job)
    if not runtime.is_cuda:
        same["use_cpu"] = True
    if name == "trainer-default":
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
    if name != "trainer-unsorted" and job.vocabulary:
        best |= _grouped_by_length()
    if runtime.is_cuda:
        best["tf32"] = True
    if workers:
        best["dataloader_prefetch_factor"] = 4
    if name == "trainer-best-compiled":
        best["torch_compile"] = True
    return {**same, **best}


def _grouped_by_length() -> dict[str, Any]:
    """transformers named the flag anew in version 5."""
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
        "learning_rate": train.learning_rate,
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


def _check_optimisation(job: TrainJob) -> None:
    """Raises TaskError for what the Trainer does not do, or not by a flag of ours."""
    default = TrainSettings()
    if job.settings.train.schedule not in SCHEDULES:
        raise TaskError("benchmark.mode peers does not support train.schedule: wsd")
    for name in OURS_ALONE:
        if getattr(job.settings.train, name) != getattr(default, name):
            raise TaskError(f"benchmark.mode peers does not support train.{name}")


def _judge(job: TrainJob, runtime: Runtime, model: Any) -> Any:
    """The engine's own evaluation, on padded batches, of a copy: the engine's forward
    pass changes the modules it runs."""
    settings = job.settings
    padded = settings.model_copy(
        update={
            "train": settings.train.model_copy(
                update={"batching": "grouped", "cuda_graphs": False}
            ),
            "runtime": settings.runtime.model_copy(update={"attention": "sdpa"}),
        }
    )
    padded_job = replace(job, settings=padded)
    resolved = resolve(padded_job, runtime, model.config)
    planner = make_planner(padded, runtime, resolved)
    collator = make_collator(padded_job, runtime, resolved, model.config)
    copy = _built(job)
    task_model = TaskModel(copy, job.task, settings.max_length)

    def judge() -> Evaluation:
        copy.load_state_dict(model.state_dict())
        task_model.to(runtime.device)
        found = evaluate(task_model, job.validation, planner, collator, runtime)
        task_model.to("cpu")
        return found

    return judge


def _trainer(
    model: Any, job: TrainJob, flags: dict[str, Any], folder: Path, clock: PeerClock
) -> Any:
    import transformers

    class Counted(transformers.Trainer):  # type: ignore[misc]
        """Counts the samples that really pass."""

        seen = 0

        def training_step(self, model: Any, inputs: Any, *args: Any, **kw: Any) -> Any:
            self.seen += len(inputs["labels"])
            return super().training_step(model, inputs, *args, **kw)

    class Clocked(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            if clock.step_done(trainer.seen):
                control.should_training_stop = True
            trainer.seen = 0

    trainer = Counted(
        args=transformers.TrainingArguments(
            output_dir=str(folder / "trainer"), **flags
        ),
        callbacks=[Clocked()],
        **_fed(model, job),
    )
    return trainer


def _fed(model: Any, job: TrainJob) -> dict[str, Any]:
    """The model, the rows of train, and what collates them, as the Trainer has them."""
    if job.vocabulary is None:
        return {
            "model": OnDevice(model, job.task),
            "train_dataset": RowNumbers(len(job.train)),
            "data_collator": SampleCollator(job),
        }
    from datasets import Dataset
    from transformers import DataCollatorWithPadding

    tokenizer = _padding_tokenizer(job.vocabulary)
    own = job.task.trainer_collator(tokenizer)
    return {
        "model": model,
        "train_dataset": Dataset(job.train.table.replace_schema_metadata()),
        "data_collator": own or DataCollatorWithPadding(tokenizer),
    }


def _padding_tokenizer(vocabulary: Vocabulary) -> Any:
    """A tokenizer that can do nothing but pad."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    pieces = {"[PAD]": vocabulary.pad_token_id}
    tokenizer = Tokenizer(models.WordLevel(pieces, unk_token="[PAD]"))  # noqa: S106
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="[PAD]")  # noqa: S106
