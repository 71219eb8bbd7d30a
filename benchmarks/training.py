"""Code that the scripts share: rows, a stopwatch, and runs of flatout and the Trainer.

All programs train on the same rows of random tokens for the same number of steps. They
are measured with the same stopwatch, which is not part of flatout or the Trainer.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from inspect import signature
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

IS_CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_CUDA else "cpu")
GQA = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
"""PyTorch 2.11 has no such argument, and always allows fewer key heads than heads."""
FIRST_ID, PAD = 5, 0
"""Ids below FIRST_ID are special tokens."""


@dataclass(frozen=True)
class Shape:
    """A model, its rows and its global batch size."""

    config: dict[str, Any]
    batch: int
    """Rows per optimizer step."""
    mean_tokens: float = 92
    longest: int = 320
    token_budget: int | str = "auto"
    steps: int = 20
    """Optimizer steps per window. The rows of few steps would be longer for one program
    than for another, because each program has its own random order."""
    warm_steps: int = 30
    """Steps before the first window. The Trainer needs many if it is compiled."""
    micro_batch: int | None = None
    """Rows per micro-batch of programs without token budgets, or None for all rows."""
    bf16: bool = IS_CUDA
    """True if the other programs train in bf16, because they are faster in it."""

    @property
    def vocabulary(self) -> int:
        return int(self.config["vocab_size"])


WINDOWS = 3
LABELS = 12


@dataclass
class Stopwatch:
    """Measures samples/s in windows after the warm-up."""

    shape: Shape
    marks: list[float] = field(default_factory=list)
    steps: int = 0
    began: float = field(default_factory=time.perf_counter)
    first_step_s: float = 0.0

    def step(self) -> bool:
        """Count an optimizer step, and return whether all windows are measured."""
        self.steps += 1
        behind = self.steps - self.shape.warm_steps
        if self.steps == 1 or (behind >= 0 and behind % self.shape.steps == 0):
            if IS_CUDA:
                torch.cuda.synchronize()
            now = time.perf_counter()
            if self.steps == 1:
                self.first_step_s = now - self.began
            if behind >= 0:
                self.marks.append(now)
        return len(self.marks) > WINDOWS

    def figures(self) -> dict[str, Any]:
        samples = self.shape.steps * self.shape.batch
        rates = [samples / float(wall_s) for wall_s in np.diff(self.marks)]
        memory = torch.cuda.max_memory_reserved() / 2**30 if IS_CUDA else None
        return {
            "samples_per_s": median(rates),
            "spread_pct": 100 * (max(rates) - min(rates)) / median(rates),
            "first_step_s": self.first_step_s,
            "reserved_gib": memory,
            "windows_samples_per_s": rates,
        }


def token_table(shape: Shape) -> pa.Table:
    """Return a table of rows with random tokens and lognormal lengths, as in real
    texts. There are enough rows for several windows. Rows for encoders have labels."""
    chance = np.random.default_rng(2)
    count = max(2 * shape.steps, 40) * shape.batch
    draws = np.exp(0.7 * chance.standard_normal(count))
    lengths = np.clip(draws * shape.mean_tokens / draws.mean(), 4, shape.longest)
    offsets = np.concatenate([[0], np.cumsum(lengths.astype(int))]).astype(np.int32)
    ids = chance.integers(FIRST_ID, shape.vocabulary, offsets[-1]).astype(np.int32)
    columns: dict[str, Any] = {"input_ids": pa.ListArray.from_arrays(offsets, ids)}
    if shape.config["model_type"] in ("bert", "modernbert"):
        columns["labels"] = pa.array(chance.integers(0, LABELS, count))
    return pa.table(columns)


def flatout_job(
    shape: Shape,
    task: str,
    table: pa.Table,
    folder: Path,
    train: Mapping[str, Any],
    model: Mapping[str, Any] | None = None,
) -> Any:
    """Return a job that trains on `table`. `train` and `model` are additional
    parameters of these groups."""
    from flatout.engine.rows.vocabulary import Vocabulary

    given = {
        "global_batch_size": shape.batch,
        "token_budget": shape.token_budget,
        "learning_rate": 1e-4,
        "epochs": 10_000,
        "compile": IS_CUDA,
        "distributed": {"num_processes": 1},
        **train,
    }
    settings = {
        "model": {"task": task, "config": dict(shape.config), **(model or {})},
        "tokenize": {"max_length": shape.longest},
        "train": given,
    }
    classes = LABELS if task == "sequence-classification" else 0
    names = [f"label {n}" for n in range(classes)]
    vocabulary = Vocabulary(shape.vocabulary, PAD, 4, (0, 1, 2, 3, 4))
    return job_of(settings, table, vocabulary, names, folder)


def job_of(
    settings: Any, table: pa.Table, vocabulary: Any, names: Any, folder: Path
) -> Any:
    """Return a job that trains on `table`. Its validation and test splits are a few
    rows of the table, and do not influence the result."""
    from flatout.engine.parameters import parse_settings
    from flatout.engine.rows.tokens import TokenRows
    from flatout.engine.train.setup.job import TrainJob

    rows, few = TokenRows(table), TokenRows(table.slice(0, 64))
    places = folder / "run", folder / "metrics.jsonl"
    parsed = parse_settings(settings)
    return TrainJob(parsed, rows, few, few, vocabulary, tuple(names), *places, "k")


def text_table(tokenizer: Any, texts: Any, labels: Any, longest: int) -> pa.Table:
    """Return token rows of texts, or of pairs if `texts` has two columns of texts."""
    found = tokenizer(*texts, truncation=True, max_length=longest)
    names = [name for name in ("input_ids", "token_type_ids") if name in found]
    lists = {name: pa.array(found[name], pa.list_(pa.int32())) for name in names}
    return pa.table({**lists, "labels": labels})


def fine_tuned(
    table: pa.Table,
    tokenizer: Any,
    folder: Path,
    names: Any,
    seed: int,
    longest: int,
    **train: Any,
) -> Any:
    """Train the tokenizer's checkpoint with flatout, and return the model after the
    last step. `names` are the class names. If there are none, the task is regression.
    `train` are parameters of the train group."""
    from flatout.engine.machine.runtime import set_up
    from flatout.engine.rows.vocabulary import Vocabulary
    from flatout.engine.train.loop import train as trained

    task = "sequence-classification" if len(names) else "regression"
    settings = {
        "runtime": {"seed": seed},
        "model": {"task": task, "name_or_path": tokenizer.name_or_path},
        "tokenize": {"max_length": longest},
        "train": {**train, "distributed": {"num_processes": 1}},
    }
    job = job_of(settings, table, Vocabulary.of(tokenizer), names, folder)
    return trained(job, set_up(job.settings.runtime)).last_model


def logits_of(model: Any, tokenizer: Any, table: pa.Table) -> Any:
    """Return the logits (N, C) of a transformers model for labelled rows, in fp32."""
    lengths, found = pc.list_value_length(table["input_ids"]), []
    order = np.argsort(lengths.to_numpy(), kind="stable")
    model.to(DEVICE).eval()
    with torch.inference_mode():
        for rows in np.array_split(order, -(-len(order) // 200)):
            texts = table.drop_columns("labels").take(rows).to_pydict()
            padded = tokenizer.pad(texts, return_tensors="pt").to(DEVICE)
            found.append(model(**padded).logits.cpu().numpy())
    return np.concatenate(found)[np.argsort(order, kind="stable")]


def flatout(
    shape: Shape,
    task: str,
    table: pa.Table | None = None,
    model: Mapping[str, Any] | None = None,
    **train: Any,
) -> dict[str, Any]:
    """Return the throughput of training with flatout's own loader, step and logging. If
    no table is given, the rows are those of `token_table`."""
    from flatout.engine.batches.loader import StepLoader
    from flatout.engine.benchmark.measuring.driver import Driver
    from flatout.engine.machine.environment import apply
    from flatout.engine.machine.runtime import set_up
    from flatout.engine.train.setup.assemble import assemble

    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        train = {"max_steps": 1_000_000, **train}
        rows = token_table(shape) if table is None else table
        job = flatout_job(shape, task, rows, Path(name), train, model)
        apply(job.settings.runtime)
        runtime = set_up(job.settings.runtime)
        trainer = assemble(job, runtime)
        # As in the other programs, the time to create the model is not included.
        watch = Stopwatch(shape)
        trainer.model.train()
        settings = job.settings.train.loader
        loader = StepLoader(trainer.data, settings, runtime, 0, trainer.total_steps)
        driver = Driver(trainer)
        for batch in loader:
            driver.step(batch, loader.wait_s)
            if watch.step():
                break
    resolved = trainer.resolved
    chosen = {"strategy": resolved.strategy, "token_budget": resolved.token_budget}
    return {**watch.figures(), **chosen, "graphs": resolved.cuda_graphs}


def best_flags(shape: Shape) -> dict[str, Any]:
    """Return the fastest flags for transformers' and sentence-transformers' Trainer."""
    micro = shape.micro_batch or shape.batch
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": shape.batch // micro,
        "max_steps": 1_000_000,
        "learning_rate": 1e-4,
        "bf16": shape.bf16,
        "tf32": True if IS_CUDA else None,
        "use_cpu": not IS_CUDA,
        "optim": "adamw_torch_fused",
        "dataloader_num_workers": 4 if IS_CUDA else 0,
        "dataloader_persistent_workers": IS_CUDA,
        "dataloader_drop_last": True,
        "logging_nan_inf_filter": False,
        "logging_strategy": "no",
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }


def clock(watch: Stopwatch) -> Any:
    """Return a callback that stops training after the last window of the stopwatch."""
    import transformers

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kw: Any) -> None:
            control.should_training_stop = watch.step()

    return Clock()


def trainer(shape: Shape, model: Any, collator: Any, **flags: Any) -> dict[str, Any]:
    """Return the throughput of transformers' Trainer with `flags` in addition to
    `best_flags`. Rows are in random order unless a flag changes this."""
    import transformers
    from datasets import Dataset

    watch = Stopwatch(shape)
    with tempfile.TemporaryDirectory(prefix="trainer-") as name:
        transformers.Trainer(
            model,
            transformers.TrainingArguments(name, **{**best_flags(shape), **flags}),
            train_dataset=Dataset(token_table(shape)),
            data_collator=collator,
            callbacks=[clock(watch)],
        ).train()
    return watch.figures()


def padding_collator(*, causal: bool) -> Callable[[list[dict[str, Any]]], Any]:
    """Return a collator that pads rows to the longest one. If `causal` is True, the
    labels are the tokens themselves. Otherwise each row contains its label."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
        ids = [torch.tensor(row["input_ids"]) for row in rows]
        padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
        mask = (padded != PAD).long()
        if causal:
            labels = padded.masked_fill(mask == 0, -100)
        else:
            labels = torch.tensor([row["labels"] for row in rows])
        return {"input_ids": padded, "attention_mask": mask, "labels": labels}

    return collate


