"""Build what a run consists of."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from flatout.engine import attention
from flatout.engine.blocks import fuse_blocks
from flatout.engine.building import build
from flatout.engine.choices import Choices, choose, settle
from flatout.engine.collation import StepRows
from flatout.engine.compiling import compiled
from flatout.engine.decoder_blocks import fuse_decoder
from flatout.engine.dropout import Noise, replace_dropout
from flatout.engine.exchange import Exchange
from flatout.engine.garbage import collect_as_usual
from flatout.engine.gelu import replace_gelu
from flatout.engine.job import TrainJob, check_rows
from flatout.engine.model import TaskModel
from flatout.engine.optim import Updater, build_adamw
from flatout.engine.projections import join_products
from flatout.engine.residual import round_residual_stream
from flatout.engine.runtime import Runtime
from flatout.engine.settings import CLASSIFIES, TrainSettings
from flatout.engine.step import Stepper
from flatout.engine.step_data import step_rows

logger = logging.getLogger(__name__)


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


class Together(Protocol):
    """What a run needs of the ranks that train together (jobs/distributed.py)."""

    def everybodys(self, value: Any) -> list[Any]:
        """`value` of each rank."""

    def check_equal(self, facts: Mapping[str, Any]) -> None:
        """Raises SettingsError where a rank has others."""

    def wrap(self, model: TaskModel, compiled: Compile | None) -> nn.Module:
        """`model` compiled, where asked to, and prepared for all ranks (DDP, FSDP)."""


def assemble(job: TrainJob, runtime: Runtime, team: Together | None = None) -> Trainer:
    """Build a run. Raises SettingsError and ModelError before anything is trained."""
    settings = job.settings
    check_rows(job)
    with torch.random.fork_rng(devices=[]):  # the same weights on all ranks
        torch.manual_seed(settings.runtime.seed)
        probe = build_model(job, "sdpa")
    choices = choose(job, runtime, probe.config)
    if team:
        choices = settle(job, runtime, choices, team.everybodys(choices))
        precision = {"runtime.precision (auto)": runtime.precision}
        team.check_equal(choices.agreed() | precision)
    model = _with_attention(probe, choices.attention, runtime)
    task_model = TaskModel(model, settings.model.task, settings.tokenize.max_length)
    task_model.fused_head = _fused_head(task_model, runtime)
    if team is None or settings.train.distributed.strategy != "fsdp":
        task_model.to(runtime.device)  # sharding moves a block at a time
    if settings.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    noise = _replace_parts(task_model, settings.train, choices, runtime)
    wrap = team.wrap if team and not choices.exchange_at_once else _alone
    wrapped = wrap(task_model, compiled if choices.compile else None)
    optimizer = build_adamw(
        task_model,
        settings.train,
        fused=choices.fused_optimizer,
        capturable=choices.cuda_graphs,
    )
    fused = choices.fused_optimizer
    updater = Updater(optimizer, settings.train.max_grad_norm, fused=fused)
    stepper = Stepper(
        wrapped,
        updater,
        runtime,
        no_sync=getattr(wrapped, "no_sync", nullcontext),
        exchange=Exchange(updater.parameters) if choices.exchange_at_once else None,
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
        if choices.attention == attention.ROWS:
            fuse_decoder(model)
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
