"""flatout beside the Hugging Face Trainer: same model, rows, seed, epochs, judge.

Every contender trains the whole of `train.epochs`; its clock runs from the first
batch, cold start included, and stands still during evaluations, which are the same code
for all. The rate leaves out the same first steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flatout.engine.batches.loader import StepLoader
from flatout.engine.benchmark.measuring.driver import Driver
from flatout.engine.benchmark.peers.clock import PeerClock
from flatout.engine.benchmark.peers.trainer import train_with_trainer
from flatout.engine.benchmark.trials.trial_spec import TrialSpec
from flatout.engine.machine.runtime import Runtime, set_up
from flatout.engine.train.loop import evaluate_split
from flatout.engine.train.recording.timing import compile_clock
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.job import TrainJob


def contend(spec: TrialSpec, job: TrainJob, folder: Path) -> dict[str, Any]:
    """Train one contender; the option `contender` says which."""
    runtime = set_up(job.settings.runtime)
    compile_clock.listen()
    timing = dict(spec.options)
    name = timing.pop("contender")
    if name == "flatout":
        figures = train_with_flatout(job, runtime, timing)
    else:
        figures = train_with_trainer(job, runtime, name, folder, timing)
    return {
        **figures,
        "compile_s": compile_clock.seconds,
        "recompiles": compile_clock.recompiles,
        "precision": runtime.precision,
        "device": runtime.device_name,
    }


def train_with_flatout(
    job: TrainJob, runtime: Runtime, timing: Mapping[str, Any]
) -> dict[str, Any]:
    """The steps, loader and log points of a training, under the peers' clock, whose
    rules `timing` may change."""
    trainer = assemble(job, runtime)
    trainer.model.train()
    total = trainer.total_steps
    clock = PeerClock(
        runtime, total, lambda: evaluate_split(trainer, job.validation), **timing
    )
    loader = StepLoader(trainer.data, job.settings.train.loader, runtime, 0, total)
    driver = Driver(trainer)
    clock.start()
    for batch in loader:
        driver.step(batch, loader.wait_s)
        if clock.step_done(batch.num_samples):
            break
    resolved = trainer.resolved
    return {
        **clock.figures(),
        "strategy": resolved.strategy,
        "token_budget": resolved.token_budget,
        "attention": resolved.attention,
        "compile": resolved.compile,
        "cuda_graphs": resolved.cuda_graphs,
        "num_workers": loader.num_workers,
        "note": "; ".join(resolved.notes),
    }
