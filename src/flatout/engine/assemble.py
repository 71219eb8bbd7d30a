"""Settle every `auto`, refuse what cannot work, and build what a run consists of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatout.engine import attention
from flatout.engine.batching import GlobalBatches, Planner
from flatout.engine.collation import Collator, StepRows
from flatout.engine.blocks import fuse_blocks
from flatout.engine.compiling import compiled
from flatout.engine.dropout import Noise, replace_dropout
from flatout.engine.gelu import replace_gelu
from flatout.engine.heads import DECODERS
from flatout.engine.model import ModelError, TaskModel, Vocabulary, build
from flatout.engine.optim import Updater, build_adamw
from flatout.engine.projections import join_products
from flatout.engine.residual import round_residual_stream
from flatout.engine.runtime import Runtime
from flatout.engine.settings import CLASSIFIES, Settings, SettingsError, TrainSettings
from flatout.engine.step import Stepper
from flatout.engine.tokens import TokenRows

logger = logging.getLogger(__name__)

CPU_TOKEN_BUDGET = 8_192
GPU_TOKEN_BUDGET = 65_536
CPU_OVERHEAD_TOKENS = 16
"""What one more micro-batch costs on a CPU, in tokens."""
GPU_OVERHEAD_TOKENS = 4_096
GPU_PAD_MULTIPLE = 64
GRAPH_PAD_MULTIPLE = 256
"""Packed totals are rounded up so that few CUDA graphs are needed."""
GRAPH_MAX_TOKENS = 16_384
"""Tokens of a global batch up to which launching kernels is what bounds a step."""


@dataclass(frozen=True)
class TrainJob:
    """Everything a training run needs; can be sent to another process."""

    settings: Settings
    train: TokenRows
    validation: TokenRows
    test: TokenRows
    vocabulary: Vocabulary
    label_names: tuple[str, ...]
    work_folder: Path
    """Checkpoints and the models on the way."""
    metrics_file: Path
    """Live points, a JSON line each."""
    data_key: str = ""
    """Content key of the tokens."""


@dataclass(frozen=True)
class Choices:
    """What `auto` came to, with the reasons for fallbacks."""

    strategy: str
    attention: str
    token_budget: int
    compile: bool
    cuda_graphs: bool
    fused_optimizer: bool
    residual: str = "fp32"
    notes: tuple[str, ...] = field(default=())

    @property
    def packed(self) -> bool:
        return self.strategy == "packed"


@dataclass
class Trainer:
    """The parts of a run, put together."""

    job: TrainJob
    runtime: Runtime
    choices: Choices
    model: TaskModel
    stepper: Stepper
    optimizer: torch.optim.AdamW
    data: StepRows
    total_steps: int

    @property
    def num_classes(self) -> int:
        return len(self.job.label_names) if self.model.task in CLASSIFIES else 0


Compile = Callable[[nn.Module], nn.Module]
Wrap = Callable[[TaskModel, "Compile | None"], nn.Module]
"""Compiles a model, where asked to, and prepares it for several ranks (DDP, FSDP)."""


def assemble(job: TrainJob, runtime: Runtime, wrap: Wrap | None = None) -> Trainer:
    """Build a run. Raises SettingsError and ModelError before anything is trained."""
    settings = job.settings
    check_rows(job)
    with torch.random.fork_rng(devices=[]):  # the same weights on all ranks
        torch.manual_seed(settings.runtime.seed)
        probe = build_model(job, "sdpa")
    choices = choose(job, runtime, probe.config)
    model = _with_attention(probe, choices.attention)
    task_model = TaskModel(model, settings.model.task, settings.tokenize.max_length)
    task_model.fused_head = _fused_head(task_model, runtime)
    if wrap is None or settings.train.distributed.strategy != "fsdp":
        task_model.to(runtime.device)  # sharding moves a block at a time
    if settings.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if choices.packed and not runtime.is_cuda:
        replace_dropout(model, None)
    if choices.residual == "bf16":
        round_residual_stream(model)
    noise = None
    if choices.compile and runtime.is_cuda:
        noise = Noise(runtime.device)
        replace_dropout(model, noise)
        replace_gelu(model)
        if may_join(settings.train):
            keep = choices.attention == attention.ROWS
            join_products(model, keep_products=keep)
            if choices.residual == "bf16" and _has_triton():
                fuse_blocks(model, noise, narrowed=task_model.narrowed)
    wrapped = (wrap or _alone)(task_model, compiled if choices.compile else None)
    optimizer = build_adamw(
        task_model,
        settings.train,
        fused=choices.fused_optimizer,
        capturable=choices.cuda_graphs,
    )
    stepper = Stepper(
        wrapped,
        Updater(optimizer, settings.train.max_grad_norm, fused=choices.fused_optimizer),
        runtime,
        no_sync=getattr(wrapped, "no_sync", nullcontext),
        cuda_graphs=choices.cuda_graphs,
        metrics_every=settings.train.metrics_every,
        noise=noise,
    )
    data = step_rows(job, runtime, choices, task_model.model.config)
    total = data.batches.total_steps(settings.train.epochs, settings.train.max_steps)
    return Trainer(job, runtime, choices, task_model, stepper, optimizer, data, total)


def build_model(job: TrainJob, attn_implementation: str) -> Any:
    settings = job.settings
    return build(
        settings.model,
        job.vocabulary,
        job.label_names,
        settings.tokenize.max_length,
        attn_implementation,
    )


def choose(job: TrainJob, runtime: Runtime, config: Any) -> Choices:
    """Strategy, kernel, budget and compilation for this model on this device."""
    train, notes = job.settings.train, []
    strategy, fault = _strategy(job, runtime, config)
    if fault:
        notes.append(fault)
    graphs = _cuda_graphs(job, runtime, strategy)
    return Choices(
        strategy=strategy,
        attention=_attention(job.settings, runtime, config, strategy),
        token_budget=_token_budget(job, runtime, strategy),
        compile=_compile(train.compile, runtime, notes),
        cuda_graphs=graphs,
        fused_optimizer=train.fused_optimizer,
        residual=_residual(job.settings.runtime.residual, runtime),
        notes=tuple(notes),
    )


def _strategy(job: TrainJob, runtime: Runtime, config: Any) -> tuple[str, str | None]:
    """Packed where it is exact, else grouped, with the reason."""
    wanted, kernel = job.settings.train.strategy, job.settings.runtime.attention
    if wanted not in ("auto", "packed"):
        return wanted, None
    fault = attention.packing_fault(config, runtime.device.type, runtime.compute_dtype)
    if fault is None and kernel in ("eager", "sdpa"):
        fault = f"runtime.attention: {kernel} works on padded batches"
    if fault is None:
        return "packed", None
    return "grouped", f"no packing, rows are grouped by length instead: {fault}"


def _attention(settings: Settings, runtime: Runtime, config: Any, strategy: str) -> str:
    wanted, max_length = settings.runtime.attention, settings.tokenize.max_length
    if strategy == "packed":
        short = wanted == "auto" and attention.short_rows_fit(config, max_length)
        return attention.ROWS if short and runtime.is_cuda else attention.PACKED
    if wanted == "varlen":
        raise SettingsError(
            f"runtime.attention: varlen needs train.strategy: packed, not {strategy}; "
            "set attention to auto, sdpa or eager"
        )
    return "sdpa" if wanted == "auto" else wanted


def _token_budget(job: TrainJob, runtime: Runtime, strategy: str) -> int:
    train, longest = job.settings.train, int(job.train.all_lengths.max())
    if strategy == "fixed":
        longest = job.settings.tokenize.max_length
    if train.token_budget != "auto":
        if train.token_budget < longest:
            raise SettingsError(
                f"train.token_budget={train.token_budget} is smaller than the longest "
                f"row ({longest} tokens): set it to at least {longest}"
            )
        return train.token_budget
    return max(default_token_budget(runtime.is_cuda), longest)


def default_token_budget(is_cuda: bool) -> int:
    return GPU_TOKEN_BUDGET if is_cuda else CPU_TOKEN_BUDGET


def _residual(wanted: str, runtime: Runtime) -> str:
    if wanted == "auto":
        wanted = "bf16" if runtime.is_cuda else "fp32"
    return wanted if runtime.precision == "bf16" else "fp32"


def _compile(wanted: bool | str, runtime: Runtime, notes: list[str]) -> bool:
    if wanted == "auto":
        return runtime.is_cuda
    if wanted and not runtime.is_cuda and not _has_compiler():
        raise SettingsError(
            "train.compile: no C++ compiler (g++ or clang++) is installed here; "
            "install one, or set train.compile: false"
        )
    return bool(wanted)


def _has_compiler() -> bool:
    import shutil

    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def _cuda_graphs(job: TrainJob, runtime: Runtime, strategy: str) -> bool:
    train = job.settings.train
    possible = (
        runtime.is_cuda
        and runtime.ranks.world_size == 1
        and strategy == "packed"
        and train.fused_optimizer
    )
    if train.cuda_graphs != "auto":
        if train.cuda_graphs and not possible:
            raise SettingsError(
                "train.cuda_graphs needs one GPU, strategy packed and the fused "
                "optimizer: set it to auto or false"
            )
        return bool(train.cuda_graphs)
    mean_tokens = train.global_batch_size * float(job.train.all_lengths.mean())
    return possible and mean_tokens <= GRAPH_MAX_TOKENS


def _with_attention(model: Any, implementation: str) -> Any:
    if implementation == "sdpa":
        implementation = attention.PADDED
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
    return model


def _alone(model: TaskModel, compile_module: Compile | None) -> nn.Module:
    return compile_module(model) if compile_module else model


def _fused_head(task_model: TaskModel, runtime: Runtime) -> bool:
    """On a GPU, where a language model's head is one matrix."""
    output = task_model.model.get_output_embeddings()
    return (
        runtime.is_cuda
        and task_model.task == "causal-lm"
        and task_model.head is not None
        and getattr(output, "bias", None) is None
        and _has_triton()
    )


