"""Every `auto` resolved for this model on this device; what cannot work refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from flatout.engine.families import family_of
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.flops import launch_tokens
from flatout.engine.models.memory import estimate
from flatout.engine.ops import attention
from flatout.engine.parameters import Settings, SettingsError
from flatout.engine.rows.tokens import DOCUMENTS
from flatout.engine.train.setup.budgets import token_budget
from flatout.engine.train.setup.job import TrainJob

GRAPH_MAX_TOKENS = 16_384
"""Tokens a rank and step up to which launching kernels is what bounds a step, where
the device's speed is not known."""
SLOW_HOST = 1.5
"""A margin for slower hosts: steps of 24,600 tokens of BERT-base alone gave 7,821 and
7,668 samples/s on two hosts, 7,868 and 8,160 with graphs."""
GRAPH_MEMORY_SHARE = 0.8
"""Of the device's memory."""


@dataclass(frozen=True)
class ResolvedConfig:
    """What `auto` came to, with the reasons for fallbacks."""

    strategy: str
    attention: str
    token_budget: int
    compile: bool
    cuda_graphs: bool
    fused_optimizer: bool
    residual: str = "fp32"
    launch_tokens: int = 0
    """Tokens that the device trains while the host launches a micro-batch."""
    flat_all_reduce: bool = False
    """Gradients travel between ranks behind the backward pass, in one piece."""
    notes: tuple[str, ...] = field(default=())

    @property
    def packed(self) -> bool:
        return self.strategy == "packed"

    def agreed(self) -> dict[str, Any]:
        """What is the same on all ranks, or they would wait for each other for good,
        or cut a global batch in different ways."""
        own = ("notes", "attention", "compile")
        return {f"{n} (auto)": v for n, v in asdict(self).items() if n not in own}


def resolve(job: TrainJob, runtime: Runtime, config: Any) -> ResolvedConfig:
    """Strategy, kernel, budget and compilation for this model on this device."""
    train, notes = job.settings.train, []
    fault = family_of(config).precision_fault(runtime.precision, runtime.device.type)
    if fault:
        raise SettingsError(f"runtime.precision={runtime.precision}: {fault}")
    strategy, fault = _strategy(job, runtime, config)
    if fault:
        notes.append(fault)
    if strategy == "fixed" and DOCUMENTS in job.train.column_names:
        notes.append(
            "strategy fixed pads each of the joined texts to tokenize.max_length: "
            "packed or grouped take fewer tokens"
        )
    graphs = _cuda_graphs(job, runtime, strategy, config)
    if train.cuda_graphs == "auto" and not graphs:
        notes += _launch_bound(job, runtime, config)
    if train.optimizer != "adamw":
        notes.append(
            f"train.optimizer {train.optimizer} has no fused kernel here: each step "
            "waits for its gradient norm, and is no CUDA graph; adamw is faster"
        )
    return ResolvedConfig(
        strategy=strategy,
        attention=_attention(job.settings, runtime, config, strategy),
        token_budget=token_budget(job, runtime, strategy, config),
        compile=_compile(train.compile, runtime, config),
        cuda_graphs=graphs,
        fused_optimizer=_fused(job),
        residual=_residual(job.settings.runtime.residual, runtime),
        launch_tokens=launch_tokens(_width(config), runtime),
        flat_all_reduce=_flat_all_reduce(job, runtime, graphs),
        notes=tuple(notes),
    )


def resolve_together(
    job: TrainJob,
    runtime: Runtime,
    own: ResolvedConfig,
    gathered: Sequence[ResolvedConfig],
) -> ResolvedConfig:
    """`own`, with what ranks on unlike devices must have the same of: graphs where all
    of them would, cuts for the main rank's host."""
    graphs = all(resolved.cuda_graphs for resolved in gathered)
    notes = own.notes
    if own.cuda_graphs and not graphs:
        notes += ("no CUDA graphs: not all of these GPUs take them by themselves",)
    return replace(
        own,
        cuda_graphs=graphs,
        flat_all_reduce=_flat_all_reduce(job, runtime, graphs),
        launch_tokens=gathered[0].launch_tokens,
        notes=notes,
    )


def _strategy(job: TrainJob, runtime: Runtime, config: Any) -> tuple[str, str | None]:
    """Packed where it is exact, else grouped, with the reason."""
    wanted, kernel = job.settings.train.batching, job.settings.runtime.attention
    if job.settings.train.rows != "tokens":  # all of one length
        return "fixed", None
    if wanted not in ("auto", "packed"):
        return wanted, None
    family, dtype = family_of(config), runtime.compute_dtype
    fault = family.packing_fault(config, runtime.device.type, dtype)
    if fault is None and kernel in ("eager", "sdpa"):
        fault = f"runtime.attention: {kernel} works on padded batches"
    if fault is None:
        return "packed", None
    return "grouped", f"no packing, rows are grouped by length instead: {fault}"


