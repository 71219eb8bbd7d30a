"""Entry point of a trial: `python -m flatout.engine.benchmark.trials.trial FOLDER`. It
reads FOLDER/spec.json and writes FOLDER/result.json. The parent process stores
tracebacks as FOLDER/log.txt."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engine.benchmark.trials.trial_spec import KINDS, TrialSpec
from flatout.engine.files.atomic_write import write_text
from flatout.engine.machine.environment import current_ranks
from flatout.engine.machine.garbage import collect_rarely
from flatout.engine.machine.signals import die_with_parent
from flatout.engine.parameters.faults import first_line

if TYPE_CHECKING:
    from flatout.engine.train.setup.job import TrainJob

Figures = dict[str, Any]
TRAINING = "training"
"""Subfolder of a trial's folder for the checkpoints and models of a whole run."""

Run = Callable[[TrialSpec, Callable[[], "TrainJob"], Path], Figures]
"""A function that receives a spec, a function that opens the job, and the trial's
folder. It returns the trial's metrics by name."""


def serve(folder: Path, run: Run) -> int:
    """Run the spec in `folder` with `run`, write the result and return an exit code."""
    stored = json.loads((folder / "spec.json").read_text())
    die_with_parent()
    collect_rarely()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    status, note, figures = "ok", "", {}
    try:
        spec = TrialSpec.from_json(stored["spec"])
        figures = run(spec, lambda: _open(stored["job"], spec, folder), folder)
        note = figures.pop("note", "")
    except Exception as error:
        traceback.print_exc()
        status, note = _status(error), _one_line(error)
    ranks = current_ranks()
    if ranks.is_main or status != "ok":
        answer = {"status": status, "note": note, "figures": figures}
        write_text(folder / "result.json", json.dumps(answer, indent=1))
    # If the exit code is not 0, the launcher ends the ranks that wait for this one.
    return 1 if status != "ok" and ranks.world_size > 1 else 0


def _open(stored: Mapping[str, Any], spec: TrialSpec, folder: Path) -> TrainJob:
    from flatout.engine.launch.job_files import JobFiles

    return JobFiles(**stored).open(spec.settings, folder)


def _status(error: Exception) -> str:
    """Return the error's `status` attribute if it has one, else `oom` or `error`."""
    from flatout.engine.models.model import is_out_of_memory

    return getattr(error, "status", "oom" if is_out_of_memory(error) else "error")


def _one_line(error: Exception) -> str:
    text = first_line(error)
    if type(error).__name__ in ("SettingsError", "ModelError"):
        return text
    return f"{type(error).__name__}: {text}"


def run(spec: TrialSpec, open_job: Callable[[], TrainJob], folder: Path) -> Figures:
    module, name = KINDS[spec.kind].split(":")
    measure = getattr(import_module(f"flatout.engine.benchmark.{module}"), name)
    found: Figures = measure(spec, open_job(), folder)
    return found


def train_whole(spec: TrialSpec, job: TrainJob, folder: Path) -> Figures:
    """Train like the `train` pipeline and return the report. Training continues from
    the newest checkpoint in the folder, if there is one."""
    from flatout.engine.launch.launch import collect

    return collect(job.in_folder(folder / TRAINING)).report.as_dict()


if __name__ == "__main__":
    raise SystemExit(serve(Path(sys.argv[1]), run))
