"""Choose the maximum micro-batch size from default values or measured memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flatout.engine.families import family_of
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.memory import GIB, Demand, rounded_down
from flatout.engine.parameters import SettingsError
from flatout.engine.train.setup.job import TrainJob

CPU_TOKEN_BUDGET = 8_192
GPU_TOKEN_BUDGET = 65_536
GPU_OVERHEAD_TOKENS = 4_096
CPU_SAMPLE_VALUES = 2**22
GPU_SAMPLE_VALUES = 2**27
"""The maximum number of values in a micro-batch of samples with one shape. For RGB
images of 224 x 224 pixels, this allows 891 samples."""
ROOM = 0.9
"""The fraction of the available memory to use. Fragmentation wastes some memory, and
batch sizes differ from step to step."""
TIGHT = 0.6
"""The fraction of memory above which fragmentation matters. On an H200, fragmentation
wasted up to a third of the memory in use."""
PLENTY = 1.5
"""Memory is not measured if the estimated budget is at least this multiple of the
largest micro-batch."""
FOLLOWED = 0.7
"""The size of the second measured pass, as a fraction of the predicted budget."""
FULL = 0.9
"""After a pass with at least this fraction of the largest micro-batch's tokens, no
larger pass is measured. Whole rows rarely fill a micro-batch completely."""
Point = tuple[int, float]
"""The number of tokens in a pass, and the bytes that the pass needs."""
Measure = Callable[[int], Point | None]
"""A function that measures a pass of at most the given number of tokens. It returns
None if the pass runs out of memory."""


def needs_whole_steps(config: Any) -> bool:
    """Return whether BatchNorm needs all samples of a step in one micro-batch."""
    return family_of(config).samples.batch_statistics


def _whole_step_samples(job: TrainJob, runtime: Runtime) -> int:
    """Return the number of samples per step and rank, all of which BatchNorm needs in
    one micro-batch. Raises SettingsError if they exceed the token budget, or if the
    ranks cannot share statistics."""
    train, world = job.settings.train, runtime.ranks.world_size
    share = -(-train.global_batch_size // world)
    if train.token_budget != "auto" and train.token_budget < share:
        raise SettingsError(
            f"train.token_budget={train.token_budget}: this model has BatchNorm, so a "
            f"step is one micro-batch, of {share} samples on each rank; set it to "
            "auto, or use a model with LayerNorm (vit, convnext)"
        )
    if world > 1 and not (runtime.is_cuda and train.global_batch_size >= world):
        raise SettingsError(
            "this model has BatchNorm, whose statistics ranks share only on GPUs, "
            "with a sample on each: set train.distributed.num_processes: 1, or use "
            "a model with LayerNorm (vit, convnext)"
        )
    return share


def token_budget(job: TrainJob, runtime: Runtime, strategy: str, config: Any) -> int:
    """Return the maximum number of tokens per micro-batch, or of samples if all of them
    have one shape. Raises SettingsError if `train.token_budget` is too small."""
    train, longest = job.settings.train, job.train.facts.longest
    if family_of(config).samples.batch_statistics:
        return _whole_step_samples(job, runtime)
    if strategy == "fixed":
        longest = job.max_length
    if train.token_budget != "auto":
        if train.token_budget < longest:
            raise SettingsError(
                f"train.token_budget={train.token_budget} is smaller than the longest "
                f"row ({longest} tokens): set it to at least {longest}"
            )
        return train.token_budget
    if shape := getattr(job.train.facts, "shape", None):
        return samples_at_once(shape, runtime.is_cuda)
    return max(default_token_budget(runtime.is_cuda), longest)


def samples_at_once(shape: Sequence[int], is_cuda: bool) -> int:
    """Return the maximum number of samples with the given `shape` per micro-batch."""
    values = GPU_SAMPLE_VALUES if is_cuda else CPU_SAMPLE_VALUES
    return max(1, values // max(1, math.prod(shape)))


def default_token_budget(is_cuda: bool) -> int:
    """Return the token budget for a model whose memory demand is not known."""
    return GPU_TOKEN_BUDGET if is_cuda else CPU_TOKEN_BUDGET


def overhead_tokens(config: Any, is_cuda: bool) -> int:
    """Return the fixed cost of a micro-batch on the device, as a number of tokens that
    the device could process in that time."""
    if is_cuda:
        return GPU_OVERHEAD_TOKENS
    return family_of(config).cpu_overhead_tokens(config)


def rank_tokens(job: TrainJob, runtime: Runtime) -> float:
    """Return the mean number of tokens per rank in a global batch."""
    rows = job.settings.train.global_batch_size / runtime.ranks.world_size
    return rows * job.train.facts.mean_length


@dataclass(frozen=True)
class Bounds:
    """Limits for the number of tokens per micro-batch."""

    least: int
    """The number of tokens in the longest row, which must fit."""
    most: int
    """The number of tokens of the largest micro-batch that can occur."""


@dataclass(frozen=True)
class Fit:
    """The token budget with which steps fit in the memory of a rank."""

    token_budget: int
    reason: str = ""
    demand: Demand | None = None
    """The measured memory demand, or None if no pass was measured."""
    tight: bool = False
    fault: str = ""
    """Why no step fits in memory, or an empty string if steps fit."""


def is_plenty(guess: int, bounds: Bounds) -> bool:
    """Return whether the estimate `guess` far exceeds the largest micro-batch."""
    return guess >= PLENTY * bounds.most


def choose_budget(
    demand: Demand | None, bounds: Bounds, memory: int, wanted: int
) -> Fit:
    """Return the largest token budget, up to `wanted`, with which steps fit in `memory`
    bytes. `demand` is None if not even the longest row fits."""
    if demand is None:
        return Fit(bounds.least, fault=_too_long(bounds, memory))
    if demand.states > memory:
        return Fit(bounds.least, demand=demand, fault=_too_large(demand, memory))
    room, budget = ROOM * memory, wanted
    if demand.peak(min(budget, bounds.most)) > room:
        budget = min(budget, rounded_down(demand.most_tokens(room), bounds.least))
    peak = demand.peak(min(budget, bounds.most))
    reason = (
        f"token budget {budget:,}: steps need about {peak / GIB:.1f} of the "
        f"{memory / GIB:.1f} GiB of GPU memory within reach"
    )
    return Fit(budget, reason, demand, tight=peak > TIGHT * memory)


def combine_ranks(own: Fit, gathered: Sequence[Fit]) -> Fit:
    """Return the fit with the smallest token budget, which all ranks must use."""
    least = min(gathered, key=lambda fit: fit.token_budget)
    tight = any(fit.tight for fit in gathered)
    fault = next((fit.fault for fit in gathered if fit.fault), "")
    return replace(least, tight=tight, fault=fault, demand=own.demand)


def fit_from_estimate(wanted: int, bounds: Bounds, guess: int | None) -> Fit:
    """Return the fit for the estimated budget `guess`, or for `wanted` if there is no
    estimate. It is used if passes cannot be measured."""
    if guess is None or guess >= bounds.most:
        return Fit(wanted)
    return Fit(min(wanted, rounded_down(guess, bounds.least)), tight=True)


def points(
    measure: Measure, start: int, bounds: Bounds, free_bytes: float
) -> list[Point]:
    """Measure passes of up to two sizes. Return the results sorted by size, or [] if
    the longest row does not fit. The first size is `start`, or a smaller size if memory
    runs out. The second size is close to the limit of `free_bytes` that the first
    predicts."""
    tokens = min(max(start, bounds.least), bounds.most)
    while (first := measure(tokens)) is None:
        if tokens <= bounds.least:
            return []
        tokens = max(bounds.least, tokens // 4)
    second = measure(_second_size(first, bounds, free_bytes))
    return sorted({first[0]: first[1], **dict([second] if second else [])}.items())


def _second_size(first: Point, bounds: Bounds, free_bytes: float) -> int:
    """Return a size close to the limit that the first measurement predicts. If the
    first size was already close to it, return half of the first size."""
    tokens, taken = first
    fitting = int(tokens * free_bytes / max(taken, 1.0))
    larger = min(bounds.most, int(FOLLOWED * fitting))
    if tokens < FULL * bounds.most and larger > tokens:
        return larger
    half = tokens // 2
    return half if half >= bounds.least else min(bounds.most, (tokens + fitting) // 2)


def _too_large(demand: Demand, memory: int) -> str:
    return (
        f"weights, gradients and the optimizer's moments need {demand.states / GIB:.1f}"
        f" of the {memory / GIB:.1f} GiB of GPU memory within reach: set "
        "train.freeze, train.optimizer: adafactor, train.distributed.strategy: fsdp on "
        "several GPUs, or use a smaller model"
    )


def _too_long(bounds: Bounds, memory: int) -> str:
    return (
        f"one row of {bounds.least} tokens does not fit in the {memory / GIB:.1f} GiB "
        "of GPU memory within reach: set train.gradient_checkpointing: true, lower "
        "tokenize.max_length, or use a smaller model"
    )
