"""A trial's own process: `python -m flatout.engine.bench.trial FOLDER`.

Reads FOLDER/spec.json and leaves FOLDER/result.json. Tracebacks go to its output,
which the parent keeps as FOLDER/log.txt. By hand it is started by `rerun`, which knows
the module and the ranks of each kind.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flatout.engine.bench.trial_spec import TrialSpec
from flatout.engine.environment import current_ranks
from flatout.engine.garbage import collect_rarely

if TYPE_CHECKING:
    from flatout.engine.job import TrainJob

Figures = dict[str, Any]
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory")


Run = Callable[[TrialSpec, Callable[[], "TrainJob"], Path], Figures]
"""(spec, function that opens the job, folder) -> figures."""


def serve(folder: Path, run: Run) -> int:
    """Answer the spec in `folder` by `run`; the exit status."""
    die_with_parent()
    collect_rarely()
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    stored = json.loads((folder / "spec.json").read_text())
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
        _write(folder, {"status": status, "note": note, "figures": figures})
    # With a status other than 0 the launcher ends the ranks that wait for this one.
    return 1 if status != "ok" and ranks.world_size > 1 else 0


def _open(stored: Mapping[str, Any], spec: TrialSpec, folder: Path) -> TrainJob:
    from flatout.engine.jobs.job_files import JobFiles

    return JobFiles(**stored).open(spec.settings, folder)


def _status(error: Exception) -> str:
    text = str(error).lower()
    full = isinstance(error, MemoryError) or any(t in text for t in OUT_OF_MEMORY)
    return "oom" if full else "error"


def _one_line(error: Exception) -> str:
    text = str(error).strip().split("\n")[0]
    if type(error).__name__ in ("SettingsError", "ModelError"):
        return text
    return f"{type(error).__name__}: {text}"


def _write(folder: Path, answer: Mapping[str, Any]) -> None:
    """Whole or absent: a trial killed here has no result."""
    part = folder / f"result.json.{os.getpid()}"
    part.write_text(json.dumps(answer, indent=1))
    part.replace(folder / "result.json")


def die_with_parent(parent: int | None = None) -> None:
    """End when the sweep was killed so hard that it could not end its trials.
    `parent`: its process id, where it may have died before this is called."""
    parent = parent or os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def run(spec: TrialSpec, open_job: Callable[[], TrainJob], folder: Path) -> Figures:
    from flatout.engine.bench import measure, memory_probe, probes, profile

    kinds: dict[str, Callable[[TrialSpec, TrainJob, Path], Figures]] = {
        "end_to_end": measure.end_to_end,
        "compute": measure.compute,
        "loader": probes.loader,
        "memory": memory_probe.memory,
        "device": probes.device,
        "profile": profile.profile,
    }
    return kinds[spec.kind](spec, open_job(), folder)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("folder", type=Path, help="holds spec.json")
    return serve(parser.parse_args().folder, run)


if __name__ == "__main__":
    raise SystemExit(main())
