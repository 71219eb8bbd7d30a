"""Whether steps are compiled and recorded: what works here, and what pays."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from typing import Any

from flatout.engine.families import Family, family_of
from flatout.engine.machine.environment import c_compiler
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.flops import launch_tokens, sheet_tflops
from flatout.engine.models.memory import estimate
from flatout.engine.parameters import SettingsError, TrainSettings
from flatout.engine.train.setup.budgets import (
    deviation,
    rank_tokens,
    token_budget,
)
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.payoff import Choice, Work, choose_compilation
from flatout.engine.train.step import MAX_GRAPHS

GRAPH_MAX_TOKENS = 16_384
"""Tokens a rank and step up to which launching kernels is what bounds a step, where
the device's speed is not known."""
SLOW_HOST = 1.5
"""A margin for slower hosts: steps of 24,600 tokens of BERT-base alone gave 7,821 and
7,668 samples/s on two hosts, 7,868 and 8,160 with graphs."""
GRAPH_MEMORY_SHARE = 0.8
"""Of the device's memory."""
GRAPH_PAD_MULTIPLE = 256
"""Packed totals are rounded up, the more the larger they are on average, so that few
CUDA graphs are needed."""
GRAPH_PAD_SHARE = 1 / 96
"""Of a rank's tokens a step, on average: 256 for 24,600 tokens, 1 % at most."""

NO_C_COMPILER = "no C compiler (gcc or clang) is installed here"


@dataclass(frozen=True)
class Planned:
    """What the main rank knows of a run before it begins; the same on all ranks, so
    that they come to the same choice."""

    steps: int
    parts: int
    """Distinct ones that are compiled."""
    sample_flops: int = 0
    """Forward and backward, of rows that are samples of one shape; 0 of tokens."""
    cached: bool = False
    """They lie on the main rank's disk, compiled."""
    earlier: Choice | None = None
    """Of the run that is continued, which this one is bit for bit."""
    token_budget: int | None = None
    """Of that run."""


def accelerate(
    job: TrainJob,
    runtime: Runtime,
    config: Any,
    strategy: str,
    planned: Planned | None,
) -> Choice:
    """What is set, or repays itself within the work `planned`; None: steps are
    measured, and what speeds them up is on whatever it costs. Raises SettingsError."""
    compiled = _compile_wanted(job.settings.train.compile, runtime, config)
    recorded = _graphs_wanted(job, runtime, strategy, config)
    known = Choice(compiled is not False, recorded is not False)
    if planned is None:
        return known
    if planned.earlier is not None:
        kept = planned.earlier
        same = Choice(
            kept.compile if compiled is None else compiled,
            kept.cuda_graphs if recorded is None else recorded,
            kept.reason,
        )
        return same if same == kept else replace(same, reason="")
    if None not in (compiled, recorded):
        return known
    work = _work(job, runtime, config, planned)
    return choose_compilation(work, compiled, recorded) if work else known


def _work(
    job: TrainJob, runtime: Runtime, config: Any, planned: Planned
) -> Work | None:
    """None on a CPU, which `auto` never compiles for, and if model or rows have no size
    that FLOPs can be told by."""
    layers, tokens = family_of(config).num_layers(config), rank_tokens(job, runtime)
    weights = 12 * layers * width_of(config) ** 2
    flops = tokens * (planned.sample_flops or 6 * weights)
    peak = sheet_tflops(runtime) if runtime.is_cuda else None
    if not (layers and flops and peak):
        return None
    return Work(
        steps=planned.steps,
        step_flops=flops,
        layers=layers,
        peak_tflops=peak,
        parts=planned.parts,
        shapes=_shapes(job, runtime),
        cached=planned.cached,
    )


def _shapes(job: TrainJob, runtime: Runtime) -> int:
    """Of packed steps, at most: totals lie within two deviations to both sides, and
    lengths deviate by no more than mean and longest allow (Bhatia & Davis 2000)."""
    around = 4 * deviation(job, runtime)
    return min(MAX_GRAPHS, 1 + int(around / graph_multiple(job, runtime)))


