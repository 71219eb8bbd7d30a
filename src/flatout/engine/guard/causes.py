"""What can make a run slower than another of the same work, likeliest first.

A factor is how many times slower a run may be by that cause alone. Where the runs hold
figures that tell it (padding, loader wait, clock), it comes from them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from flatout.engine.parameters.other_names import RENAMED

SYMPTOM_LIMIT = 1.03
"""A measured figure that explains less than this factor is not worth a line."""


class Run(Protocol):
    @property
    def params(self) -> Mapping[str, str]: ...
    @property
    def tags(self) -> Mapping[str, str]: ...
    @property
    def figures(self) -> Mapping[str, float]: ...
    @property
    def on_gpu(self) -> bool: ...


@dataclass(frozen=True)
class Difference:
    """`name`: a parameter, a version or a measured figure."""

    name: str
    then: str
    now: str
    factor: float
    """How many times slower it may make a step; 1: not at all."""
    reason: str

    def __str__(self) -> str:
        size = f"up to {self.factor:.1f} times slower: " if self.factor > 1.04 else ""
        reason = f" ({size}{self.reason})" if self.reason else ""
        return f"{self.name}: {self.then} -> {self.now}{reason}"


@dataclass(frozen=True)
class Cause:
    """Factors on a GPU and on a CPU."""

    gpu: float
    cpu: float
    reason: str
    ranks: Mapping[str, int] = field(default_factory=dict)
    """Of values, 0 the fastest: a change to the same or a lower rank costs nothing."""
    more_is_faster: bool = False
    """Of numbers, likewise; the factor is at most their ratio to `power`."""
    power: float = 1.0
    figure: str = ""
    """The symptom that measures it, where the runs have it."""


NOT_SET = "not set"
"""Value of what one of two runs does not have."""
VARIABLES = "runtime.environment."
ON, OFF = {"True": 0, "False": 1}, {"False": 0, "True": 1}
KERNELS = {
    **dict.fromkeys(("flatout_rows", "flatout_fa4", "flash4"), 0),
    **dict.fromkeys(("flatout_packed", "varlen"), 0),
    "sdpa": 1,
    "eager": 2,
}
STRATEGIES = {"packed": 0, "grouped": 1, "random": 2, "fixed": 3}
PRECISIONS = {"bf16": 0, "fp16": 0, "fp32": 1}

# Measured on BERT-base on an H200 and a small BERT on a 2-core CPU (mode ladder and
# docs/optimisations); rounded, and larger where a model or a batch can suffer more.
CAUSES: dict[str, Cause] = {
    "token_key": Cause(9.0, 9.0, "other data: rates do not compare"),
    "device": Cause(9.0, 9.0, "another device"),
    "world_size": Cause(8.0, 2.0, "fewer devices share the work", more_is_faster=True),
    "runtime.precision": Cause(4.0, 1.5, "no fast matrix units", PRECISIONS),
    "train.batching": Cause(
        3.3, 2.0, "padding is computed too", STRATEGIES, figure="padding_pct"
    ),
    "train.cuda_graphs": Cause(2.9, 1.0, "small steps are bound by launches", ON),
    "runtime.attention": Cause(2.2, 2.2, "a slower attention kernel", KERNELS),
    "train.synchronize_every_step": Cause(
        2.0, 1.2, "the host waits for the device at each step", OFF
    ),
    "train.token_budget": Cause(
        4.0, 4.0, "more and smaller micro-batches", more_is_faster=True, power=0.2
    ),
    "runtime.tf32": Cause(1.9, 1.0, "fp32 products without tensor cores", ON),
    "runtime.threads": Cause(1.0, 2.0, "fewer cores compute", more_is_faster=True),
    "train.loader.num_workers": Cause(
        1.6, 1.1, "batches are made late", figure="loader_wait_pct"
    ),
    "train.compile": Cause(1.5, 1.0, "no fused kernels", ON),
    "train.history": Cause(1.4, 1.4, "a table is joined at every step", {"list": 0}),
    "train.gradient_checkpointing": Cause(1.4, 1.4, "forward passes run twice", OFF),
    "runtime.environment.CUDA_LAUNCH_BLOCKING": Cause(  # an estimate, not measured
        2.0, 1.0, "the host waits for every kernel", {NOT_SET: 0, "0": 0}
    ),
    "runtime.environment.GOMP_SPINCOUNT": Cause(
        1.0, 2.0, "waiting threads give up their core too soon, or too late"
    ),
    "runtime.deterministic": Cause(1.2, 1.1, "slower kernels that repeat exactly", OFF),
    "train.empty_cache_every": Cause(
        1.2, 1.0, "memory is asked for again", {"None": 0}
    ),
    "train.log_every": Cause(1.2, 1.1, "figures are read often", more_is_faster=True),
    "train.fused_optimizer": Cause(1.15, 1.1, "one kernel a tensor", ON),
    "train.distributed.strategy": Cause(1.15, 1.1, "weights are gathered", {"ddp": 0}),
    "train.distributed.bucket_mib": Cause(
        1.02, 1.0, "gradients travel beside matrix products, or behind them"
    ),
    "runtime.flash_sdp": Cause(1.1, 1.0, "SDPA without its flash kernel", ON),
    "train.loader.pin_memory": Cause(1.1, 1.0, "copies wait for the host", ON),
    "version.torch": Cause(1.1, 1.1, "another PyTorch"),
    "version.cuda": Cause(1.08, 1.0, "another CUDA"),
    "runtime.residual": Cause(
        1.035, 1.0, "twice the bytes between matrix products", PRECISIONS
    ),
    "runtime.cudnn_benchmark": Cause(1.05, 1.0, "cuDNN does not try kernels", ON),
    "train.metrics_every": Cause(1.05, 1.05, "accuracy is kept often", {}, True),
    "version.transformers": Cause(1.05, 1.05, "another transformers"),
    "train.loader.prefetch_factor": Cause(1.05, 1.02, "fewer batches ahead", {}, True),
    "train.loader.persistent_workers": Cause(1.02, 1.02, "workers start again", ON),
    "git_commit": Cause(1.01, 1.01, "other code"),
    "git_dirty": Cause(1.01, 1.01, "files differ from the commit in one of the two"),
}
UNKNOWN = Cause(1.0, 1.0, "effect unknown")
NO_CAUSE = "as a rule no slower here"

SYMPTOMS: dict[str, str] = {
    "padding_pct": "more of each batch is padding",
    "loader_wait_pct": "steps wait for their batches",
    "cpu_wait_pct": "other programs had the cores",
    "cpu_probe_ms": "the cores themselves were slower, or shared with a neighbour",
    "gpu_clock_mhz": "the GPU ran slower: heat, power limit or another clock setting",
}

EFFECTIVE: dict[str, str] = {
    "precision": "runtime.precision",
    "residual": "runtime.residual",
    "attention": "runtime.attention",
    "threads": "runtime.threads",
    "strategy": "train.batching",
    "token_budget": "train.token_budget",
    "compile": "train.compile",
    "cuda_graphs": "train.cuda_graphs",
    "num_workers": "train.loader.num_workers",
    "world_size": "world_size",
    "token_key": "token_key",
    "device": "device",
    "git_commit": "git_commit",
    "git_dirty": "git_dirty",
}
"""Tags with what a parameter came to: two spellings of one thing are no difference."""

NO_MATTER = (
    "paths.",
    "guard.",
    "tracking.",
    "split.",
    "predict.",
    "benchmark.",
    "sweep.",
    "train.resume",
    "train.max_steps",
    "train.epochs",
    "train.deadline_hours",
    "train.error_analysis_every",
    "train.checkpoint.",
    "train.distributed.num_processes",
    "train.distributed.machine_rank",
    "train.distributed.rendezvous_endpoint",
)
"""Parameters that are no part of a step."""


def differences(then: Run, now: Run) -> list[Difference]:
    """What differs, by factor, the largest first; of equals in the table's order."""
    before, after = _facts(then), _facts(now)
    measured = _symptoms(then, now)
    found = []
    for name in before.keys() | after.keys():
        old, new = before.get(name, NOT_SET), after.get(name, NOT_SET)
        if old != new:
            cause = _cause(name, old, new)
            factor = _factor(cause, old, new, now.on_gpu)
            if factor > 1 and cause.figure in measured:
                factor = max(SYMPTOM_LIMIT, measured.pop(cause.figure).factor)
            known = factor > 1 or cause is UNKNOWN
            reason = cause.reason if known else NO_CAUSE
            found.append(Difference(name, old, new, factor, reason))
    found += [d for d in measured.values() if d.factor > SYMPTOM_LIMIT]
    return sorted(found, key=_place)


