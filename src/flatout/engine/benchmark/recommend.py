"""Recommend trials, estimate the training time, and return the tuned settings."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from operator import attrgetter
from statistics import median
from typing import Any

import xxhash

from flatout import __version__
from flatout.engine.benchmark.trials.trial_spec import TrialResult
from flatout.engine.parameters import Settings

PICKS = ("fastest", "most_efficient", "recommended")


def pick(
    trials: Sequence[TrialResult],
    global_batch_size: int,
    *,
    memory_gib: float | None,
    headroom: float,
    free_global_batch: bool = False,
    rate_of: Callable[[TrialResult], float] = attrgetter("rate"),
) -> dict[str, TrialResult | None]:
    """Pick the fastest, the most memory-efficient (samples/s per reserved GiB) and the
    recommended trial, the fastest that leaves the fraction `headroom` of `memory_gib`
    free. Only end-to-end trials with the user's global batch size are considered,
    unless `free_global_batch` is set. A pick is None if no trial qualifies. `rate_of`
    returns the throughput by which trials are compared."""
    rated = [
        trial
        for trial in trials
        if trial.ok and trial.kind == "end_to_end" and trial.samples_per_s
        if free_global_batch or trial.global_batch_size == global_batch_size
    ]
    known = [t for t in rated if t.reserved_memory_gib]
    limit = (1 - headroom) * memory_gib if memory_gib else math.inf
    safe = [t for t in rated if (t.reserved_memory_gib or 0.0) <= limit]
    found = (
        max(rated, key=rate_of, default=None),
        max(known, key=lambda t: rate_of(t) / t.reserved_memory_gib, default=None),
        max(safe, key=rate_of, default=None),
    )
    return dict(zip(PICKS, found, strict=True))


def scaled_learning_rate(rate: float, growth: float, rule: str) -> float:
    """Return the learning rate for a global batch that is `growth` times as large.
    `rule` is `sqrt` (Krizhevsky 2014), `linear` (Goyal et al. 2017) or `none`."""
    factors = {"sqrt": math.sqrt(growth), "linear": growth, "none": 1.0}
    return rate * factors[rule]


def time_to_train(
    rows: int, epochs: float, before: TrialResult | None, after: TrialResult | None
) -> dict[str, Any] | None:
    """Return how many hours all training steps take with the settings of `before` and
    of `after`, or None if `after` is None. Evaluation, checkpoints and start-up are not
    included."""
    if after is None:
        return None
    hours = [
        rows * epochs / trial.rate / 3600 if trial and trial.rate else None
        for trial in (before, after)
    ]
    return {"epochs": epochs, "hours_before": hours[0], "hours_after": hours[1]}


def tuned_parameters(settings: Settings, trial: TrialResult) -> dict[str, Any]:
    """Return nested parameters that make training run exactly as `trial` ran, with its
    resolved values for each `auto`, which could resolve differently next time."""
    found: dict[str, Any] = {
        "runtime": {"precision": trial.precision},
        "train": {
            "batching": trial.strategy,
            "token_budget": trial.token_budget,
            "compile": trial.compile,
            "cuda_graphs": trial.cuda_graphs,
            "gradient_checkpointing": trial.gradient_checkpointing,
            "loader": {
                "num_workers": trial.num_workers,
                "prefetch_factor": trial.prefetch_factor,
                "pin_memory": trial.pin_memory,
            },
        },
    }
    if trial.world_size > 1:
        found["train"]["distributed"] = {"bucket_mib": trial.bucket_mib}
    wanted = settings.train.global_batch_size
    if trial.global_batch_size != wanted:
        rule = settings.benchmark.learning_rate_rule
        found["train"]["global_batch_size"] = trial.global_batch_size
        found["train"]["learning_rate"] = scaled_learning_rate(
            settings.train.peak_learning_rate, trial.global_batch_size / wanted, rule
        )
        found["train"]["learning_rate_at_batch"] = None
    return found


def provenance(
    settings: Settings,
    device: str,
    devices: int,
    token_key: str,
    rates: Sequence[float] = (),
    gain: float | None = None,
) -> dict[str, Any]:
    """Return a record of where parameters were measured: the samples/s of each trial
    with them (`rates`), and their speed-up over the configured settings (`gain`).
    Without these, it describes this machine, model and data, for comparison with a
    stored record."""
    rate, several = median(rates) if rates else 0.0, len(rates) > 1
    model = settings.model.model_dump_json() + str(settings.tokenize.max_length)
    return {
        "device": device,
        "devices": devices,
        "versions": versions(),
        "token_key": token_key,
        "model": xxhash.xxh3_64_hexdigest(model.encode()),
        "date": time.strftime("%Y-%m-%d"),
        "samples_per_s": rate,
        "samples_per_s_low": min(rates) if several else None,
        "samples_per_s_high": max(rates) if several else None,
        "samples_per_s_before": rate / gain if gain else None,
    }


def versions() -> dict[str, str]:
    """Return the versions of the packages that affect speed, without importing them."""
    found = {name: version(name) for name in ("torch", "transformers")}
    return {"flatout": __version__, **found}


def mismatches(tuned: Mapping[str, Any], here: Mapping[str, Any]) -> list[str]:
    """Describe each difference between the stored record and this machine's record."""
    found = [
        f"{word} {tuned[name]}, here {here[name]}"
        for name, word in _WORDS.items()
        if name in tuned and tuned[name] != here[name]
    ]
    versions = tuned.get("versions")
    for name, measured in versions.items() if isinstance(versions, Mapping) else ():
        if here["versions"].get(name) != measured:
            found.append(f"{name} {measured}, here {here['versions'].get(name)}")
    return found


_WORDS = {
    "device": "device",
    "devices": "number of devices",
    "model": "model",
    "token_key": "data",
}
