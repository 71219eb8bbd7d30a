"""Reaction to a lack of memory: a smaller token budget, or a proposal for one."""

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
from flatout.engine.train.setup.budgets import takes_whole_steps

logger = logging.getLogger(__name__)

Found = TypeVar("Found")


class OutOfMemory(RuntimeError):
    """A micro-batch does not fit, and no smaller one may be tried here."""

    exit_code = 4

    def __init__(self, message: str, to_try: dict[str, Any] | None) -> None:
        super().__init__(message)
        self.to_try = to_try
        """Training settings to try, by name; None: there are no others."""


def shrink(trainer: Trainer, error: RuntimeError | MemoryError, step: int) -> None:
    """Give up CUDA graphs, which have separate memory; then halve the token budget: the
    global batch stays the same, in more micro-batches. Raises OutOfMemory if the
    settings do not allow it, or with several ranks; any other error unchanged."""
    where = f"at step {step}"
    if not is_out_of_memory(error):
        raise error
    if trainer.resolved.cuda_graphs:
        _drop_graphs(trainer, error, where)
    elif takes_whole_steps(trainer.model.model.config):
        raise _too_large(trainer, where) from error
    else:
        budget = trainer.resolved.token_budget
        half = _halved(trainer, trainer.data.rows, budget, error, where)
        trainer.resolved = replace(trainer.resolved, token_budget=half)
        planner = replace(trainer.data.planner, token_budget=half)
        trainer.data = replace(trainer.data, planner=planner)
    trainer.optimizer.zero_grad(set_to_none=True)
    _free_failed_pass(trainer, error)


def _too_large(trainer: Trainer, where: str) -> OutOfMemory:
    how = f"out of memory {where}, which BatchNorm needs as one batch"
    return OutOfMemory(_message(trainer, how, "train.global_batch_size smaller"), None)


def evaluate_within_memory(
    trainer: Trainer, rows: SplitRows, evaluate: Callable[[], Found]
) -> Found:
    """Run `evaluate`; if memory runs out, repeat it with half the tokens per batch,
    only for evaluations, since training steps fit; then without CUDA graphs. Raises the
    errors of `shrink`."""
    while True:
        try:
            return evaluate()
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            _shrink_evaluation(trainer, error, rows)
            _free_failed_pass(trainer, error)


def _shrink_evaluation(
    trainer: Trainer, error: RuntimeError | MemoryError, rows: SplitRows
) -> None:
    budget = evaluation_budget(trainer, rows)
    if trainer.resolved.cuda_graphs and budget == _longest(trainer, rows):
        _drop_graphs(trainer, error, "in an evaluation")
    else:
        half = _halved(trainer, rows, budget, error, "in an evaluation")
        trainer.evaluation_budget = half


def evaluation_budget(trainer: Trainer, rows: SplitRows) -> int:
    """Tokens of a micro-batch of `rows`, which may be longer than the training rows."""
    most = min(trainer.resolved.token_budget, trainer.evaluation_budget)
    return max(most, _longest(trainer, rows))


def _drop_graphs(
    trainer: Trainer, error: RuntimeError | MemoryError, where: str
) -> None:
    if not _is_alone(trainer):
        how = f"out of memory {where} with CUDA graphs"
        message = _message(trainer, how, "train.cuda_graphs: false")
        raise OutOfMemory(message, {"cuda_graphs": False}) from error
    logger.warning("out of memory %s: continuing without CUDA graphs", where)
    trainer.resolved = replace(trainer.resolved, cuda_graphs=False)
    trainer.stepper.drop_graphs()


def _free_failed_pass(trainer: Trainer, error: BaseException) -> None:
    forget_failed_pass(trainer.model)
    traceback.clear_frames(error.__traceback__)  # they keep the activations
    if trainer.runtime.is_cuda:
        torch.cuda.empty_cache()


def _halved(
    trainer: Trainer,
    rows: SplitRows,
    budget: int,
    error: RuntimeError | MemoryError,
    where: str,
) -> int:
    half = max(_longest(trainer, rows), budget // 2)
    if half >= budget:
        raise OutOfMemory(
            f"out of memory {where}: one row does not fit. Lower "
            "tokenize.max_length, set train.gradient_checkpointing: true, or use a "
            "smaller model",
            None,
        ) from error
    if not _may_shrink(trainer):
        how = f"out of memory {where} with token budget {budget}"
        remedy = f"train.token_budget: {half} (the global batch stays)"
        message = _message(trainer, how, remedy)
        raise OutOfMemory(message, {"token_budget": half}) from error
    logger.warning(
        "out of memory %s with token budget %d: continuing with %d",
        where,
        budget,
        half,
    )
    return half


def _longest(trainer: Trainer, rows: SplitRows) -> int:
    """Minimum tokens of a micro-batch: those of the longest of `rows`."""
    if trainer.resolved.strategy == "fixed":
        return trainer.data.planner.max_length
    return rows.facts.longest


def _may_shrink(trainer: Trainer) -> bool:
    """Return False for one of several ranks: the others wait for it in the step. The
    launcher then restarts all ranks with the smaller budget."""
    return trainer.job.settings.train.on_oom == "shrink" and _is_alone(trainer)


def _is_alone(trainer: Trainer) -> bool:
    return trainer.runtime.ranks.world_size == 1


def _message(trainer: Trainer, how: str, remedy: str) -> str:
    train, where = trainer.job.settings.train, ""
    if train.distributed.num_machines > 1:
        where = " on all machines"
    elif train.on_oom == "stop":
        where = ", or train.on_oom: shrink"
    return f"{how}: set {remedy}{where}"
