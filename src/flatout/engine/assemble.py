"""Build what a run consists of."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from flatout.engine import attention
from flatout.engine.batching import GlobalBatches, Planner
from flatout.engine.blocks import fuse_blocks
from flatout.engine.choices import Choices, choose, mean_tokens
from flatout.engine.collation import Collator, StepRows
from flatout.engine.compiling import compiled
from flatout.engine.dropout import Noise, replace_dropout
from flatout.engine.flops import launch_tokens
from flatout.engine.garbage import collect_as_usual
from flatout.engine.gelu import replace_gelu
from flatout.engine.heads import DECODERS
from flatout.engine.job import TrainJob, check_rows
from flatout.engine.model import ModelError, TaskModel, build
from flatout.engine.optim import Updater, build_adamw
from flatout.engine.projections import join_products
from flatout.engine.residual import round_residual_stream
from flatout.engine.runtime import Runtime
from flatout.engine.settings import CLASSIFIES, Settings, TrainSettings
from flatout.engine.step import Stepper

logger = logging.getLogger(__name__)

CPU_OVERHEAD_TOKENS = 16
"""What one more micro-batch costs on a CPU, in tokens."""
GPU_OVERHEAD_TOKENS = 4_096
GPU_PAD_MULTIPLE = 64
GRAPH_PAD_MULTIPLE = 256
"""Packed totals are rounded up, the more the larger they are on average, so that few
CUDA graphs are needed."""
GRAPH_PAD_SHARE = 1 / 96
"""Of a global batch's tokens on average: 256 for 24,600 tokens, 1 % at most."""


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
    model = _with_attention(probe, choices.attention, runtime)
    task_model = TaskModel(model, settings.model.task, settings.tokenize.max_length)
    task_model.fused_head = _fused_head(task_model, runtime)
    if wrap is None or settings.train.distributed.strategy != "fsdp":
        task_model.to(runtime.device)  # sharding moves a block at a time
    if settings.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    noise = _replace_parts(task_model, settings.train, choices, runtime)
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
    collect_as_usual()
    return Trainer(job, runtime, choices, task_model, stepper, optimizer, data, total)


def _replace_parts(
    task_model: TaskModel, train: TrainSettings, choices: Choices, runtime: Runtime
) -> Noise | None:
    """Put in place of a model's own parts what computes the same in less time; the
    seed that its dropouts share, where they share one."""
    model = task_model.model
    if choices.packed and not runtime.is_cuda:
        replace_dropout(model, None)
    if choices.residual == "bf16":
        round_residual_stream(model)
    if not (choices.compile and runtime.is_cuda):
        return None
    noise = Noise(runtime.device)
    replace_dropout(model, noise)
    replace_gelu(model)
    if may_join(train):
        join_products(model, keep_products=choices.attention == attention.ROWS)
        if choices.residual == "bf16" and _has_triton():
            fuse_blocks(model, noise, narrowed=task_model.narrowed)
    return noise


def build_model(job: TrainJob, attn_implementation: str) -> Any:
    settings = job.settings
    return build(
        settings.model,
        job.vocabulary,
        job.label_names,
        settings.tokenize.max_length,
        attn_implementation,
    )


def _with_attention(model: Any, implementation: str, runtime: Runtime) -> Any:
    if implementation == "sdpa" and runtime.is_cuda:
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
    planner = make_planner(settings, runtime, choices, config)
    batches = GlobalBatches(
        len(job.train), settings.train.global_batch_size, settings.runtime.seed
    )
    collator = make_collator(job, runtime, choices, config)
    return StepRows(job.train, batches, planner, collator, runtime.ranks.rank)


def make_planner(
    settings: Settings, runtime: Runtime, choices: Choices, config: Any
) -> Planner:
    return Planner(
        strategy=choices.strategy,  # type: ignore[arg-type]
        token_budget=choices.token_budget,
        max_length=settings.tokenize.max_length,
        world_size=runtime.ranks.world_size,
        overhead_tokens=GPU_OVERHEAD_TOKENS if runtime.is_cuda else CPU_OVERHEAD_TOKENS,
        launch_tokens=launch_tokens(config.hidden_size, runtime),
    )


def make_collator(
    job: TrainJob, runtime: Runtime, choices: Choices, config: Any
) -> Collator:
    settings, vocabulary = job.settings, job.vocabulary
    task = settings.model.task
    if task == "masked-lm" and vocabulary.mask_token_id is None:
        raise ModelError("model.task: masked-lm needs a tokenizer with a mask token")
    multiple = _graph_multiple(job) if choices.cuda_graphs else GPU_PAD_MULTIPLE
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


def _graph_multiple(job: TrainJob) -> int:
    """A power of two, which totals are rounded up to."""
    share = int(mean_tokens(job) * GRAPH_PAD_SHARE)
    return max(GRAPH_PAD_MULTIPLE, 1 << max(0, share - 1).bit_length())


def _row_multiple(job: TrainJob, choices: Choices) -> int:
    """Rows of a packed batch differ little under a graph: all its rows, and filler."""
    if not choices.cuda_graphs:
        return 64
    filler = -(-_graph_multiple(job) // job.settings.tokenize.max_length)
    return job.settings.train.global_batch_size + filler
