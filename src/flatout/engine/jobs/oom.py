"""Memory that runs out: a smaller token budget, or the one to try."""

from __future__ import annotations

import logging
import traceback
from dataclasses import replace
from typing import Any

import torch

from flatout.engine.assemble import Trainer
from flatout.engine.model import forget_failed_pass

logger = logging.getLogger(__name__)

_TEXTS = ("out of memory", "can't allocate memory", "cannot allocate memory")


class OutOfMemory(RuntimeError):
    """A micro-batch does not fit, and nothing smaller may be tried here."""

    exit_code = 4

    def __init__(self, message: str, to_try: dict[str, Any] | None) -> None:
        super().__init__(message)
        self.to_try = to_try
        """Other settings of training, by name; None: there are none."""


def is_out_of_memory(error: BaseException) -> bool:
    """Also where it broke the recording of a CUDA graph, whose end then raises."""
    if error.__context__ is not None and is_out_of_memory(error.__context__):
        return True
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(
        text in str(error).lower() for text in _TEXTS
    )


def shrink(trainer: Trainer, error: RuntimeError | MemoryError, step: int) -> None:
    """Give up CUDA graphs, which have memory of their own; then halve the token budget:
    the global batch stays, in more micro-batches. Raises OutOfMemory where the settings
    do not allow it, and on one of several ranks; any other error as it is."""
    if not is_out_of_memory(error):
        raise error
    if trainer.choices.cuda_graphs:
        if not _is_alone(trainer):
            how = f"out of memory at step {step} with CUDA graphs"
            message = _message(trainer, how, "train.cuda_graphs: false")
            raise OutOfMemory(message, {"cuda_graphs": False}) from error
        logger.warning("out of memory at step %d: going on without CUDA graphs", step)
        trainer.choices = replace(trainer.choices, cuda_graphs=False)
        trainer.stepper.drop_graphs()
    else:
        _halve_budget(trainer, error, step)
    trainer.optimizer.zero_grad(set_to_none=True)
    forget_failed_pass(trainer.model)
    traceback.clear_frames(error.__traceback__)  # they hold the activations
    if trainer.runtime.is_cuda:
        torch.cuda.empty_cache()


def _halve_budget(
    trainer: Trainer, error: RuntimeError | MemoryError, step: int
) -> None:
    budget, half = trainer.choices.token_budget, half_budget(trainer)
    if half == budget:
        raise OutOfMemory(
            f"out of memory at step {step}: one row does not fit. Lower "
            "tokenize.max_length, set train.gradient_checkpointing: true, or take a "
            "smaller model",
            None,
        ) from error
    if not _may_shrink(trainer):
        how = f"out of memory at step {step} with token budget {budget}"
        mend = f"train.token_budget: {half} (the global batch stays)"
        message = _message(trainer, how, mend)
        raise OutOfMemory(message, {"token_budget": half}) from error
    logger.warning(
        "out of memory at step %d with token budget %d: going on with %d",
        step,
        budget,
        half,
    )
    trainer.choices = replace(trainer.choices, token_budget=half)
    planner = replace(trainer.data.planner, token_budget=half)
    trainer.data = replace(trainer.data, planner=planner)


def half_budget(trainer: Trainer) -> int:
    """Half the token budget, and at least the longest row."""
    longest = int(trainer.data.rows.all_lengths.max())
    if trainer.choices.strategy == "fixed":
        longest = trainer.data.planner.max_length
    return max(longest, trainer.choices.token_budget // 2)


def _may_shrink(trainer: Trainer) -> bool:
    """One of several ranks cannot: the others wait for it in the middle of the step.
    There the launcher starts all again with the smaller budget."""
    return trainer.job.settings.train.on_oom == "shrink" and _is_alone(trainer)


def _is_alone(trainer: Trainer) -> bool:
    return trainer.runtime.ranks.world_size == 1


def _message(trainer: Trainer, how: str, mend: str) -> str:
    several = trainer.job.settings.train.distributed.num_machines > 1
    where = " on all machines" if several else ", or train.on_oom: shrink"
    return f"{how}: set {mend}{where}"
