"""Build the parts of a training run, i.e. the model, the optimizer and the data."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from flatout.engine.batches.collation import StepRows
from flatout.engine.families import FusePlan
from flatout.engine.machine.garbage import collect_as_usual
from flatout.engine.machine.runtime import Runtime, has_triton, let_segments_grow
from flatout.engine.models.adapters import (
    add_adapter,
    freeze,
    has_adapter,
    round_frozen,
)
from flatout.engine.models.building import build
from flatout.engine.models.compilation import compiled
from flatout.engine.models.flops import measured_tflops
from flatout.engine.models.memory import Demand
from flatout.engine.models.model import TaskModel
from flatout.engine.models.row_faults import check_ends, check_padding
from flatout.engine.ops import attention
from flatout.engine.ops.dropout import Noise, replace_dropout
from flatout.engine.ops.flash4 import choose_flash_kernel
from flatout.engine.ops.plain import are_matrices
from flatout.engine.ops.precision import round_residual_stream
from flatout.engine.parameters import SettingsError, TrainSettings
from flatout.engine.tasks import has_custom_head
from flatout.engine.tasks._shared.cross_entropy import CrossEntropy
from flatout.engine.train.flat_all_reduce import FlatAllReduce
from flatout.engine.train.optimizer import Updater, build_optimizer
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.recording.audit import RowAudit
from flatout.engine.train.setup.acceleration import Planned
from flatout.engine.train.setup.budgets import Fit, combine_ranks, needs_whole_steps
from flatout.engine.train.setup.job import TrainJob, check_rows
from flatout.engine.train.setup.memory_fit import fit
from flatout.engine.train.setup.resolved_config import (
    PROBE_S,
    ResolvedConfig,
    resolve,
    slow_devices,
)
from flatout.engine.train.setup.step_data import step_rows
from flatout.engine.train.step import Stepper

logger = logging.getLogger(__name__)


@dataclass
class Trainer:
    """The parts of a training run, as built by `assemble`."""

    job: TrainJob
    runtime: Runtime
    resolved: ResolvedConfig
    model: TaskModel
    stepper: Stepper
    optimizer: torch.optim.Optimizer
    data: StepRows
    total_steps: int
    demand: Demand | None = None
    """The measured memory demand, or None if the token budget was not measured."""
    evaluation_budget: int = sys.maxsize
    """The maximum number of tokens per micro-batch in evaluations, which is lowered if
    an evaluation runs out of memory. The maximum in training is
    `resolved.token_budget`."""

    @property
    def described(self) -> str:
        """A description of the device and of the settings in use."""
        runtime, resolved = self.runtime, self.resolved
        at_once = ", gradients exchanged at once" if resolved.flat_all_reduce else ""
        return (
            f"{runtime.device_name} x {runtime.ranks.world_size}: {runtime.precision} "
            f"(residual stream {resolved.residual}), {resolved.strategy}, attention "
            f"{resolved.attention}, compile {resolved.compile}, graphs "
            f"{resolved.cuda_graphs}{at_once}, {runtime.threads} threads"
        )


def assemble(
    job: TrainJob,
    runtime: Runtime,
    group: ProcessGroup | None = None,
    plan: Callable[[Any], Planned] | None = None,
) -> Trainer:
    """Build the parts of a run. `plan` is a function that returns the planned work for
    a model. It is None if steps are only measured, as in benchmarks. Raises
    SettingsError or ModelError if the job cannot be trained."""
    train = job.settings.train
    check_rows(job)
    sharded = group is not None and train.distributed.strategy == "fsdp"
    model = seeded_model(job, group, empty=sharded and not runtime.ranks.is_main)
    check_ends(model, job.splits)
    if job.vocabulary:
        check_padding(model, job.task)
    planned = plan and plan(model)
    if group:
        planned = group.all_gather(planned)[0]  # the main rank's checkpoints decide
    resolved = _resolved(job, runtime, model.config, planned, group)
    task_model = _task_model(job, runtime, resolved, model, synced=group is not None)
    if not sharded:  # sharding gathers matrices in the compute dtype
        round_frozen(model, runtime.compute_dtype)
        task_model.to(runtime.device)  # sharding moves one block at a time
    noise = _replace_parts(task_model, train, resolved, runtime)
    resolved = replace(resolved, notes=resolved.notes + unfused_parts(task_model))
    wrapped: nn.Module = task_model
    if group and not resolved.flat_all_reduce:
        wrapped = group.wrap(task_model, resolved.compile)
    elif resolved.compile:
        wrapped = compiled(task_model)
    stepper = _stepper(job, runtime, resolved, task_model, wrapped, noise)
    demand = None
    free = train.token_budget == "auto" and not needs_whole_steps(model.config)
    if runtime.is_cuda and free:
        found = fit(job, resolved, task_model, stepper)
        found = combine_ranks(found, group.all_gather(found) if group else [found])
        kept = planned.token_budget if planned else None  # for identical results
        resolved = _within(found, resolved, kept or found.token_budget)
        demand = found.demand
    data = step_rows(job, runtime, resolved, task_model.model.config)
    collect_as_usual()
    parts = task_model, stepper, stepper.updater.optimizer, data
    return Trainer(job, runtime, resolved, *parts, job.total_steps, demand)


def seeded_model(
    job: TrainJob, group: ProcessGroup | None = None, *, empty: bool = False
) -> Any:
    """Build the model with its adapter and frozen parts. The weights are equal on all
    ranks. If `empty` is true, they have no storage yet (meta device), because rank 0
    broadcasts them later."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job.settings.runtime.seed)
        model = build_model(job, empty=empty)
        new = getattr(model, "new_weights", ())
        if group:
            new = group.all_gather(new)[0]
        with torch.device("meta") if empty else nullcontext():
            add_adapter(model, job.settings.model, job.task, new)
    freeze(model, job.settings.train.freeze)
    if job.task.pooling and getattr(model, "pooler", None) is not None:
        model.pooler.requires_grad_(False)  # the task pools the hidden states itself
    return model


