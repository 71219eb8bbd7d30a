"""Three machines work on one queue, two of them are killed: is anything lost?

    python -m tests.tools.queue_drill                       # a journal file
    python -m tests.tools.queue_drill --storage=postgresql  # a server of its own
    python -m tests.tools.queue_drill --storage=mysql

Machines are processes that do not know each other's. Trainings are those of
tests/engine/sweep_trial.py. The servers are Debian's packages `postgresql` and
`mariadb-server`, the drivers those of flatout's extras.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import optuna

from flatout.engine.benchmark.trials import processes as trials
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.parameters import Settings, parse_settings
from flatout.engine.sweep import queue
from flatout.engine.sweep.storage import open_storage
from flatout.engine.sweep.sweep import run_sweep
from tests.conftest import PROJECT
from tests.engine import benches

RATE = "train.learning_rate"
CREATE = """
    CREATE DATABASE sweeps;
    CREATE USER ann@127.0.0.1 IDENTIFIED BY 'secret';
    GRANT ALL ON sweeps.* TO ann@127.0.0.1;
"""


def drill(place: str, folder: Path, combinations: int, seed: int) -> dict[str, object]:
    """Kill two of three machines at moments that `seed` chooses; what came of it."""
    draw = random.Random(seed)
    files, settings = benches.job_files(folder), _settings(place, folder, combinations)
    begin_s = time.time()
    moments, ran = [], folder / "sweep" / "ran"
    # The last trainings wait, or a quick machine has finished before it is killed.
    held = ran.with_name("hold")
    held.parent.mkdir(parents=True)
    held.write_text(f"{combinations - 3}")
    pids = [_machine(settings, files, number) for number in range(3)]
    for pid, begun in zip(pids, (combinations // 4, combinations // 2), strict=False):
        _wait_for_lines(ran, draw.randint(1, begun))
        time.sleep(draw.uniform(0, 2))
        os.kill(pid, signal.SIGKILL)
        moments.append(time.time() - begin_s)
    held.unlink()
    statuses = [os.waitpid(pid, 0)[1] for pid in pids]
    study = optuna.load_study(study_name="sweep", storage=open_storage(place))
    done = [t for t in study.trials if t.state == optuna.trial.TrialState.COMPLETE]
    finished = Counter(t.params[RATE] for t in done)
    asked = settings.sweep.grid[RATE]
    return {
        "killed_at_s": [round(moment, 1) for moment in moments],
        "statuses": statuses,
        "combinations": len(asked),
        "finished_once": sum(finished[rate] == 1 for rate in asked),
        "finished_twice": sum(count > 1 for count in finished.values()),
        "given_back": len(study.trials) - len(done),
        "between_trials_s": _between_s(done),
        "took_s": round(time.time() - begin_s, 1),
    }


def _wait_for_lines(file: Path, count: int) -> None:
    """Of trainings that have begun, on all machines."""
    while not file.exists() or len(file.read_text().splitlines()) < count:
        time.sleep(0.05)


def _between_s(done: list[optuna.trial.FrozenTrial]) -> float:
    """Median of a machine from the end of a trial to the begin of the next."""
    gaps = []
    for machine in {t.user_attrs["machine"]["boot"] for t in done}:
        own = [t for t in done if t.user_attrs["machine"]["boot"] == machine]
        own.sort(key=lambda t: t.datetime_start)
        gaps += [
            (later.datetime_start - earlier.datetime_complete).total_seconds()
            for earlier, later in pairwise(own)
        ]
    return round(sorted(gaps)[len(gaps) // 2], 2) if gaps else 0.0


def _settings(place: str, folder: Path, combinations: int) -> Settings:
    sweep = {
        "folder": str(folder / "sweep"),
        "storage": place,
        "grid": {RATE: [0.001 * (1 + number) for number in range(combinations)]},
        "heartbeat_s": 1.0,
    }
    return parse_settings(
        {**benches.settings().model_dump(mode="json"), "sweep": sweep}
    )


def _machine(settings: Settings, files: JobFiles, number: int) -> int:
    """A process that takes the others for machines far away."""
    pid = os.fork()
    if pid:
        return pid
    queue.process_space = lambda: f"machine {number}"
    trials.MODULE = "tests.engine.sweep_trial"
    os.environ |= {"PYTHONPATH": f"{PROJECT}:{PROJECT}/src", "CUDA_VISIBLE_DEVICES": ""}
    try:
        run_sweep(settings, files)
    except BaseException as error:
        traceback.print_exception(error)
        os._exit(1)
    os._exit(0)


def has_server(kind: str) -> bool:
    installed = {
        "journal": True,
        "postgresql": bool(find_spec("psycopg") and _postgresql_programs()),
        "mysql": bool(find_spec("pymysql") and shutil.which("mariadb-install-db")),
    }
    return installed[kind] and (kind == "journal" or os.getuid() == 0)


def _postgresql_programs() -> list[Path]:
    return sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


@contextmanager
def postgresql(folder: Path) -> Iterator[str]:
    """URL of a server for as long as the block lasts."""
    initdb = _postgresql_programs()[-1]
    data, port = folder / "server", 20000 + os.getpid() % 20000
    data.mkdir()
    shutil.chown(data, "postgres")
    folder.chmod(0o755)
    as_user = ["runuser", "-u", "postgres", "--"]
    control = [*as_user, str(initdb.with_name("pg_ctl")), "-D", str(data), "-w"]
    _quietly([*as_user, str(initdb), "-D", str(data), "-A", "trust"])
    options = f"-F -p {port} -k /tmp -c listen_addresses=localhost"
    log = str(data / "log")
    _quietly([*control, "-o", options, "-l", log, "start"])
    try:
        yield f"postgresql+psycopg://postgres:secret@localhost:{port}/postgres"
    finally:
        _quietly([*control, "-m", "immediate", "stop"])


def _quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")


@contextmanager
def mysql(folder: Path) -> Iterator[str]:
    """URL of a MariaDB for as long as the block lasts."""
    data, port = folder / "server", 20000 + os.getpid() % 20000
    data.mkdir()
    shutil.chown(data, "mysql")
    folder.chmod(0o755)
    as_user = ["runuser", "-u", "mysql", "--"]
    place = [f"--datadir={data}", f"--socket={data}/socket"]
    installer = ["mariadb-install-db", "--no-defaults", f"--datadir={data}"]
    _quietly([*as_user, *installer, "--auth-root-authentication-method=normal"])
    options = [f"--port={port}", "--bind-address=127.0.0.1", f"--log-error={data}/log"]
    options.append("--innodb-flush-log-at-trx-commit=0")  # servers are not killed
    mariadbd = ["/usr/sbin/mariadbd", "--no-defaults", *place, *options]
    running = subprocess.Popen([*as_user, *mariadbd], cwd="/")
    client = ["mariadb", "--no-defaults", place[1], "--user=root"]
    try:
        while subprocess.call([*client, "-e", CREATE], stderr=subprocess.DEVNULL):
            time.sleep(0.2)
        yield f"mysql+pymysql://ann:secret@127.0.0.1:{port}/sweeps"
    finally:
        running.terminate()
        running.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", default="journal")
    parser.add_argument("--combinations", type=int, default=24)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp())
    with server(asked.storage, folder) as place:
        found = drill(place, folder, asked.combinations, asked.seed)
        sys.stdout.write(f"{json.dumps(found)}\n")


@contextmanager
def server(kind: str, folder: Path) -> Iterator[str]:
    if kind == "journal":
        yield str(folder / "sweep.journal")
    else:
        with {"postgresql": postgresql, "mysql": mysql}[kind](folder) as place:
            yield place


if __name__ == "__main__":
    main()
