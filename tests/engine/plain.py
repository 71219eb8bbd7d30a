"""A typical hand-written training loop: a transformers model, rows padded to the
longest of the whole batch, and PyTorch's own AdamW, clipping and schedule."""

import pickle
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    Trainer,
)

from flatout.engine.batches.collation import Collator
from flatout.engine.batches.global_batches import GlobalBatches
from flatout.engine.machine.runtime import Runtime
from flatout.engine.parameters import parse_settings
from flatout.engine.rows.layout import Layout
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.train.loop import TrainResult, train
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.step import Stepper
from tests.engine.families import (
    BILM,
    CONFIGS,
    LABEL_NAMES,
    RECURRENT,
    VOCABULARY,
)
from tests.engine.runs import NO_DROPOUT, make_job
from tests.forks import fork_two
from tests.make import task_rows

FAMILY = {"causal-lm": "llama", "next-key": "log_key_lstm", "bidirectional-lm": "bilm"}
"""The family for each task. All other tasks use BERT."""
AUTO = {
    "bidirectional-lm": AutoModelForPreTraining,
    "embedding": AutoModel,
    "image-classification": AutoModelForImageClassification,
    "causal-lm": AutoModelForCausalLM,
    "masked-lm": AutoModelForMaskedLM,
    "next-key": AutoModelForCausalLM,
}
TYPES = "token_type_ids"
RATES = [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
"""Learning rates of 10 steps relative to the peak: 2 warm-up steps, then linear
decay."""
TRAIN = {
    "global_batch_size": 16,
    "max_steps": 10,
    "epochs": 3,
    "log_every": 1,
    "evaluate_every": None,
    "learning_rate": 1e-2,
    "warmup_fraction": 0.2,
    "adam_beta1": 0.8,
    "adam_beta2": 0.95,
    # Larger than the rounding errors of gradients that should be zero (a key's bias).
    "adam_epsilon": 1e-4,
    "weight_decay": 0.1,
    "max_grad_norm": 0.8,
    "resume": "never",
}


@dataclass
class Curve:
    """The values of each step of a training run."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    gradients: list[dict[str, Tensor]]
    """Gradients by parameter name, before clipping."""
    weights: dict[str, Tensor]
    """Weights after the last step."""
    hits: list[int] = field(default_factory=list)
    """Number of correct predictions per step, only in plain training of classifiers."""
    test_loss: float = 0.0
    """Test loss with the weights after the last step."""
    test_accuracy: float | None = None
    """Test accuracy, only for classifiers."""


def job_for(
    folder: Path, task: str, start: Path, *, rows: int = 60, **train: Any
) -> TrainJob:
    """Return a training job for `task` that starts with the weights in `start`, with 16
    rows per step."""
    settings = parse_settings(
        {
            "runtime": {"precision": "fp32", "threads": 1},
            "model": {"task": task, "name_or_path": str(start)},
            "tokenize": {"max_length": 24},
            "train": {"distributed": {"num_processes": 1}, **TRAIN, **train},
        }
    )
    names = tuple(LABEL_NAMES) if task == "sequence-classification" else ()
    splits = task_rows(task, rows)
    return replace(make_job(folder), settings=settings, label_names=names, **splits)


def of_pairs(job: TrainJob) -> TrainJob:
    """Return `job` with the last two thirds of each row as the second text."""

    def typed(rows: TokenRows) -> TokenRows:
        lengths = rows.lengths(np.arange(len(rows))).tolist()
        kinds = [[int(i >= n // 3) for i in range(n)] for n in lengths]
        own = rows.views(np.arange(len(rows)))
        table = {
            "input_ids": pa.array([v.tolist() for v in own], pa.list_(pa.int32())),
            TYPES: pa.array(kinds, pa.list_(pa.int8())),
            "labels": pa.array(rows.table["labels"].to_numpy()),
        }
        return TokenRows(pa.table(table))

    splits = {name: typed(getattr(job, name)) for name in ("train", "validation")}
    return replace(job, test=typed(job.test), **splits)


def without_targets(job: TrainJob, step: int) -> TrainJob:
    """Return `job`, in which all rows of a step's batch have one special token only."""
    batches = GlobalBatches(len(job.train), 16, job.settings.runtime.seed)
    empty = set(batches.rows(step).tolist())
    views = [view.tolist() for view in job.train.views(np.arange(len(job.train)))]
    rows = [ids[:1] if row in empty else ids for row, ids in enumerate(views)]
    table = pa.table({"input_ids": pa.array(rows, pa.list_(pa.int32()))})
    return replace(job, train=TokenRows(table))


def save_start(folder: Path, task: str, **own: Any) -> Path:
    """Save initial weights, which are so large that every layer matters. `own` sets
    sizes."""
    family = FAMILY.get(task, "bert")
    sizes = (CONFIGS | BILM | RECURRENT)[family] | (
        NO_DROPOUT if family == "bert" else {}
    )
    config = AutoConfig.for_model(
        family,
        **sizes | own,
        vocab_size=VOCABULARY.size,
        pad_token_id=VOCABULARY.pad_token_id,
        initializer_range=0.2,
        num_labels=1 if task == "regression" else len(LABEL_NAMES),
    )
    if task == "sequence-classification":  # otherwise its head would start from scratch
        config.id2label = dict(enumerate(LABEL_NAMES))
        config.label2id = {name: n for n, name in enumerate(LABEL_NAMES)}
    torch.manual_seed(5)
    auto_class(task).from_config(config).save_pretrained(folder)
    return folder


def auto_class(task: str) -> Any:
    return AUTO.get(task, AutoModelForSequenceClassification)


def plain_training(job: TrainJob, model: Any = None) -> Curve:
    """Run the first 10 steps of `job`, ignoring its strategy, budget and ranks. `model`
    replaces the model of its checkpoint."""
    train, task = job.settings.train, job.settings.model.task
    model = model or auto_class(task).from_pretrained(job.settings.model.name_or_path)
    model.train()
    optimizer = torch.optim.AdamW(
        parameter_groups(model, train.weight_decay),
        lr=train.learning_rate,
        betas=(train.adam_beta1, train.adam_beta2),
        eps=train.adam_epsilon,
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [*RATES, 0].__getitem__)
    curve = Curve([], [], [], [], {})
    batches = GlobalBatches(len(job.train), 16, job.settings.runtime.seed)
    for step in range(10):
        rows, epoch = batches.rows(step), batches.epoch(step)
        inputs = _inputs(job, job.train, rows, epoch)
        loss, logits = _loss(model, task, inputs)
        if loss.isnan():  # a mean over no targets is zero, and so are its gradients
            loss = 0.0 * logits.sum()
        if task == "sequence-classification":
            curve.hits.append(int((logits.argmax(-1) == inputs["labels"]).sum()))
        optimizer.zero_grad()
        loss.backward()
        curve.gradients.append(_gradients(model))
        norm = nn.utils.clip_grad_norm_(
            model.parameters(), train.max_grad_norm or float("inf")
        )
        curve.rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
        curve.losses.append(loss.item())
        curve.norms.append(norm.item())
    curve.weights = {n: p.detach() for n, p in model.named_parameters()}
    _test(job, model.eval(), curve)
    return curve


@torch.no_grad()
def _test(job: TrainJob, model: nn.Module, curve: Curve) -> None:
    task = job.settings.model.task
    inputs = _inputs(job, job.test, np.arange(len(job.test)), 0)
    loss, logits = _loss(model, task, inputs)
    curve.test_loss = loss.item()
    if task == "sequence-classification":
        curve.test_accuracy = (inputs["labels"] == logits.argmax(-1)).double().mean()


def _loss(
    model: nn.Module, task: str, inputs: dict[str, Tensor]
) -> tuple[Tensor, Tensor]:
    """Return the mean loss over the targets, and the logits."""
    if task != "bidirectional-lm":
        loss, logits = model(**inputs)[:2]
        return loss, logits
    labels = inputs.pop("labels")
    logits = model(**inputs).logits
    real = labels[:, 1:] != -100  # pairs of adjacent tokens without padding
    scores = torch.cat([logits[:, :-1, 0][real], logits[:, 1:, 1][real]])
    targets = torch.cat([labels[:, 1:][real], labels[:, :-1][real]])
    return nn.functional.cross_entropy(scores, targets), logits


def step_losses(
    job: TrainJob, model: nn.Module, steps: int, logits_of: Callable[..., Tensor]
) -> list[tuple[float, float]]:
    """Return the loss and the gradient norm by step, with the initial weights of
    `model`. `logits_of` receives the rows of a step and its epoch."""
    losses = []
    batches = GlobalBatches(len(job.train), 16, job.settings.runtime.seed)
    for step in range(steps):
        rows = batches.rows(step)
        labels = torch.tensor(job.train.labels_of(rows))
        logits = logits_of(rows, batches.epoch(step))
        loss = nn.functional.cross_entropy(logits, labels)
        model.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        losses.append((loss.item(), norm.item()))
    return losses


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the parameters with weight decay in the Hugging Face Trainer, and the
    others."""
    names = set(Trainer.get_decay_parameter_names(None, model))
    decayed = [p for n, p in model.named_parameters() if n in names]
    spared = [p for n, p in model.named_parameters() if n not in names]
    return [
        {"params": decayed, "weight_decay": weight_decay},
        {"params": spared, "weight_decay": 0.0},
    ]


def _inputs(
    job: TrainJob, rows: TokenRows, row_ids: Any, epoch: int
) -> dict[str, Tensor]:
    """Return the arguments of a transformers model that computes its own loss."""
    task = job.settings.model.task
    if task == "masked-lm":
        return _masked(job, rows, row_ids, epoch)
    sequences = [torch.tensor(view.tolist()) for view in rows.views(row_ids)]
    pad = nn.utils.rnn.pad_sequence
    ids = pad(sequences, batch_first=True, padding_value=VOCABULARY.pad_token_id)
    mask = pad([torch.ones(len(s)) for s in sequences], batch_first=True).long()
    if rows.has_token_labels:
        own = [torch.tensor(v.tolist()) for v in rows.views(row_ids, "labels")]
        labels = pad(own, batch_first=True, padding_value=-100)
    elif task in ("causal-lm", "next-key", "bidirectional-lm"):
        labels = torch.where(mask.bool(), ids, -100)
    else:
        kind = torch.float32 if task == "regression" else torch.int64
        labels = torch.tensor(rows.table["labels"].to_numpy()[row_ids], dtype=kind)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if TYPES in rows.column_names:
        own = [torch.tensor(v.tolist()) for v in rows.views(row_ids, TYPES)]
        inputs[TYPES] = pad(own, batch_first=True)
    return inputs


def _masked(
    job: TrainJob, rows: TokenRows, row_ids: Any, epoch: int
) -> dict[str, Tensor]:
    """Mask tokens with the collator, whose choice of tokens is tested elsewhere."""
    layout = Layout(max_length=job.settings.tokenize.max_length)
    batch = Collator(job.task, layout).collate(rows, row_ids, epoch)
    ids = batch["input_ids"]
    labels = torch.full(ids.shape, -100)
    labels.view(-1)[batch["target_index"]] = batch["labels"]
    mask = batch["attention_mask"].long()
    return {
        "input_ids": batch["input_ids"],
        "attention_mask": mask,
        "labels": labels,
    }


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def observed(
    job: TrainJob, runtime: Runtime, group: ProcessGroup | None = None
) -> tuple[Curve, TrainResult]:
    """Train `job` with `train`. Return the values that the optimizer sees, and the
    result."""
    curve, update = Curve([], [], [], [], {}), Stepper.update

    def noted(stepper: Stepper) -> None:
        named = _gradients(stepper.module).items()
        found = {name.partition("model.")[2]: grad for name, grad in named}
        curve.gradients.append(found)
        (rate,) = {float(g["lr"]) for g in stepper.updater.optimizer.param_groups}
        curve.rates.append(rate)
        update(stepper)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stepper, "update", noted)
        result = train(job, runtime, group)
    curve.losses = [point.loss for point in result.history]
    curve.norms = [point.grad_norm for point in result.history]
    curve.test_loss = result.report.test_loss
    if job.settings.model.task == "sequence-classification":
        curve.test_accuracy = result.report.test_accuracy
    if runtime.ranks.is_main:
        if job.settings.model.lora.rank:  # transformers cannot load it here
            last = result.last_model
        else:
            last = auto_class(job.settings.model.task).from_pretrained(
                result.last_model_folder
            )
        curve.weights = {n: p.detach() for n, p in last.named_parameters()}
    return curve, result


def assert_same(found: Curve, plain: Curve) -> None:
    """Assert that the values are equal except for fp32 rounding."""
    assert found.rates == pytest.approx(plain.rates, rel=1e-6)
    assert found.losses == pytest.approx(plain.losses, rel=1e-5)
    assert found.norms == pytest.approx(plain.norms, rel=1e-5)
    torch.testing.assert_close(found.gradients, plain.gradients, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found.weights, plain.weights, rtol=1e-4, atol=1e-5)
    assert found.test_loss == pytest.approx(plain.test_loss, rel=1e-5)
    assert found.test_accuracy == plain.test_accuracy


def on_two_ranks(
    jobs: dict[str, TrainJob], folder: Path
) -> dict[str, tuple[Curve, TrainResult]]:
    """Train each of `jobs` on two ranks over gloo, all in the same pair of forks.
    Return what the main rank observes and returns."""
    fork_two(_train_all, jobs, folder)
    files = {name: (folder / name).read_bytes() for name in jobs}
    return {name: pickle.loads(file) for name, file in files.items()}  # noqa: S301


def _train_all(
    runtime: Runtime, group: ProcessGroup, jobs: dict[str, TrainJob], folder: Path
) -> None:
    for name, job in jobs.items():
        own = replace(group, settings=job.settings.train.distributed)
        found = observed(job, runtime, own)
        if runtime.ranks.is_main:
            (folder / name).write_bytes(pickle.dumps(found))
