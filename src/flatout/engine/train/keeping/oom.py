"""Handle out-of-memory errors: reduce memory use, or suggest settings that do."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch

from flatout.engine.models.model import forget_failed_pass, is_out_of_memory
from flatout.engine.rows.rows import SplitRows
from flatout.engine.train.setup.assemble import Trainer
from flatout.engine.train.setup.budgets import needs_whole_steps

logger = logging.getLogger(__name__)

Found = TypeVar("Found")


class OutOfMemory(RuntimeError):
    """Raised if memory runs out and micro-batches cannot or may not be made smaller."""

    exit_code = 4

    def __init__(self, message: str, to_try: dict[str, Any] | None) -> None:
        super().__init__(message)
        self.to_try = to_try
        """Training settings that may help, by name, or None if there are none."""


def shrink(trainer: Trainer, error: RuntimeError | MemoryError, step: int) -> None:
    """Reduce memory use after an out-of-memory error at `step`. Any other `error` is
    raised again. If CUDA graphs are used, they are dropped, because they need separate
    memory. Otherwise, the token budget is halved, which splits a global batch into more
    micro-batches. Raises OutOfMemory if the settings forbid this, if it is impossible,
    or if there are several ranks."""
    if not is_out_of_memory(error):
        raise error
    how = f"out of memory at step {step}"
    if trainer.resolved.cuda_graphs:
        _drop_graphs(trainer, how)
    elif needs_whole_steps(trainer.model.model.config):
        how += ", which BatchNorm needs as one batch"
        raise _refusal(trainer, how, "train.global_batch_size smaller")
    else:
        budget = trainer.resolved.token_budget
        half = _halved(trainer, trainer.data.rows, budget, how)
        trainer.resolved = replace(trainer.resolved, token_budget=half)
        planner = replace(trainer.data.planner, token_budget=half)
        trainer.data = replace(trainer.data, planner=planner)
    trainer.optimizer.zero_grad(set_to_none=True)
    _free_failed_pass(trainer, error)


def evaluate_within_memory(
    trainer: Trainer, rows: SplitRows, evaluate: Callable[[int], Found]
) -> Found:
    """Return `evaluate(budget)`, where `budget` is the maximum number of tokens per
    micro-batch. If memory runs out, halve the budget and try again, and finally drop
    CUDA graphs. The token budget for training does not change. Raises OutOfMemory in
    the same cases as `shrink`."""
    how = "out of memory in an evaluation"
    while True:
        most = min(trainer.resolved.token_budget, trainer.evaluation_budget)
        budget = max(most, _longest(trainer, rows))
        try:
            return evaluate(budget)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            if trainer.resolved.cuda_graphs and budget == _longest(trainer, rows):
                _drop_graphs(trainer, how)
            else:
                trainer.evaluation_budget = _halved(trainer, rows, budget, how)
            _free_failed_pass(trainer, error)


def _drop_graphs(trainer: Trainer, how: str) -> None:
    if trainer.runtime.ranks.world_size > 1:
        changed, how = {"cuda_graphs": False}, f"{how} with CUDA graphs"
        raise _refusal(trainer, how, "train.cuda_graphs: false", changed)
    logger.warning("%s: continuing without CUDA graphs", how)
    trainer.resolved = replace(trainer.resolved, cuda_graphs=False)
    trainer.stepper.drop_graphs()


def _free_failed_pass(trainer: Trainer, error: BaseException) -> None:
    forget_failed_pass(trainer.model)
    traceback.clear_frames(error.__traceback__)  # they keep activations alive
    if trainer.runtime.is_cuda:
        torch.cuda.empty_cache()


def _halved(trainer: Trainer, rows: SplitRows, budget: int, how: str) -> int:
    """Return half of `budget`. Raises OutOfMemory if a single row does not fit, if the
    settings forbid a smaller budget, or if there are several ranks. The other ranks
    already wait for this one, so the launcher has to restart all of them."""
    half = max(_longest(trainer, rows), budget // 2)
    if half >= budget:
        remedy = (
            "a lower tokenize.max_length, or train.gradient_checkpointing: true, or "
            "use a smaller model"
        )
        raise OutOfMemory(f"{how}: one row does not fit: set {remedy}", None)
    how = f"{how} with token budget {budget}"
    stops = trainer.job.settings.train.on_oom == "stop"
    if stops or trainer.runtime.ranks.world_size > 1:
        remedy = f"train.token_budget: {half} (the global batch stays)"
        raise _refusal(trainer, how, remedy, {"token_budget": half})
    logger.warning("%s: continuing with %d", how, half)
    return half


def _longest(trainer: Trainer, rows: SplitRows) -> int:
    """Return the number of tokens in the longest row, or the fixed length to which all
    rows are padded. The token budget cannot be smaller."""
    if trainer.resolved.strategy == "fixed":
        return trainer.data.planner.max_length
    return rows.facts.longest


def _refusal(
    trainer: Trainer, how: str, remedy: str, to_try: dict[str, Any] | None = None
) -> OutOfMemory:
    train, where = trainer.job.settings.train, ""
    if train.distributed.num_machines > 1:
        where = " on all machines"
    elif train.on_oom == "stop":
        where = ", or train.on_oom: shrink"
    return OutOfMemory(f"{how}: set {remedy}{where}", to_try)
