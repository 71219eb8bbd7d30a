"""Where training runs: in this process, or in one process a device."""

from __future__ import annotations

from flatout.engine.assemble import TrainJob
from flatout.engine.loop import TrainResult, train
from flatout.engine.runtime import set_up


def run_training(job: TrainJob) -> TrainResult:
    """Train `job` and give back what the main rank gives."""
    return train(job, set_up(job.settings.runtime))
