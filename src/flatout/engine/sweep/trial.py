"""A trial's own process: `python -m flatout.engine.sweep.trial FOLDER`.

Trains whole, as the train pipeline does, on one device. One that was killed goes on
from its newest checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engine.bench.trial import serve
from flatout.engine.bench.trial_spec import TrialSpec

if TYPE_CHECKING:
    from flatout.engine.job import TrainJob

TRAINING = "training"
"""Checkpoints and models, inside the trial's folder."""


def run(
    spec: TrialSpec, open_job: Callable[[], TrainJob], folder: Path
) -> dict[str, Any]:
    """The report of a whole training."""
    from flatout.engine.jobs.launch import collect

    result = collect(replace(open_job(), work_folder=folder / TRAINING))
    return result.report.as_dict()


if __name__ == "__main__":
    raise SystemExit(serve(Path(sys.argv[1]), run))