def register_packed_attention() -> str:
    """Register PyTorch's flash attention for concatenated rows with transformers, and
    return its name. Without a GPU, attention is computed row by row."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register("packed_rows", _packed_attention)
    AttentionMaskInterface.register("packed_rows", lambda *_, **__: None)
    return "packed_rows"


def _packed_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kw: Any
) -> tuple[Tensor, None]:
    """Return the attention (1, P, H, D) of `query` (1, H, P, D) to `key` and `value`
    (1, G, P, D), with P tokens in all rows, H query heads and G key heads. Only models
    that are not causal may have a sliding window."""
    bounds, longest = kw["cu_seq_lens_q"], int(kw["max_length_q"])
    causal = bool(getattr(module, "is_causal", False))
    left = (kw.get("sliding_window") or 0) - 1
    q, k, v = (t[0].transpose(0, 1) for t in (query, key, value))
    if IS_CUDA:
        q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
        sizes = (bounds, bounds, longest, longest)
        window = (left, 0 if causal else left)
        return varlen_attn(q, k, v, *sizes, window_size=window, **GQA)[None], None
    attend = partial(
        torch.nn.functional.scaled_dot_product_attention,
        is_causal=causal,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    near = None
    if left >= 0:
        places = torch.arange(longest)
        near = (places[:, None] - places).abs() <= left
    rows = [
        attend(
            *(t[a:b].transpose(0, 1) for t in (q, k, v)),
            attn_mask=None if near is None else near[: b - a, : b - a],
        )
        for a, b in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)
    ]
    return torch.cat(rows, 1).transpose(0, 1).unsqueeze(0), None
