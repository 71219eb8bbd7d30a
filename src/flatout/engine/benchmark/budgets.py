"""Token budgets that are worth a trial."""

from __future__ import annotations

from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import TrialResult


def falling_budgets(bench: Bench, first: TrialResult) -> list[int]:
    """Return half, a quarter, ... of a global batch's tokens, down to a longest row."""
    mean = bench.settings.train.global_batch_size * bench.mean_tokens
    # Most batches are then split into the same number of parts as the mean one.
    largest = min(1.2 * mean, float(first.token_budget))
    halves = [largest / 2**power for power in range(1, 8)]
    return [round_budget(half) for half in halves if half >= bench.longest]


def rising_budgets(bench: Bench, first: TrialResult) -> list[int]:
    """Return twice, four times, ... the resolved budget, up to a global batch."""
    resolved = int(first.token_budget)
    longest_batch = bench.settings.train.global_batch_size * bench.longest
    budgets = [resolved * 2**power for power in range(1, 6)]
    needed = bench.settings.train.global_batch_size * bench.mean_tokens
    return [b for b in budgets if needed > resolved and b <= 2 * longest_batch]


def round_budget(tokens: float) -> int:
    """Round up to a multiple of 64 (the kernels' tiles), or of 8 for small budgets."""
    multiple = 64 if tokens >= 1024 else 8
    return -(-int(tokens) // multiple) * multiple