def _cause(name: str, then: str, now: str) -> Cause:
    """A parameter that one of the two lacks is another version's: what ran is unknown.
    A variable that is not set is a setting."""
    if NOT_SET in (then, now) and not name.startswith(VARIABLES):
        return UNKNOWN
    return CAUSES.get(name, UNKNOWN)


def _place(difference: Difference) -> tuple[float, bool, int, str]:
    names = [*CAUSES]
    known = difference.name in CAUSES
    place = names.index(difference.name) if known else len(names)
    no_cause = difference.reason == NO_CAUSE
    return -difference.factor, no_cause, place, difference.name


def _facts(run: Run) -> dict[str, str]:
    params = {RENAMED.get(k, k): v for k, v in run.params.items()}
    facts = {k: v for k, v in params.items() if not k.startswith(NO_MATTER)}
    facts |= {EFFECTIVE[k]: v for k, v in run.tags.items() if k in EFFECTIVE}
    return facts | {k: v for k, v in run.tags.items() if k.startswith("version.")}


def _factor(cause: Cause, then: str, now: str, on_gpu: bool) -> float:
    factor, ranks = cause.gpu if on_gpu else cause.cpu, cause.ranks
    if now in ranks and ranks[now] <= ranks.get(then, 0):
        return 1.0
    if not cause.more_is_faster:
        return factor
    try:
        ratio = float(then) / float(now)
    except (ValueError, ZeroDivisionError):
        return factor
    return min(factor, ratio**cause.power) if ratio > 1 else 1.0


def _symptoms(then: Run, now: Run) -> dict[str, Difference]:
    found = {}
    for name, reason in SYMPTOMS.items():
        before = then.figures.get(name)
        after = now.figures.get(name)
        if before is None or after is None:
            continue
        factor, texts = MEASURES[name](before, after), (f"{before:.1f}", f"{after:.1f}")
        found[name] = Difference(name, *texts, factor, reason)
    return found


def _by_share(before_pct: float, after_pct: float) -> float:
    return max(100 - before_pct, 1.0) / max(100 - after_pct, 1.0)


def _by_time(before: float, after: float) -> float:
    return after / before if before else 1.0


def _by_speed(before: float, after: float) -> float:
    return before / after if after else 1.0


MEASURES: dict[str, Callable[[float, float], float]] = {
    "padding_pct": _by_share,
    "loader_wait_pct": _by_share,
    "cpu_wait_pct": _by_share,
    "cpu_probe_ms": _by_time,
    "gpu_clock_mhz": _by_speed,
}
