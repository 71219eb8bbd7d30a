"""Build the planner and the collator, which turn training rows into micro-batches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from flatout.engine.batches.collation import Collator, StepRows
from flatout.engine.batches.global_batches import Planner
from flatout.engine.families import family_of
from flatout.engine.machine.runtime import Runtime
from flatout.engine.models.flops import AttentionPairs
from flatout.engine.rows.layout import Layout
from flatout.engine.train.setup.acceleration import graph_multiple
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.setup.resolved_config import ResolvedConfig

GPU_PAD_MULTIPLE = 64


def step_rows(
    job: TrainJob, runtime: Runtime, resolved: ResolvedConfig, config: Any
) -> StepRows:
    """Return the dataset from which this rank reads the batch of each step."""
    settings = job.settings
    planner = make_planner(job, runtime, resolved)
    collator = make_collator(job, runtime, resolved, config)
    collator = replace(collator, names_rows=settings.train.audit)
    usual = job.task.texts.causal or family_of(config).causal
    causal = bool(getattr(config, "is_causal", usual))
    pairs = AttentionPairs.of(config, causal=causal)
    return StepRows(
        job.train, job.batches, planner, collator, runtime.ranks.rank, pairs
    )


def make_planner(job: TrainJob, runtime: Runtime, resolved: ResolvedConfig) -> Planner:
    overhead = resolved.overhead_tokens
    if resolved.cuda_graphs:  # each division of a batch would need its own graph
        overhead = resolved.token_budget
    return Planner(
        strategy=resolved.strategy,  # type: ignore[arg-type]
        token_budget=resolved.token_budget,
        max_length=job.max_length,
        world_size=runtime.ranks.world_size,
        overhead_tokens=overhead,
        launch_tokens=resolved.launch_tokens,
    )


def make_collator(
    job: TrainJob, runtime: Runtime, resolved: ResolvedConfig, config: Any
) -> Collator:
    max_length = job.max_length
    multiple = (
        graph_multiple(job, runtime) if resolved.cuda_graphs else GPU_PAD_MULTIPLE
    )
    layout = Layout(
        packed=resolved.packed,
        pad_token_id=job.vocabulary.pad_token_id if job.vocabulary else 0,
        pad_to_length=max_length if resolved.strategy == "fixed" else None,
        pad_multiple=runtime.pad_multiple(resolved.packed, multiple),
        row_multiple=_row_multiple(job, runtime, resolved) if runtime.is_cuda else 1,
        every_place=resolved.cuda_graphs and not resolved.packed,
        max_length=max_length,
    )
    return Collator(job.task, layout, pools_last=family_of(config).causal)


def _row_multiple(job: TrainJob, runtime: Runtime, resolved: ResolvedConfig) -> int:
    """Return the multiple to which the number of rows of a packed batch is rounded up.
    With CUDA graphs, it exceeds the number of rows of nearly every batch: it is 1.25
    times the mean number per rank, plus padding rows."""
    if not resolved.cuda_graphs:
        return 64
    batch, ranks = job.settings.train.global_batch_size, runtime.ranks.world_size
    rows = batch if ranks == 1 else min(batch, -(-5 * batch // (4 * ranks)))
    filler = -(-graph_multiple(job, runtime) // job.max_length)
    return rows + filler
