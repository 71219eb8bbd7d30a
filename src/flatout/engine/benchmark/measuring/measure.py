"""Measure training throughput and the time of each phase.

Throughput is measured in windows without phase timing, using the same recorder, loader
and step as training. Phases are timed afterwards, in separate steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

from flatout.engine.benchmark.measuring.driver import BlockRows, Feed, loaded_feed
from flatout.engine.benchmark.measuring.interleaved import (
    Baseline,
    InterleavedPair,
    baseline_of,
    interleave,
    middle_half_pct,
)
from flatout.engine.benchmark.measuring.phases import launch_ms, phase_ms
from flatout.engine.benchmark.measuring.windows import (
    SPREAD_LIMIT_PCT,
    WarmTraining,
    middle,
    rate,
    spread_pct,
)
from flatout.engine.benchmark.trials.trial_spec import TrialSpec
from flatout.engine.machine.container import total_memory_bytes
from flatout.engine.machine.runtime import memory, set_up
from flatout.engine.parameters import BenchmarkSettings
from flatout.engine.train.process_group import ProcessGroup
from flatout.engine.train.recording.summary import efficiency, resolved_parameters
from flatout.engine.train.recording.timing import Rates, Window, compile_clock
from flatout.engine.train.setup.assemble import Trainer, assemble
from flatout.engine.train.setup.job import TrainJob

PHASE_STEPS = 8
PHASE_SECONDS = 2.0
AGAIN_WINDOWS = 3
"""Number of windows in a repeated trial (kind `again`). The first window is discarded
because it is slow (for example, 552 samples/s instead of 780)."""

FeedOf = Callable[[Trainer, int], Feed]


def end_to_end(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Measure the loader, copies, steps and logging together, as in training. The
    windows alternate with those of the reference configuration (`below`), if any."""
    with baseline_of(spec, folder) as below:
        return _measured(spec, job, loaded_feed, below)


def again(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Repeat the throughput measurement of `end_to_end` in AGAIN_WINDOWS windows, to
    show how the throughput varies between processes."""
    measure = spec.measure.model_copy(update={"repeats": AGAIN_WINDOWS})
    with warm_training(job, measure, loaded_feed) as warm:
        windows = warm.windows(most_apart_pct=math.inf)
    windows = windows[1:] or windows
    return {
        **_rates(windows),
        **_resolved_parameters(warm.driver.trainer, warm.feed),
        "note": _note(warm.driver.trainer, windows, []),
    }


def baseline(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Run the reference configuration in a process controlled by `Baseline`: call each
    requested method of WarmTraining and send its result, until None is received."""
    connection = Connection(spec.options["connection"])
    with warm_training(job, spec.measure, loaded_feed) as warm:
        connection.send("warm")
        while asked := connection.recv():
            method, arguments = asked
            connection.send(getattr(warm, method)(*arguments))
    return {}


def compute(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Measure the steps alone. All batches are on the device before timing starts."""

    def feed(trainer: Trainer, steps: int) -> Feed:
        block = BlockRows.of(trainer.data, steps)
        device = trainer.runtime.device
        batches = [block[index].to(device) for index in range(block.period)]
        return Feed(None, cycle(batches), block.period)

    return _measured(spec, job, feed)


@contextmanager
def warm_training(
    job: TrainJob, measure: BenchmarkSettings, feed: FeedOf
) -> Iterator[WarmTraining]:
    """Context manager that joins the other ranks, if any, assembles the training run of
    `job` and runs its warm-up steps."""
    runtime, group = set_up(job.settings.runtime), None
    if runtime.ranks.world_size > 1:
        group = ProcessGroup.join(job.settings.train.distributed, runtime)
    compile_clock.listen()
    trainer = assemble(job, runtime, group)
    trainer.model.train()
    yield WarmTraining.up(trainer, partial(feed, trainer), measure)
    if group:
        group.leave()


def _measured(
    spec: TrialSpec, job: TrainJob, feed: FeedOf, below: Baseline | None = None
) -> dict[str, Any]:
    pairs: list[InterleavedPair] = []
    with warm_training(job, spec.measure, feed) as warm:
        if below is None:
            windows = warm.windows()
        else:
            pairs = interleave(warm, below)
            windows = [pair.window for pair in pairs]
            below.end()  # the baseline must not run while phases are timed
        trainer, batches = warm.driver.trainer, warm.feed.batches
        few = max(2, min(PHASE_STEPS, int(PHASE_SECONDS / warm.step_s)))
        host_ms = launch_ms(trainer, batches, few)
        phases = phase_ms(trainer, batches, few)
    busy_pct = [found for found in warm.gpu_util_pct if found is not None]
    runtime = trainer.runtime
    peaks = memory(runtime)
    return {
        **_rates(windows),
        **_compared(pairs),
        **phases,
        "host_ms": host_ms,
        "peak_memory_gib": peaks["peak_allocated_gib"],
        "reserved_memory_gib": peaks["peak_reserved_gib"],
        "device_memory_gib": (runtime.device_memory_bytes or total_memory_bytes())
        / 2**30,
        **_resolved_parameters(trainer, warm.feed),
        "tflops_per_s": efficiency(trainer, windows)["tflops_per_s"],
        "gpu_util_pct": sum(busy_pct) / len(busy_pct) if busy_pct else None,
        "first_step_s": warm.first_step_s,
        "compile_s": compile_clock.seconds,
        "recompiles": compile_clock.recompiles,
        "note": _note(trainer, windows, pairs),
    }


def _compared(pairs: list[InterleavedPair]) -> dict[str, Any]:
    """Return the metrics that compare a trial with its baseline, if there is one."""
    if not pairs:
        return {}
    ratios = [pair.ratio for pair in pairs]
    return {
        "times_below": median(ratios),
        "times_below_spread_pct": middle_half_pct(ratios),
        "below_window_samples_per_s": [rate(pair.baseline) for pair in pairs],
        "turns_times_below": ratios,
    }


def _rates(windows: list[Window]) -> dict[str, Any]:
    """Return the metrics of the median window, and the p90 of all step times."""
    median_window = middle(windows)
    figures = Rates.over([median_window])
    return {
        "samples_per_s": figures.samples_per_s,
        "samples_per_s_spread_pct": spread_pct(windows) if len(windows) > 1 else None,
        "window_samples_per_s": [rate(w) for w in windows],
        "tokens_per_s": figures.tokens_per_s,
        "padding_pct": figures.padding_pct,
        "io_ms": 1000 * median_window.wait_s / median_window.steps,
        "total_ms": 1000 * median_window.wall_s / median_window.steps,
        "total_ms_p90": Rates.over(windows).step_ms_p90,
    }


def _resolved_parameters(trainer: Trainer, feed: Feed) -> dict[str, Any]:
    """Return the parameters with every `auto` replaced by its resolved value."""
    workers = feed.loader.num_workers if feed.loader else 0
    own = {"num_workers": workers, "block_steps": feed.period}
    return resolved_parameters(trainer) | own


def _note(trainer: Trainer, windows: list[Window], pairs: list[InterleavedPair]) -> str:
    notes = list(trainer.resolved.notes)
    ratios = [pair.ratio for pair in pairs]
    spread = middle_half_pct(ratios) if pairs else spread_pct(windows)
    if spread > SPREAD_LIMIT_PCT:
        what = "ratios in the middle half" if pairs else "windows"
        notes.append(f"{what} differ by {spread:.0f} %")
    if not all(one.clean for one in pairs or windows):
        notes.append("something was compiled in every window")
    if trainer.resolved.cuda_graphs:
        notes.append("phases were timed without CUDA graphs")
    return "; ".join(notes)
