"""Resolve each `auto` for the model and device, and reject impossible settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from flatout.engine.families import family_of
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.flops import launch_tokens
from flatout.engine.ops import attention
from flatout.engine.parameters import SettingsError
from flatout.engine.train.setup.acceleration import (
    Planned,
    choose_compile_and_graphs,
    fused,
    width_of,
    without_compiler,
)
from flatout.engine.train.setup.budgets import (
    GPU_OVERHEAD_TOKENS,
    overhead_tokens,
    token_budget,
)
from flatout.engine.train.setup.job import TrainJob, without_targets


@dataclass(frozen=True)
class ResolvedConfig:
    """The settings after each `auto` was resolved, with the reasons for fallbacks."""

    strategy: str
    attention: str
    token_budget: int
    compile: bool
    cuda_graphs: bool
    fused_optimizer: bool
    residual: str = "fp32"
    overhead_tokens: int = GPU_OVERHEAD_TOKENS
    """The fixed cost of a micro-batch on the device, expressed in tokens."""
    launch_tokens: int = 0
    """How many tokens the device processes while the host launches a micro-batch."""
    flat_all_reduce: bool = False
    """Whether a single all-reduce sums all gradients after the backward pass."""
    compile_reason: str = ""
    """Why compilation and CUDA graphs are on or off, with the estimated times."""
    budget_reason: str = ""
    """The expected memory use of a step, or an empty string if it is unknown."""
    notes: tuple[str, ...] = field(default=())

    @property
    def packed(self) -> bool:
        return self.strategy == "packed"


def resolve(
    job: TrainJob, runtime: Runtime, config: Any, planned: Planned | None = None
) -> ResolvedConfig:
    """Resolve every `auto`. `planned` is the work of the run, or None if the number of
    steps is not limited. Raises SettingsError if a setting is impossible."""
    train, notes = job.settings.train, []
    wanted = "fixed" if job.train.one_shape else train.batching
    kernel = job.settings.runtime.attention
    strategy, fault = choose_strategy(wanted, kernel, runtime, config)
    if strategy != "packed" and kernel == "varlen" and family_of(config).attends:
        raise SettingsError(
            f"runtime.attention: {kernel} needs train.batching: packed, not "
            f"{strategy}; set attention to auto, sdpa or eager"
        )
    if fault:
        notes.append(fault)
    notes += without_targets(job) + without_compiler(runtime)
    choice = choose_compile_and_graphs(job, runtime, config, strategy, planned)
    graphs = choice.cuda_graphs
    if train.optimizer != "adamw":
        notes.append(
            f"train.optimizer {train.optimizer} has no fused kernel here: each step "
            "waits for its gradient norm, without CUDA graphs; adamw is faster"
        )
    return ResolvedConfig(
        strategy=strategy,
        attention=choose_attention(kernel, runtime, config, strategy),
        token_budget=token_budget(job, runtime, strategy, config),
        compile=choice.compile,
        cuda_graphs=graphs,
        fused_optimizer=fused(train),
        residual=_residual(job.settings.runtime.residual, runtime),
        overhead_tokens=overhead_tokens(config, runtime.is_cuda),
        launch_tokens=launch_tokens(width_of(config), runtime),
        flat_all_reduce=_flat_all_reduce(job, runtime, graphs),
        compile_reason=choice.reason,
        notes=tuple(notes),
    )


def choose_strategy(
    wanted: str, kernel: str, runtime: Runtime, config: Any
) -> tuple[str, str | None]:
    """Return the batching strategy. If rows should be packed but cannot, the strategy
    is `grouped`, and the reason is returned too. `kernel` is `runtime.attention`."""
    if wanted not in ("auto", "packed"):
        return wanted, None
    family, dtype = family_of(config), runtime.compute_dtype
    fault = family.packing_fault(config, runtime.device.type, dtype)
    if fault is None and kernel in ("eager", "sdpa"):
        fault = f"runtime.attention: {kernel} works on padded batches"
    if fault is None:
        return "packed", None
    return "grouped", f"no packing, rows are grouped by length instead: {fault}"


def choose_attention(kernel: str, runtime: Runtime, config: Any, strategy: str) -> str:
    """Return the name of the attention implementation, or `none`."""
    if not family_of(config).attends:
        return "none"
    if strategy == "packed":
        fits = kernel == "auto" and attention.row_tiles_fit(config)
        return attention.ROWS if fits and runtime.is_cuda else attention.PACKED
    if kernel in ("eager", "sdpa"):
        return kernel
    own = getattr(config, "_attn_implementation", None)
    return "eager" if own == "eager" else "sdpa"  # the model's own kernel


def _residual(wanted: str, runtime: Runtime) -> str:
    if wanted == "auto":
        wanted = "bf16" if runtime.is_cuda else "fp32"
    return wanted if runtime.precision == "bf16" else "fp32"


def _flat_all_reduce(job: TrainJob, runtime: Runtime, graphs: bool) -> bool:
    """Return whether a single all-reduce sums all gradients. It does if the settings
    require it or if CUDA graphs are used, unless the model is sharded."""
    distributed = job.settings.train.distributed
    several = runtime.ranks.world_size > 1 and distributed.strategy == "ddp"
    return several and (graphs or distributed.bucket_mib == "all")


PROBE_S = 0.2
"""The time in seconds for which the matmul throughput of each GPU is measured."""
SLOW_SHARE = 0.85
"""A GPU is reported as slow if its throughput is below this fraction of the median."""


def slow_devices(rates: Sequence[float]) -> tuple[str, ...]:
    """Return a note about each slow GPU, given the TFLOP/s of each rank's matmuls."""
    usual = median(rates)
    return tuple(
        f"the GPU of rank {rank} computes {rate:,.0f} TFLOP/s, the median of all ranks "
        f"is {usual:,.0f}, and all ranks wait for the slowest: check it for other "
        "programs, heat and power limits (nvidia-smi)"
        for rank, rate in enumerate(rates)
        if rate < SLOW_SHARE * usual
    )
