"""The fault drill: `python -m tests.tools.drill --kills 50 --seed 0`.

A small training run is killed or stopped, has its disk filled up, or loses its newest
checkpoint, at random moments. Each time the same command starts it again. When it has
finished, its weights, losses and gradient norms must be equal to those of an
undisturbed run bit for bit, and each point must be in the metrics file exactly once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from flatout.engine.checkpoints.checkpoint_folder import RESULT, step_folders
from flatout.engine.machine.watchdog import read_beats
from tests.forks import Forked
from tests.tools.victim import BEATS, OUTCOME, TEMPORARY, Victim

logger = logging.getLogger(__name__)

FAULTS = ("kill", "kill", "kill", "kill", "term", "corrupt", "fill", "stop")
"""Chosen with equal probability, so half of all faults are plain kills."""
LONGEST_ATTEMPT_S = 120.0
LONGEST_FAULT_FREE_S = 0.8
"""A fault occurs at a random moment within this time after the first step."""
FULL_DISK_BYTES = 4_000
"""Too small for the tensors of a checkpoint, but enough for a few metrics."""


class DrillError(AssertionError):
    """A training run did not end like the undisturbed one."""


@dataclass
class Drill:
    """State and statistics of a drill."""

    folder: Path
    victim: Victim
    seed: int
    preloaded: bool = False
    """Fork from this process, which has imported everything. Fast, for tests."""
    faults: Counter[str] = field(default_factory=Counter)
    resumable: int = 0
    """Number of starts that found a checkpoint, and should have resumed from it."""
    resumed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.reference = self._undisturbed()

    def run(self, wanted_faults: int) -> None:
        """Run complete training runs until this many faults have occurred. Raises
        DrillError if a result differs."""
        round_number = 0
        while sum(self.faults.values()) < wanted_faults:
            round_number += 1
            folder = self.folder / f"round-{round_number}"
            self.victim.start_in(folder)
            self._one_training(folder, wanted_faults)
            self._compare(folder)

    def _undisturbed(self) -> Path:
        folder = self.folder / "undisturbed"
        self.victim.start_in(folder)
        attempt = Attempt.start(folder, self.preloaded)
        attempt.finish()
        return folder

    def _one_training(self, folder: Path, wanted_faults: int) -> None:
        while not (folder / OUTCOME).exists():
            remaining = wanted_faults - sum(self.faults.values())
            fault = self.random.choice(self._faults()) if remaining > 0 else "none"
            limit = FULL_DISK_BYTES if fault == "fill" else None
            replace(self.victim, file_limit_bytes=limit).start_in(folder)
            self._attempt(folder, fault)

    def _faults(self) -> list[str]:
        """Return the possible faults. With several ranks, a full disk would already
        prevent the first step, because ranks exchange files."""
        alone = self.victim.world_size == 1
        return [fault for fault in FAULTS if alone or fault != "fill"]

    def _attempt(self, folder: Path, fault: str) -> None:
        run = folder / "run"
        resumable = bool(step_folders(run)) and not (run / RESULT).exists()
        attempt = Attempt.start(folder, self.preloaded)
        try:
            if fault == "none" or not attempt.wait_for_step():
                if fault == "fill":  # an error is correct if the last model did not fit
                    attempt.wait()
                else:
                    attempt.finish()
                return
            time.sleep(self.random.uniform(0, LONGEST_FAULT_FREE_S))
            if attempt.ended:
                return
            self.faults[fault] += 1
            self._do(fault, attempt, folder)
        finally:
            attempt.kill()
        self._check_resume(resumable, attempt)

    def _check_resume(self, resumable: bool, attempt: Attempt) -> None:
        """Raise DrillError if a run with a checkpoint did not resume from it."""
        resumed = "resuming from step" in attempt.output
        self.resumable += resumable
        self.resumed += resumed
        if resumable != resumed:
            told = "did not resume" if resumable else "nothing to resume from"
            raise DrillError(f"{told}\n{attempt.output}")

    def _do(self, fault: str, attempt: Attempt, folder: Path) -> None:
        logger.info("%s at step %s", fault, attempt.step)
        if fault == "term":
            attempt.send(signal.SIGTERM)
            status = attempt.wait()
            if status not in (128 + signal.SIGTERM, 0):
                raise DrillError(f"SIGTERM: exit code {status}\n{attempt.output}")
        elif fault == "stop":
            attempt.send(signal.SIGSTOP)
            time.sleep(self.random.uniform(0.1, 1.0))
            attempt.send(signal.SIGCONT)
            time.sleep(0.2)
        attempt.kill()
        if fault == "corrupt":
            self._corrupt(folder / "run")

    def _corrupt(self, folder: Path) -> None:
        """Flip a bit of a random file in the newest of at least two checkpoints."""
        checkpoints = step_folders(folder)
        if len(checkpoints) < 2:
            return
        path = self.random.choice(sorted(checkpoints[0].iterdir()))
        data = bytearray(path.read_bytes())
        data[self.random.randrange(len(data))] ^= 0x10
        path.write_bytes(data)

    def _compare(self, folder: Path) -> None:
        expected = json.loads((self.reference / OUTCOME).read_text())
        found = json.loads((folder / OUTCOME).read_text())
        for name, value in expected.items():
            if found[name] != value:
                raise DrillError(
                    f"{folder}: {name} differs: {_first_difference(found[name], value)}"
                )
        if (a := _points(folder)) != (b := _points(self.reference)):
            different = set(a) ^ set(b) or Counter(a) - Counter(b)
            raise DrillError(f"{folder}: points differ or repeat: {different}")

    def report(self) -> str:
        counts = ", ".join(f"{n} {name}" for name, n in self.faults.most_common())
        return (
            f"{sum(self.faults.values())} faults ({counts}) in "
            f"{len(list(self.folder.glob('round-*')))} trainings of "
            f"{self.victim.max_steps} steps on {self.victim.world_size} rank(s); "
            f"{self.resumed} resumes of {self.resumable}; weights, losses and gradient "
            "norms equal bit for bit, every point written once"
        )


@dataclass
class Attempt:
    """One start of the command."""

    folder: Path
    process: subprocess.Popen[bytes] | Forked
    begin_s: float
    log: Path

    @classmethod
    def start(cls, folder: Path, preloaded: bool) -> Attempt:
        for beats in (folder / BEATS, folder / TEMPORARY):
            shutil.rmtree(beats, ignore_errors=True)
        log = folder / f"log-{len(list(folder.glob('log-*')))}.txt"
        begin_s = time.monotonic()
        with log.open("wb") as file:
            process = (Forked if preloaded else subprocess.Popen)(
                [sys.executable, "-m", "tests.tools.victim", str(folder)],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=dict(os.environ),
            )
        return cls(folder, process, begin_s, log)

    @property
    def output(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def age_s(self) -> float:
        return time.monotonic() - self.begin_s

    @property
    def step(self) -> int:
        """Return the step of rank 0: this command, or a process that it has started."""
        places = [self.folder / BEATS, *self.folder.glob(f"{TEMPORARY}/*/{BEATS}")]
        beats = [beat for place in places for beat in read_beats(place)]
        return beats[0].step if beats else 0

    def wait_for_step(self) -> bool:
        """Wait for the first new step. Return False if the run ends before."""
        while self.age_s < LONGEST_ATTEMPT_S:
            if self.ended:
                return False
            if self.step > 0:
                return True
            time.sleep(0.002)
        raise DrillError(f"no step within {LONGEST_ATTEMPT_S:.0f} s\n{self.output}")

    def finish(self) -> None:
        """Wait for the end. Raises DrillError if the run fails."""
        status = self.wait()
        if status != 0:
            raise DrillError(f"exit code {status}\n{self.output}")

    def wait(self) -> int:
        """Return the exit code. Raises DrillError if the run does not end in time."""
        while not self.ended:
            if self.age_s > LONGEST_ATTEMPT_S:
                self.kill()
                raise DrillError(f"did not end\n{self.output}")
            time.sleep(0.01)
        return int(self.process.poll() or 0)

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def send(self, signum: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signum)

    def kill(self) -> None:
        """Kill the command and all processes that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        while not self.ended:
            time.sleep(0.005)


def _points(folder: Path) -> list[tuple[int, str, str]]:
    """Return (step, metric, value) of all points in the file except timings."""
    found = []
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        point = json.loads(line)
        for name, value in point["metrics"].items():
            if "per_second" not in name and "wait" not in name:
                found.append((point["step"], name, float(value).hex()))
    return sorted(found)


def _first_difference(found: Any, expected: Any) -> str:
    if isinstance(found, list):
        pairs = zip(found, expected, strict=False)
        found, expected = next((p for p in pairs if p[0] != p[1]), (found, expected))
    return f"{found} instead of {expected}"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=50, help="number of faults")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400, help="steps per run")
    parser.add_argument("--ranks", type=int, default=1, help="number of ranks")
    parser.add_argument(
        "--preloaded",
        action="store_true",
        help="fork each start from a process that has imported all: ten times quicker",
    )
    parser.add_argument("--folder", type=Path, help="default: a temporary folder")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory(prefix="flatout-drill-") as temporary:
        folder = options.folder or Path(temporary)
        victim = Victim(max_steps=options.steps, world_size=options.ranks)
        drill = Drill(folder, victim, options.seed, options.preloaded)
        drill.run(options.kills)
        logger.info(drill.report())


if __name__ == "__main__":
    main()
