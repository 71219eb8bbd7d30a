"""Token budgets: which are worth a trial, and what the memory holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import TrialResult

MAX_CONFIRMATIONS = 3

Changes = dict[str, Any]
"""Settings by path, `train.token_budget`."""


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


@dataclass(frozen=True)
class SafeBudget:
    """What the memory holds of the longest rows."""

    max_token_budget: int | None = None
    """None where it was not found out; 0 where nothing fits."""
    note: str = ""

    def holds(self, trial: TrialResult, longest: int) -> bool:
        """Whether the trial's fullest micro-batch, of rows of `longest` tokens, is
        safe; true where nothing is known."""
        if self.max_token_budget is None:
            return True
        fullest = min(int(trial.token_budget), trial.global_batch_size * longest)
        return fullest <= self.max_token_budget


def largest_budget(bench: Bench, changes: Changes) -> SafeBudget:
    """Bisected with the longest rows, then confirmed in a fresh process."""
    if bench.explored():
        note = "memory was not searched: benchmark.tune_minutes were over"
        return SafeBudget(note=note)
    options: Changes = {"any_batch": True} if bench.options.free_global_batch else {}
    found = bench.run(
        "memory", changes, label="largest safe token budget", options=options
    )
    budget = bench.figures[found.trial_id].get("max_token_budget")
    if not found.ok or budget is None:
        return SafeBudget(note=f"it could not be asked ({found.status}: {found.note})")
    if not budget:
        return SafeBudget(0, found.note)
    tried = [
        int(0.9**power * budget) // 64 * 64 for power in range(1, MAX_CONFIRMATIONS)
    ]
    for smaller in [int(budget), *tried]:
        again = bench.run(
            "memory",
            changes,
            label=f"budget {smaller} in a fresh process",
            options={"token_budget": smaller},
        )
        if again.ok and bench.figures[again.trial_id].get("max_token_budget"):
            return SafeBudget(smaller, found.note)
    return SafeBudget(0, f"no budget down to {smaller} held in a fresh process")


def safe_label(memory: SafeBudget) -> str:
    return f"budget {memory.max_token_budget}: safe"


def safe_changes(
    bench: Bench, chosen: TrialResult, changes: Changes
) -> tuple[SafeBudget, Changes | None]:
    """What the memory holds, and `changes` within it; None where they are already, or
    where nothing is."""
    # One process searches: with its whole batch it might come to another `auto`.
    graphs = {"train.cuda_graphs": chosen.cuda_graphs}
    memory = largest_budget(bench, {**changes, **graphs})
    nothing_fits = memory.max_token_budget == 0
    if nothing_fits or memory.holds(chosen, bench.longest):
        return memory, None
    return memory, {**changes, "train.token_budget": memory.max_token_budget}