def _has_triton() -> bool:
    from importlib.util import find_spec

    return find_spec("triton") is not None


def may_join(train: TrainSettings) -> bool:
    """Whether products may be joined: not where weights are sharded, and not where
    layers are computed again, because Dynamo then runs each layer uncompiled (what one
    product leaves for the next is a side effect)."""
    return train.distributed.strategy != "fsdp" and not train.gradient_checkpointing


def step_rows(
    job: TrainJob, runtime: Runtime, choices: Choices, config: Any
) -> StepRows:
    """The training data as micro-batches of this rank, by step."""
    settings = job.settings
    planner = make_planner(settings, runtime, choices)
    batches = GlobalBatches(
        len(job.train), settings.train.global_batch_size, settings.runtime.seed
    )
    collator = make_collator(job, runtime, choices, config)
    return StepRows(job.train, batches, planner, collator, runtime.ranks.rank)


def make_planner(settings: Settings, runtime: Runtime, choices: Choices) -> Planner:
    return Planner(
        strategy=choices.strategy,  # type: ignore[arg-type]
        token_budget=choices.token_budget,
        max_length=settings.tokenize.max_length,
        world_size=runtime.ranks.world_size,
        overhead_tokens=GPU_OVERHEAD_TOKENS if runtime.is_cuda else CPU_OVERHEAD_TOKENS,
    )