def _resolved(
    job: TrainJob,
    runtime: Runtime,
    config: Any,
    planned: Planned | None,
    group: ProcessGroup | None,
) -> ResolvedConfig:
    resolved = resolve(job, runtime, config, planned)
    if group:
        resolved = group.all_gather(resolved)[0]  # the same on all ranks
        if runtime.is_cuda:
            rates = group.all_gather(measured_tflops(runtime, PROBE_S))
            resolved = replace(resolved, notes=resolved.notes + slow_devices(rates))
        group.check_equal({"runtime.precision (auto)": runtime.precision})
    return resolved


def _task_model(
    job: TrainJob,
    runtime: Runtime,
    resolved: ResolvedConfig,
    model: Any,
    *,
    synced: bool,
) -> TaskModel:
    """Wrap `model` for its task. If `synced` is true, BatchNorm computes statistics
    over the samples of all ranks."""
    model = _with_attention(model, resolved.attention, runtime)
    longest = job.max_length if resolved.attention == attention.ROWS else 0
    choose_flash_kernel(model.config, runtime.device, longest)
    task_model = TaskModel(model, job.task, job.max_length)
    if task_model.family.samples.batch_statistics and synced:
        nn.SyncBatchNorm.convert_sync_batchnorm(task_model)  # type: ignore[no-untyped-call]
    task_model.fused_head = _fused_head(task_model, runtime)
    if job.settings.train.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return task_model