def _attention(settings: Settings, runtime: Runtime, config: Any, strategy: str) -> str:
    wanted, max_length = settings.runtime.attention, settings.max_length
    if not family_of(config).attends:
        return "none"
    if strategy == "packed":
        short = wanted == "auto" and attention.short_rows_fit(config, max_length)
        return attention.ROWS if short and runtime.is_cuda else attention.PACKED
    if wanted == "varlen":
        raise SettingsError(
            f"runtime.attention: varlen needs train.batching: packed, not {strategy}; "
            "set attention to auto, sdpa or eager"
        )
    own = getattr(config, "_attn_implementation", None) or "sdpa"
    return str(own) if wanted == "auto" else wanted


def _residual(wanted: str, runtime: Runtime) -> str:
    if wanted == "auto":
        wanted = "bf16" if runtime.is_cuda else "fp32"
    return wanted if runtime.precision == "bf16" else "fp32"


def _compile(wanted: bool | str, runtime: Runtime, config: Any) -> bool:
    if wanted == "auto":
        return runtime.is_cuda and family_of(config).compiles
    if wanted and not runtime.is_cuda and not _has_compiler():
        raise SettingsError(
            "train.compile: no C++ compiler (g++ or clang++) is installed here; "
            "install one, or set train.compile: false"
        )
    return bool(wanted)


def _has_compiler() -> bool:
    import shutil

    return any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def _cuda_graphs(job: TrainJob, runtime: Runtime, strategy: str, config: Any) -> bool:
    train, possible = job.settings.train, _can_record(job, runtime, strategy)
    if train.cuda_graphs != "auto":
        if train.cuda_graphs and not possible:
            raise SettingsError(
                "train.cuda_graphs needs a GPU, strategy packed, the fused adamw "
                "and no sharding (fsdp): set it to auto or false"
            )
        return bool(train.cuda_graphs)
    if not possible or train.gradient_checkpointing:  # never recorded together so far
        return False
    small = rank_tokens(job, runtime) <= _most_graph_tokens(job, runtime, config)
    return small and _graphs_fit(job, runtime, config)


def _can_record(job: TrainJob, runtime: Runtime, strategy: str) -> bool:
    train = job.settings.train
    whole = runtime.ranks.world_size == 1 or train.distributed.strategy == "ddp"
    packed = strategy == "packed" and _fused(job)
    return runtime.is_cuda and packed and whole


def _fused(job: TrainJob) -> bool:
    """AdamW alone reads on the device whether a step is finite."""
    train = job.settings.train
    return train.fused_optimizer and train.optimizer == "adamw"


def _flat_all_reduce(job: TrainJob, runtime: Runtime, graphs: bool) -> bool:
    """Where asked to, and between the two graphs of a step."""
    distributed = job.settings.train.distributed
    several = runtime.ranks.world_size > 1 and distributed.strategy == "ddp"
    return several and (graphs or distributed.bucket_mib == "all")


def _launch_bound(job: TrainJob, runtime: Runtime, config: Any) -> list[str]:
    """What to do where GPUs wait for the host, and no graphs help."""
    known = launch_tokens(_width(config), runtime)
    own = rank_tokens(job, runtime)
    if own >= known:
        return []
    return [
        f"a step waits for the host: a GPU's share of it is {own:,.0f} tokens, and "
        f"launching takes the time of about {known:,}. Raise train.global_batch_size"
    ]


def rank_tokens(job: TrainJob, runtime: Runtime) -> float:
    """Of a global batch, on average."""
    rows = job.settings.train.global_batch_size / runtime.ranks.world_size
    return rows * job.train.facts.mean_length


def _width(config: Any) -> int:
    """Of its hidden states; 0 where a model of its own code has another name for it."""
    return int(getattr(config, "hidden_size", 0))


def _most_graph_tokens(job: TrainJob, runtime: Runtime, config: Any) -> float:
    """Up to which launching bounds a step that is one micro-batch: each way of cutting
    a global batch would be a graph of its own."""
    known = launch_tokens(_width(config), runtime)
    limit = SLOW_HOST * known if known else GRAPH_MAX_TOKENS
    return min(limit, token_budget(job, runtime, "packed", config))


def _graphs_fit(job: TrainJob, runtime: Runtime, config: Any) -> bool:
    """Graphs have memory of their own, beside that of steps without one."""
    memory = runtime.device_memory_bytes
    if memory is None:
        return True
    needed = estimate(job.settings, config, int(rank_tokens(job, runtime)))
    return needed.total + needed.activations <= GRAPH_MEMORY_SHARE * memory