def make_collator(
    job: TrainJob, runtime: Runtime, choices: Choices, config: Any
) -> Collator:
    settings, vocabulary = job.settings, job.vocabulary
    task = settings.model.task
    if task == "masked-lm" and vocabulary.mask_token_id is None:
        raise ModelError("model.task: masked-lm needs a tokenizer with a mask token")
    multiple = GRAPH_PAD_MULTIPLE if choices.cuda_graphs else GPU_PAD_MULTIPLE
    return Collator(
        task=task,
        packed=choices.packed,
        pad_token_id=vocabulary.pad_token_id,
        last_token_pools=config.model_type in DECODERS,
        pad_to_length=(
            settings.tokenize.max_length if choices.strategy == "fixed" else None
        ),
        pad_multiple=(multiple if choices.packed else 8) if runtime.is_cuda else 1,
        row_multiple=_row_multiple(job, choices) if runtime.is_cuda else 1,
        max_length=settings.tokenize.max_length,
        mask_token_id=vocabulary.mask_token_id,
        special_token_ids=vocabulary.special_token_ids,
        vocab_size=vocabulary.size,
        mask_probability=settings.model.mask_probability,
        seed=settings.runtime.seed,
        extra_columns=tuple(
            name for name in ("token_type_ids",) if name in job.train.column_names
        ),
    )


def _row_multiple(job: TrainJob, choices: Choices) -> int:
    """Rows of a packed batch differ little under a graph: all its rows, and filler."""
    if not choices.cuda_graphs:
        return 64
    filler = -(-GRAPH_PAD_MULTIPLE // job.settings.tokenize.max_length)
    return job.settings.train.global_batch_size + filler


def check_rows(job: TrainJob) -> None:
    """Rows that fit the task and the label names. Raises SettingsError, ModelError."""
    task = job.settings.model.task
    for name, rows in _splits(job):
        if task in CLASSIFIES and rows.labels is None:
            raise SettingsError(
                f"model.task: {task} needs a column labels in {name}_tokens: set "
                "split.label_column, or choose causal-lm or masked-lm"
            )
        largest = rows.largest_token_id()
        if largest >= job.vocabulary.size:
            raise ModelError(
                f"{name}_tokens holds token {largest}, the tokenizer has "
                f"{job.vocabulary.size}: they do not belong together; run the tokenize "
                "pipeline again"
            )
    if task == "sequence-classification":
        _check_labels(job)


def _check_labels(job: TrainJob) -> None:
    classes = len(job.label_names)
    for name, rows in _splits(job):
        labels = rows.labels
        if labels is None or not len(labels):
            continue
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= classes:
            raise ModelError(
                f"{name}_tokens has labels from {low} to {high}, there are {classes} "
                f"label names (0 to {classes - 1}): run the tokenize pipeline again"
            )


def _splits(job: TrainJob) -> Sequence[tuple[str, TokenRows]]:
    return [
        ("train", job.train),
        ("validation", job.validation),
        ("test", job.test),
    ]
