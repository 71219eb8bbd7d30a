"""A gate for continuous integration: is training as fast and as good as it was?

A few short trainings, which differ in the seed only, are compared with those of a file
in git. The best of them counts: other programs make a training slower, never faster.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import Field, PositiveFloat, PositiveInt, TypeAdapter, ValidationError

from flatout.engine.guard.differences import TrackedRun, differences
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.driver import look_at_driver
from flatout.engine.parameters.common import by_path
from flatout.engine.train.recording.report import LogPoint, TrainReport
from flatout.engine.train.recording.summary import versions
from flatout.engine.train.setup.job import TrainJob

RUNS = 3
WINDOWS = 10
LEAST_RATE, MOST_RATE = 0.08, 0.4
"""Tolerated loss of rate: twice the spread between the trainings of one gate, at least
the first; beyond the second the machine is too noisy to compare rates."""
LEAST_LOSS = 0.01
"""Least tolerated rise of the validation loss, as a share of it."""
MACHINE_TAGS = ("device", "world_size")
UNCOMPARED = ("runtime.seed", "train.resume")


class GateError(ValueError):
    """A baseline that cannot be compared; the text has the remedy."""


@dataclass(frozen=True)
class Measured:
    """What the trainings of one gate gave."""

    steps: PositiveInt
    rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    """Samples/s of each training: in its best window, and on a CPU in the time in which
    it had a core."""
    losses: Annotated[list[float], Field(min_length=1)]
    """Validation loss at the end of each."""
    params: dict[str, str]
    tags: dict[str, str]

    @property
    def run(self) -> TrackedRun:
        return TrackedRun("", "", self.params, self.tags)

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Raises GateError without a usable file."""
        try:
            return TypeAdapter(cls).validate_json(path.read_bytes())
        except FileNotFoundError:
            why = "is not there"
        except OSError as error:
            why = f"cannot be read ({error})"
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the file"
            why = f"cannot be read ({place}: {first['msg']})"
        raise GateError(
            f"--baseline: {path} {why}: make it on this machine with --write, and "
            "commit it"
        )

    def write(self, path: Path) -> None:
        """Raises GateError if the file cannot be written."""
        text = json.dumps(asdict(self), indent=1, sort_keys=True)
        with _writing(path):
            path.write_text(f"{text}\n", encoding="utf-8")


def prepare_file(path: Path) -> None:
    """Create the folder of a baseline, before the trainings. Raises GateError if the
    file could not be written."""
    with _writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not path.exists()
        path.open("a").close()
        if is_new:
            path.unlink()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise GateError(
            f"--baseline: {path} cannot be written ({error}): name another file"
        ) from error


def measure(job: TrainJob, steps: int) -> Measured:
    """Train `RUNS` times `steps` steps, in a temporary folder."""
    found = [_trained(job, steps, number) for number in range(RUNS)]
    reports = [report for report, _ in found]
    rates = [_rate(report, history) for report, history in found]
    groups = job.settings.model_dump(mode="json", include={"runtime", "model", "train"})
    params = {n: str(v) for n, v in by_path(groups) if n not in UNCOMPARED}
    driver = look_at_driver()
    packages = {**versions(), "driver": driver.version if driver else "none"}
    report = reports[0]
    tags = {f"version.{name}": found for name, found in packages.items()} | {
        "device": report.device,
        "world_size": str(report.world_size),
        "token_key": job.data_key,
    }
    losses = [one.validation_loss for one in reports]
    return Measured(steps, rates, losses, params, tags)


def _trained(
    job: TrainJob, steps: int, number: int
) -> tuple[TrainReport, list[LogPoint]]:
    with tempfile.TemporaryDirectory(prefix="flatout-gate-") as name:
        train = job.settings.train.model_copy(
            update={
                "max_steps": steps,
                "log_every": max(1, steps // WINDOWS),
                "evaluate_every": None,
                "error_analysis_every": None,
                "resume": "never",
            }
        )
        seed = job.settings.runtime.seed + number
        runtime = job.settings.runtime.model_copy(update={"seed": seed})
        settings = job.settings.model_copy(update={"train": train, "runtime": runtime})
        job = replace(job, settings=settings, metrics_file=Path(name, "points.jsonl"))
        result = run_job(job.apart(Path(name, "run")))
        return result.report, result.history


def _rate(report: TrainReport, history: Sequence[LogPoint]) -> float:
    rates = [p.samples_per_s for p in history if not math.isnan(p.samples_per_s)]
    if not rates:
        raise GateError("--steps: too few for a window after the warm-up; take 100")
    if report.cpu_probe_ms is None or report.cpu_wait_pct is None:  # on a GPU
        return max(rates)
    return report.samples_per_s / max(0.1, 1 - report.cpu_wait_pct / 100)


def check_comparable(now: Measured, before: Measured) -> None:
    """Raise GateError for a baseline of another machine, data or number of steps."""
    names = (*MACHINE_TAGS, "token_key")
    pairs = [(n, before.tags.get(n), now.tags.get(n)) for n in names]
    pairs.insert(0, ("--steps", str(before.steps), str(now.steps)))
    other = [f"{name}: {a} -> {b}" for name, a, b in pairs if a != b]
    if other:
        raise GateError(
            f"the baseline was not measured like this run (then -> now): "
            f"{'; '.join(other)}. Set these back, or make a baseline here with --write"
        )


def tolerated(now: Measured, before: Measured) -> float:
    """Return the share of the baseline's rate that may be lost to noise."""
    spread = max(1 - min(one.rates) / max(one.rates) for one in (now, before))
    return max(LEAST_RATE, 2 * spread)


def faults(now: Measured, before: Measured) -> list[str]:
    """Return what is worse than the baseline beyond its noise, and what differs."""
    found = []
    best, usual = max(now.rates), max(before.rates)
    limit = 1 - tolerated(now, before)
    if limit >= 1 - MOST_RATE and not best >= limit * usual:
        found.append(
            f"{best:.0f} samples/s, {100 * best / usual:.0f} % of the baseline's "
            f"{usual:.0f}; at least {100 * limit:.0f} % are expected"
        )
    loss, worst = median(now.losses), max(before.losses)
    allowed = worst + max(LEAST_LOSS * abs(worst), worst - min(before.losses))
    if not loss <= allowed:
        found.append(
            f"a validation loss of {loss:.4f}, at most {allowed:.4f} is expected from "
            f"the baseline's {median(before.losses):.4f}"
        )
    if found:
        differs = [str(one) for one in differences(before.run, now.run)]
        found.append(f"what differs: {'; '.join(differs) or 'no setting or package'}")
    return found
