"""Choose the token budget that fits in GPU memory, by measuring passes of the model.

The memory per token depends on kernels, precision, padding, frozen layers and
recomputation. No formula covers all of these for every model. Therefore, forward and
backward passes of a few sizes are measured before the first step. They neither change
the random numbers of the run nor leave gradients. Memory is assumed to be a linear
function of the number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from flatout.engine.batches.collation import StepBatch, StepRows
from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.models.memory import Demand, guessed_tokens, line, moment_bytes
from flatout.engine.models.model import TaskModel, forget_failed_pass, is_out_of_memory
from flatout.engine.rows.layout import Ints
from flatout.engine.train.setup.budgets import (
    ROOM,
    Bounds,
    Fit,
    Point,
    choose_budget,
    fit_from_estimate,
    is_plenty,
    points,
)
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.resolved_config import ResolvedConfig
from flatout.engine.train.setup.step_data import make_collator, make_planner
from flatout.engine.train.step import Stepper

SAMPLED_ROWS = 4_096
FIRST_SHARE = 0.5
"""The size of the first measured pass, as a fraction of the estimated budget. It is
large because kernels are autotuned for this size."""
FIRST_ROWS = 2
"""The number of rows of the first measured pass if there is no estimate. It is not 1,
because a batch of one row would be compiled separately."""


def fit(
    job: TrainJob, resolved: ResolvedConfig, model: TaskModel, stepper: Stepper
) -> Fit:
    """Return the token budget that fits in this rank's GPU memory. Passes do not
    communicate, so a rank that runs out of memory does not block the others."""
    runtime, bounds = stepper.runtime, bounds_of(job, resolved, stepper)
    wanted = resolved.token_budget
    sharded = job.settings.train.distributed.strategy == "fsdp"
    shards = runtime.ranks.world_size if sharded else 1
    room = ROOM * runtime.memory_within_reach
    guess = guessed_tokens(job.settings, model.model.config, room, shards)
    if sharded:  # a pass would communicate with the other ranks
        return fit_from_estimate(wanted, bounds, guess)
    linear = resolved.attention != "eager"  # eager attention is quadratic
    if guess and linear and is_plenty(guess, bounds):
        return Fit(wanted)
    with preserve_state(model, stepper):
        start = FIRST_SHARE * guess if guess else FIRST_ROWS * bounds.least
        demand = Passes(job, resolved, model, stepper).demand(int(start), bounds, room)
    return choose_budget(demand, bounds, runtime.memory_within_reach, wanted)


def bounds_of(job: TrainJob, resolved: ResolvedConfig, stepper: Stepper) -> Bounds:
    """Return the limits for the number of tokens per micro-batch of one rank."""
    ranks, longest = stepper.runtime.ranks.world_size, job.train.facts.longest
    if resolved.strategy == "fixed":
        longest = job.max_length
    sample = longest * job.train.facts.most_sequences
    whole = -(-job.settings.train.global_batch_size // ranks) * sample
    return Bounds(longest, max(longest, min(resolved.token_budget, whole)))


@contextmanager
def preserve_state(model: TaskModel, stepper: Stepper) -> Iterator[None]:
    """Context manager that, on exit, restores the model's buffers and the random state,
    and clears gradients."""
    runtime, was_training = stepper.runtime, model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.random.fork_rng(devices=[runtime.device] if runtime.is_cuda else []):
        model.train()
        stepper.clear_gradients()
        try:
            yield
        finally:
            stepper.clear_gradients()
            model.train(was_training)
            for buffer, was in buffers:  # e.g. the statistics of BatchNorm
                buffer.copy_(was)
    if runtime.is_cuda:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(runtime.device)


class Passes:
    """Measures forward and backward passes over long rows of the train split."""

    def __init__(
        self,
        job: TrainJob,
        resolved: ResolvedConfig,
        model: TaskModel,
        stepper: Stepper,
    ) -> None:
        self._model, self._stepper = model, stepper
        runtime = stepper.runtime
        planner = replace(make_planner(job, runtime, resolved), world_size=1)
        collator = make_collator(job, runtime, resolved, model.model.config)
        unused = GlobalBatches(len(job.train), 1, seed=0)
        self._data = StepRows(job.train, unused, planner, collator)
        sample = np.arange(0, len(job.train), -(-len(job.train) // SAMPLED_ROWS))
        lengths = job.train.lengths(sample)
        order = np.argsort(-lengths, kind="stable")
        self._ids, self._lengths = sample[order], lengths[order]

    def demand(self, start: int, bounds: Bounds, room: float) -> Demand | None:
        """Measure passes and return the memory demand. Return None if the longest row
        does not fit in `room` bytes."""
        updater, device = self._stepper.updater, self._stepper.runtime.device
        gradients = sum(p.nbytes for p in updater.parameters)
        moments = moment_bytes(updater.optimizer.param_groups)
        ready = sum(p.grad.nbytes for p in updater.parameters if p.grad is not None)
        held = torch.cuda.memory_allocated(device) - ready
        free = room - held - gradients - moments
        found = points(self.measured, start, bounds, free)
        if not found:
            return None
        fixed, per_token = line(found)
        return Demand(
            held=torch.cuda.memory_allocated(device) - gradients,
            gradients=gradients,
            moments=moments,
            update=0 if updater.fused else gradients,
            fixed=fixed,
            per_token=per_token,
        )

    def measured(self, tokens: int) -> Point | None:
        """Measure a pass of at most `tokens` tokens. Return its actual number of
        tokens, and the bytes it needs in addition to permanent memory and gradients.
        Return None if memory runs out."""
        device = self._stepper.runtime.device
        batch = self.batch(tokens)
        try:
            self.run(batch)  # compile, autotune and allocate gradients
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            self.run(batch)
            peak = torch.cuda.max_memory_allocated(device)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            forget_failed_pass(self._model)
            torch.cuda.empty_cache()
            return None
        return batch.num_padded_tokens, float(peak - before)

    def batch(self, tokens: int) -> StepBatch:
        """Return a micro-batch of long rows with at most `tokens` tokens."""
        planner = replace(self._data.planner, token_budget=tokens)
        if planner.strategy == "grouped":  # grouping may divide the batch
            planner = replace(planner, strategy="random")
        count = longest_rows(self._lengths, tokens, planner)
        data = replace(self._data, planner=planner)
        ids = np.resize(self._ids, count)
        return data.cut(ids, 0, 0).to(self._stepper.runtime.device)

    def run(self, batch: StepBatch) -> None:
        """Run a pass as the stepper does, but without the distributed wrapper. Blocks
        that were compiled in place stay compiled."""
        for micro in batch.micro_batches:
            if self._stepper.noise is not None:
                self._stepper.noise.draw()
            with self._stepper.runtime.autocast():
                loss, _ = self._model(micro)
            loss.backward()


def longest_rows(lengths: Ints, tokens: int, planner: Planner) -> int:
    """Return how many rows fit in a micro-batch of `tokens` tokens, for rows with
    `lengths` (N,) in descending order. If N is too small, rows are used repeatedly."""
    if planner.strategy == "packed":
        again = tokens // max(1, int(lengths[-1])) + 1
        total = np.cumsum(np.resize(lengths, again))
        return max(1, int(np.searchsorted(total, tokens, side="right")))
    width = planner.max_length if planner.strategy == "fixed" else int(lengths[0])
    return max(1, tokens // width)
