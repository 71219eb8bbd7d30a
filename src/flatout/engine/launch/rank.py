"""Run one rank with `python -m flatout.engine.launch.rank FOLDER [--alone]`.

FOLDER/spec.json describes the training run and names the function to call. When the
function trains, the main rank writes the result to the job's folder. Errors are written
to the file that torchelastic specifies. With `--alone`, the folder belongs to this
process and is removed at the end.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import shutil
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from flatout.engine.files import atomic_write
from flatout.engine.machine import environment
from flatout.engine.machine.garbage import collect_rarely
from flatout.engine.machine.watchdog import FINISHED, heartbeat
from flatout.engine.parameters import Settings, SettingsError, parse_settings

if TYPE_CHECKING:
    from flatout.engine.machine.runtime import Runtime
    from flatout.engine.train.process_group import ProcessGroup
    from flatout.engine.train.setup.job import TrainJob

INTERRUPTED = "interrupted.json"
SMALLER = "smaller.json"
"""The file with the settings for the next attempt after an out-of-memory error."""

ALONE = "--alone"
TRAINING = "flatout.engine.launch.rank:train_rank"


def main(folder: Path) -> None:
    """Run one rank of the job described by `folder`/spec.json. An error is also written
    to the launcher's error file."""
    spec = json.loads((folder / "spec.json").read_text(encoding="utf-8"))
    settings = parse_settings(spec["settings"])
    rank = environment.current_ranks().rank
    logging.basicConfig(
        level=logging.INFO if rank == 0 else logging.WARNING,
        format="%(message)s" if rank == 0 else f"[rank {rank}] %(message)s",
        stream=sys.stderr,
    )
    faulthandler.enable()  # print stacks if a kernel crashes
    heartbeat.start(folder / "beats", rank)
    environment.apply(settings.runtime)  # before torch is imported
    collect_rarely()
    try:
        _run(spec, settings, folder)
    except Exception as error:
        # The launcher shows the error of the rank that failed first. Ranks that only
        # lost their connection to it would show tracebacks before.
        if leave_error(error):
            raise SystemExit(1) from None
        raise
    heartbeat.enter(FINISHED)


def leave_error(error: Exception) -> bool:
    """Write `error` to the launcher's error file, in PyTorch's format, and atomically,
    because the launcher may kill this rank at any time. Return False if there is no
    launcher that reads the file."""
    named = environment.error_file()
    if named is None:
        return False
    message = {
        "message": f"{type(error).__name__}: {error}",
        "extraInfo": {
            "py_callstack": traceback.format_exc(),
            "timestamp": str(int(time.time())),
            "time_s": time.time(),
        },
    }
    atomic_write.write_text(Path(named), json.dumps({"message": message}))
    return True


def _run(spec: dict[str, Any], settings: Settings, folder: Path) -> None:
    from flatout.engine.launch.job_files import JobFiles
    from flatout.engine.machine.runtime import set_up
    from flatout.engine.train.process_group import ProcessGroup

    runtime = set_up(settings.runtime)
    check_world_size(runtime.ranks.world_size, spec["world_size"])
    group = ProcessGroup.join(settings.train.distributed, runtime)
    job = JobFiles(**spec["job"]).open(settings, Path(spec["work_folder"]))
    job = replace(job, metrics_file=Path(spec["metrics_file"]))
    resolve_name(spec["work"])(job, runtime, group, folder)
    group.leave()


def check_world_size(found: int, wanted: int) -> None:
    if found != wanted:
        raise SettingsError(
            f"the launcher started {found} ranks, train.distributed expects {wanted}"
        )


def train_rank(
    job: TrainJob, runtime: Runtime, group: ProcessGroup, folder: Path
) -> None:
    from flatout.engine.launch.results import write_result
    from flatout.engine.machine.signals import Interrupted
    from flatout.engine.train.keeping.oom import OutOfMemory
    from flatout.engine.train.loop import train

    try:
        result = train(job, runtime, group)
    except Interrupted as stop:
        if runtime.ranks.local_rank == 0:
            text = json.dumps({"signum": stop.signum, "message": stop.message})
            (folder / INTERRUPTED).write_text(text, encoding="utf-8")
    except OutOfMemory as error:
        (folder / SMALLER).write_text(json.dumps(error.to_try), encoding="utf-8")
        raise
    else:
        if runtime.ranks.is_main:
            write_result(job, result)


if __name__ == "__main__":
    alone = ALONE in sys.argv[2:]
    try:
        main(Path(sys.argv[1]))
    finally:
        if alone:
            shutil.rmtree(sys.argv[1], ignore_errors=True)
