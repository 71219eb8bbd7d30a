"""Token budgets that are worth a trial."""

from __future__ import annotations

from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import TrialResult


def falling_budgets(bench: Bench, first: TrialResult) -> list[int]:
    """Half, a quarter, ... of what one global batch needs, down to the longest row."""
    mean = bench.settings.train.global_batch_size * bench.mean_tokens
    # Most batches then split in as many parts as the mean one.
    largest = min(1.2 * mean, float(first.token_budget))
    halves = [largest / 2**power for power in range(1, 8)]
    return [round_budget(half) for half in halves if half >= bench.longest]


def rising_budgets(bench: Bench, first: TrialResult) -> list[int]:
    """Twice, four times, ... the resolved one, while a global batch needs more."""
    resolved = int(first.token_budget)
    longest_batch = bench.settings.train.global_batch_size * bench.longest
    budgets = [resolved * 2**power for power in range(1, 6)]
    needed = bench.settings.train.global_batch_size * bench.mean_tokens
    return [b for b in budgets if needed > resolved and b <= 2 * longest_batch]


def round_budget(tokens: float) -> int:
    """Upwards: to a multiple of 64 (kernels' tiles), of 8 where that is coarse."""
    multiple = 64 if tokens >= 1024 else 8
    return -(-int(tokens) // multiple) * multiple