def _compile_wanted(wanted: bool | str, runtime: Runtime, config: Any) -> bool | None:
    """None if `auto` may choose. Raises SettingsError."""
    if wanted == "auto":
        family, several = family_of(config), runtime.ranks.world_size > 1
        untried = (
            several and family.samples.batch_statistics
        )  # ranks meet within the graph
        works = (
            family.schedule.compiles and not untried and not _compiler_fault(runtime)
        )
        return None if runtime.is_cuda and works else False
    if wanted and (fault := _compiler_fault(runtime)):
        raise SettingsError(
            f"train.compile: {fault}; install one, or set train.compile: false"
        )
    return bool(wanted)


def _compiler_fault(runtime: Runtime) -> str | None:
    if runtime.is_cuda:
        return None if c_compiler() else NO_C_COMPILER
    if any(map(shutil.which, ("g++", "clang++", "c++"))):
        return None
    return "no C++ compiler (g++ or clang++) is installed here"


def without_compiler(runtime: Runtime) -> list[str]:
    """What a GPU does where nothing can be built for it."""
    if not (runtime.is_cuda and _compiler_fault(runtime)):
        return []
    return [
        f"{NO_C_COMPILER}: PyTorch's kernels run in place of Triton's, and nothing is "
        "compiled. Install one (apt install gcc): steps are faster then"
    ]


def _graphs_wanted(
    job: TrainJob, runtime: Runtime, strategy: str, config: Any
) -> bool | None:
    """None if `auto` may choose. Raises SettingsError."""
    train, family = job.settings.train, family_of(config)
    possible = _can_record(job, runtime, strategy, family)
    if train.cuda_graphs != "auto":
        if train.cuda_graphs and not possible:
            raise SettingsError(
                "train.cuda_graphs needs a GPU, the fused adamw, no sharding (fsdp), "
                "a loss of single samples (not embedding), and packed rows, or a model "
                "whose padded ones may be recorded (LSTMs, tables, images): set it to "
                "auto or false"
            )
        return bool(train.cuda_graphs)
    # Checkpointing was never recorded so far.
    if (
        not (possible and family.schedule.records_unasked)
        or train.gradient_checkpointing
    ):
        return False
    small = rank_tokens(job, runtime) <= _most_graph_tokens(
        job, runtime, strategy, config
    )
    return None if small and _graphs_fit(job, runtime, config) else False


def _can_record(job: TrainJob, runtime: Runtime, strategy: str, family: Family) -> bool:
    train = job.settings.train
    whole = runtime.ranks.world_size == 1 or train.distributed.strategy == "ddp"
    shapes_recur = strategy in ("fixed", "grouped") and family.schedule.records_padded
    possible = (strategy == "packed" or shapes_recur) and not job.task.whole_batch
    return runtime.is_cuda and fused(train) and whole and possible


def fused(train: TrainSettings) -> bool:
    """AdamW alone reads on the device whether a step is finite."""
    return train.fused_optimizer and train.optimizer == "adamw"


def graph_multiple(job: TrainJob, runtime: Runtime) -> int:
    """A power of two, which totals are rounded up to."""
    share = int(rank_tokens(job, runtime) * GRAPH_PAD_SHARE)
    return max(GRAPH_PAD_MULTIPLE, 1 << max(0, share - 1).bit_length())


def width_of(config: Any) -> int:
    """Of its hidden states; 0 where a model of its own code has another name for it."""
    return int(getattr(config, "hidden_size", 0))


def _most_graph_tokens(
    job: TrainJob, runtime: Runtime, strategy: str, config: Any
) -> float:
    """Up to which launching bounds a step that is one micro-batch: each way of cutting
    a global batch would be a graph of its own."""
    budget = token_budget(job, runtime, strategy, config)
    if family_of(config).schedule.launches_by_place:
        return budget
    known = launch_tokens(width_of(config), runtime)
    limit = SLOW_HOST * known if known else GRAPH_MAX_TOKENS
    return min(limit, budget)


def _graphs_fit(job: TrainJob, runtime: Runtime, config: Any) -> bool:
    """Graphs have memory of their own, beside that of steps without one."""
    memory = runtime.device_memory_bytes
    if memory is None:
        return True
    needed = estimate(job.settings, config, int(rank_tokens(job, runtime)))
    return needed.total + needed.activations <= GRAPH_MEMORY_SHARE * memory
