"""The largest token budget that is safe: longest rows, optimizer state in place.

Usual finders try average batches and meet the longest ones hours later; here every
attempt is a whole step on as many of the longest rows as the budget holds.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from flatout.engine.batches.global_batches import Planner
from flatout.engine.benchmark.trials.trial_spec import TrialSpec
from flatout.engine.machine.container import available_memory_bytes
from flatout.engine.machine.runtime import Runtime, peak_resident_bytes, set_up
from flatout.engine.models.model import forget_failed_pass
from flatout.engine.rows.layout import Ints
from flatout.engine.train.setup.assemble import Trainer, assemble
from flatout.engine.train.setup.calibration import longest_rows
from flatout.engine.train.setup.job import TrainJob

GRANULE = 64
"""Budgets are multiples of it."""
RESOLUTION = 0.03
"""Bisection ends when the bounds are this close."""
LARGEST_BUDGET = 2**20
"""Where the global batch is free, the search ends here, or with all rows."""
STEPS_PER_ATTEMPT = 2
"""The second one has the optimizer's state beside its activations."""


def memory(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Bisect between the longest row and the longest global batch; with the option
    `token_budget`: only whether this one fits, in this fresh process."""
    runtime = set_up(job.settings.runtime)
    meter = MemoryMeter(runtime, spec.measure.headroom)
    trainer = assemble(job, runtime)
    trainer.model.train()
    attempts = Attempts(trainer, meter)
    longest = job.train.facts.longest
    if job.settings.train.batching == "fixed":
        longest = job.settings.max_length
    cap = longest * job.settings.train.global_batch_size
    free = bool(spec.options.get("any_batch"))
    if free:
        cap = max(cap, min(LARGEST_BUDGET, longest * len(job.train)))
    asked = spec.options.get("token_budget")
    if asked is not None:
        fits = attempts.fits(int(asked))
        found, capped = (int(asked) if fits else 0), False
    else:
        found = largest_that_fits(attempts.fits, longest, cap)
        capped = found >= cap
    return {
        "max_token_budget": found,
        "memory_limit_gib": meter.limit_bytes / 2**30,
        "attempts": attempts.tried,
        "reserved_memory_gib": attempts.highest_gib,
        "strategy": trainer.resolved.strategy,
        "token_budget": found,
        "attention": trainer.resolved.attention,
        "precision": runtime.precision,
        "compile": trainer.resolved.compile,
        "cuda_graphs": False,
        "device": runtime.device_name,
        "note": _note(found, longest, whole=capped and not free),
    }


def _note(found: int, longest: int, *, whole: bool) -> str:
    if not found:
        return f"not even one row of {longest} tokens fits"
    if whole:
        return "the longest global batch fits in one micro-batch"
    return f"largest safe budget: {found} tokens"


def largest_that_fits(fits: Callable[[int], bool], low: int, high: int) -> int:
    """Largest budget in [low, high] for which `fits` holds, within RESOLUTION; 0 where
    not even `low` fits. Goes up in doublings, so that few attempts fail."""
    if not fits(low):
        return 0
    good, bad = low, high + 1
    while good < high:
        attempt = min(2 * good, high)
        if fits(attempt):
            good = attempt
        else:
            bad = attempt
            break
    while bad - good > max(GRANULE, RESOLUTION * good) and good < high:
        middle = (good + bad) // 2 // GRANULE * GRANULE
        if middle <= good:
            break
        if fits(middle):
            good = middle
        else:
            bad = middle
    return good


@dataclass
class Attempts:
    """Steps of growing budgets, each on the longest rows of the train split."""

    trainer: Trainer
    meter: MemoryMeter
    tried: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        rows = self.trainer.job.train
        self._lengths: Ints = rows.lengths(np.arange(len(rows)))
        self._order: Ints = np.argsort(-self._lengths)

    @property
    def highest_gib(self) -> float:
        return max((a["gib"] for a in self.tried if a["fits"]), default=0.0)

    def fits(self, budget: int) -> bool:
        predicted = self._predicted_gib(budget)
        limit_gib = self.meter.limit_bytes / 2**30
        if predicted is not None and predicted > limit_gib:
            self.tried.append({"budget": budget, "gib": predicted, "fits": False})
            return False
        self.meter.reset()
        full = False
        try:
            self._run(budget)
        except RuntimeError as error:  # torch.OutOfMemoryError is one
            if "memory" not in str(error).lower():
                raise
            full = True
            forget_failed_pass(self.trainer.model)
        gib = self._needed_bytes() / 2**30
        fits = not full and gib <= limit_gib
        self.tried.append({"budget": budget, "gib": gib, "fits": fits})
        self.trainer.optimizer.zero_grad(set_to_none=True)
        return fits

    def _needed_bytes(self) -> float:
        """By this attempt; CUDA graphs keep activations a second time."""
        peak = self.meter.peak_bytes()
        if not self.trainer.resolved.cuda_graphs:
            return peak
        self.trainer.optimizer.zero_grad(set_to_none=True)
        return 2 * peak - torch.cuda.memory_allocated(self.trainer.runtime.device)

    def _predicted_gib(self, budget: int) -> float | None:
        """By the line through the last two attempts, where memory cannot be refused
        but the machine would swap or kill: on a CPU."""
        if self.meter.refuses or len(self.tried) < 2:
            return None
        (a, b) = self.tried[-2:]
        if a["budget"] == b["budget"]:
            return None
        slope = (b["gib"] - a["gib"]) / (b["budget"] - a["budget"])
        return float(b["gib"] + slope * (budget - b["budget"]))

    def _run(self, budget: int) -> None:
        data = self.trainer.data
        planner = replace(data.planner, token_budget=budget)
        rows = self._rows(budget, planner)
        batch = replace(data, planner=planner).cut(rows, 0, 0)
        batch = batch.to(self.trainer.runtime.device)
        for _ in range(STEPS_PER_ATTEMPT):
            self.trainer.stepper.run_eagerly(batch)
        self.trainer.runtime.synchronize()

    def _rows(self, budget: int, planner: Planner) -> Ints:
        """As many of the longest rows as one micro-batch holds; of few rows, some
        twice."""
        count = longest_rows(self._lengths[self._order], budget, planner)
        return np.resize(self._order, count)


@dataclass
class MemoryMeter:
    """Peak memory of this process, and how much of the device it may take."""

    runtime: Runtime
    headroom: float
    limit_bytes: float = field(init=False)

    def __post_init__(self) -> None:
        if self.runtime.is_cuda:
            free = self.runtime.memory_within_reach
        else:
            free = available_memory_bytes()
        self.limit_bytes = (1 - self.headroom) * free

    @property
    def refuses(self) -> bool:
        """Whether too large a request raises instead of ending the process."""
        return self.runtime.is_cuda

    def reset(self) -> None:
        gc.collect()
        if self.runtime.is_cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.runtime.device)
            return
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        except OSError:
            pass

    def peak_bytes(self) -> float:
        """Since `reset`: reserved by the GPU's allocator, or resident in RAM."""
        if self.runtime.is_cuda:
            return float(torch.cuda.max_memory_reserved(self.runtime.device))
        status = Path("/proc/self/status")  # Linux alone has it
        for line in status.read_text().splitlines() if status.exists() else []:
            if line.startswith("VmHWM:"):
                return 1024.0 * int(line.split()[1])
        return float(peak_resident_bytes())