def _stepper(
    job: TrainJob,
    runtime: Runtime,
    resolved: ResolvedConfig,
    task_model: TaskModel,
    wrapped: nn.Module,
    noise: Noise | None,
) -> Stepper:
    train, fused = job.settings.train, resolved.fused_optimizer
    graphs, audits = resolved.cuda_graphs, train.audit
    optimizer = build_optimizer(task_model, train, fused=fused, capturable=graphs)
    updater = Updater(optimizer, train.max_grad_norm, fused=fused)
    flat = FlatAllReduce(updater.parameters) if resolved.flat_all_reduce else None
    return Stepper(
        wrapped,
        updater,
        runtime,
        no_sync=getattr(wrapped, "no_sync", nullcontext),
        all_reduce=flat,
        cuda_graphs=graphs,
        metrics_every=train.metrics_every,
        hits=job.task.hits,
        noise=noise,
        compare=job.task.loss if job.task.whole_batch else None,
        audit=RowAudit(len(job.train), runtime.device) if audits else None,
    )


def _within(found: Fit, resolved: ResolvedConfig, budget: int) -> ResolvedConfig:
    """Return `resolved` with the token budget `budget`, which the measurement `found`
    allows. Raises SettingsError if no step fits in memory."""
    if found.fault:
        raise SettingsError(found.fault)
    if found.tight and not resolved.cuda_graphs:
        let_segments_grow()
    reason = found.reason if budget == found.token_budget else ""
    return replace(resolved, token_budget=budget, budget_reason=reason)


def _replace_parts(
    task_model: TaskModel,
    train: TrainSettings,
    resolved: ResolvedConfig,
    runtime: Runtime,
) -> Noise | None:
    """Replace parts of the model with faster equivalents that have the same parameters
    and names. Return the random seed that new dropout layers share, or None."""
    model = task_model.model
    if resolved.residual == "bf16":
        round_residual_stream(model)
    if not runtime.is_cuda:
        if resolved.packed:
            replace_dropout(model, None)
        return None
    noise = Noise(runtime.device)
    if resolved.compile:
        replace_dropout(model, noise)
    fuses = resolved.compile or not task_model.family.schedule.compiles
    if fuses and may_fuse_projections(train):
        plan = FusePlan(
            noise=noise,
            joined=resolved.attention == attention.ROWS,
            residual_bf16=resolved.residual == "bf16",
            has_triton=has_triton(),
        )
        task_model.fused_layers = task_model.family.fuse(model, plan) or {}
    return noise if resolved.compile else None


def unfused_parts(task_model: TaskModel) -> tuple[str, ...]:
    """Return a note that lists the fused parts that layers with adapters cannot use."""
    layers = task_model.family.num_layers(task_model.model.config)
    plain = [
        f"{part} in {layers - count} of {layers} layers"
        for part, count in task_model.fused_layers.items()
        if count < layers
    ]
    if not (plain and has_adapter(task_model.model)):
        return ()
    shown = "; ".join(plain)
    return (f"model.lora: adapted layers compute without these fused parts: {shown}",)


def build_model(job: TrainJob, *, empty: bool = False) -> Any:
    settings = job.settings
    return build(
        settings.model,
        job.task,
        job.vocabulary,
        job.max_length,
        empty=empty,
        facts=job.train.facts,
    )


def _with_attention(model: Any, implementation: str, runtime: Runtime) -> Any:
    if implementation == "none":
        return model
    if implementation == "sdpa" and runtime.is_cuda:
        implementation = attention.PADDED
    if model.config._attn_implementation != implementation:
        model.set_attn_implementation(implementation)
    return model


def _fused_head(task_model: TaskModel, runtime: Runtime) -> bool:
    """Return whether the model is a language model whose head and loss can be fused.
    The head must be a single matrix."""
    task, output = task_model.task, task_model.model.get_output_embeddings()
    return (
        runtime.is_cuda
        and isinstance(task, CrossEntropy)
        and task.is_plain
        and not has_custom_head(task)
        and task.head_kind in task_model.family.matrix_heads
        and are_matrices(output)
        and output.bias is None
        and has_triton()
    )


def may_fuse_projections(train: TrainSettings) -> bool:
    """Return whether projections may be fused into one matmul. This is not possible if
    weights are sharded or layers are recomputed. In recomputed layers, Dynamo treats a
    tensor that is passed to the next block as a side effect, and does not compile the
    layer."""
    return train.distributed.strategy != "fsdp" and not train.gradient_checkpointing
