"""A gate for continuous integration that detects slower training or worse results.

A few short runs, which differ only in their seed, are compared with a baseline file
that is committed to git. On a CPU, the speed of training is measured in the CPU time of
one thread and divided by the speed of a fixed workload that runs between the steps.
Other load on the machine slows down both, so the ratio hardly changes.
"""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import torch
from pydantic import BaseModel, Field, PositiveFloat, PositiveInt, ValidationError
from torch import nn

from flatout.engine.checkpoints.resume import differing
from flatout.engine.files.atomic_write import write_text
from flatout.engine.guard import TrackedRun, differences
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.driver import query_driver
from flatout.engine.parameters import SettingsError
from flatout.engine.parameters.common import by_path
from flatout.engine.train.loop import TrainResult
from flatout.engine.train.recording.metrics_file import read_points
from flatout.engine.train.setup.job import TrainJob

RUNS = 3
WINDOWS = 25
LEAST_RATE, MOST_RATE = 0.1, 0.25
"""The tolerated slowdown is the relative difference between the slowest and the fastest
run of a gate, but at least LEAST_RATE. If the difference exceeds MOST_RATE, the machine
is too noisy to compare throughput."""
LEAST_LOSS = 0.01
"""The smallest tolerated relative increase in the validation loss."""
COMPARABLE = ("device", "world_size", "token_key")
SPEED = "gate_speed"


class Measured(BaseModel, ser_json_inf_nan="constants"):
    """The step count, throughput, losses, settings and versions of one gate's runs."""

    steps: PositiveInt
    rates: Annotated[list[PositiveFloat], Field(min_length=1)]
    """The throughput of each run. On a GPU, it is the samples/s of the fastest window,
    and on a CPU, the number of steps in the time of one fixed workload."""
    losses: Annotated[list[float], Field(min_length=1)]
    """The validation loss at the end of each run."""
    params: dict[str, str]
    tags: dict[str, str]

    @property
    def conditions(self) -> dict[str, Any]:
        """The step count, device, number of ranks and dataset. Two measurements can be
        compared only if these are equal."""
        return {"--steps": self.steps, **{n: self.tags.get(n) for n in COMPARABLE}}

    @classmethod
    def read(cls, path: Path) -> Measured:
        """Read a baseline file. Raises SettingsError if it is missing or invalid."""
        try:
            return cls.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            cause = getattr(error, "strerror", None) or " ".join(str(error).split())
            raise SettingsError(
                f"--baseline: {path} cannot be read ({cause}): "
                "make it on this machine with --write, and commit it"
            ) from error

    def write(self, path: Path) -> None:
        write_text(path, f"{self.model_dump_json(indent=1)}\n")


class Yardstick:
    """Training callback that runs a fixed workload after each logging window. It
    returns the CPU time of all workloads as a fraction of that of all windows."""

    def __init__(self) -> None:
        with torch.random.fork_rng(devices=[]):
            parts = nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)
        self._model, self._rows = nn.Sequential(*parts), torch.ones(1024, 128)
        self._begin_s: float | None = None
        self._windows_s = self._work_s = 0.0

    def __call__(
        self, event: str, step: int, values: dict[str, Any]
    ) -> dict[str, float]:
        if event != "log":
            return {}
        end_s, begin_s = time.process_time(), self._begin_s
        for _ in range(2):
            self._model(self._rows).square().mean().backward()
        self._begin_s = time.process_time()
        if begin_s is None:  # the first window includes the warm-up
            return {}
        self._windows_s += end_s - begin_s
        self._work_s += self._begin_s - end_s
        return {SPEED: self._work_s / self._windows_s}


def measure(job: TrainJob, steps: int) -> Measured:
    """Train `job` for `steps` steps, RUNS times with different seeds, and return the
    throughput and validation loss of each run. An additional first run is not counted,
    because the first run of a process is slower than the next ones."""
    _trained(job, steps, 0)
    results, rates = zip(*(_trained(job, steps, n) for n in range(RUNS)), strict=True)
    report, driver = results[0].report, query_driver()
    groups = job.settings.model_dump(mode="json", include={"runtime", "model", "train"})
    tags = {
        "device": report.device,
        "world_size": str(report.world_size),
        "token_key": job.data_key,
        "version.driver": driver.version if driver else "none",
    }
    return Measured(
        steps=steps,
        rates=rates,
        losses=[result.report.validation_loss for result in results],
        params={name: str(value) for name, value in by_path(groups)},
        tags=tags | {f"version.{n}": v for n, v in report.versions.items()},
    )


def _trained(job: TrainJob, steps: int, number: int) -> tuple[TrainResult, float]:
    """Return the result of run `number` and its throughput."""
    every, on_cpu = max(1, steps // WINDOWS), not torch.cuda.is_available()
    changes = {
        "train.max_steps": steps,
        "train.log_every": every,
        "train.evaluate_every": None,
        "train.resume": "never",
        "train.callbacks": [f"{__name__}.{Yardstick.__name__}"],
        "runtime.seed": job.settings.runtime.seed + number,
        **({"runtime.threads": 1} if on_cpu else {}),
    }
    with tempfile.TemporaryDirectory(prefix="flatout-gate-") as name:
        points = Path(name, "points.jsonl")
        job = job.changed(changes).in_folder(Path(name, "run"))
        result = run_job(replace(job, metrics_file=points))
        found = [point["metrics"] for point in read_points(points)]
    speeds = [metrics[SPEED] for metrics in found if SPEED in metrics]
    rates = [p.samples_per_s for p in result.history if not math.isnan(p.samples_per_s)]
    if not (rates and speeds):
        raise SettingsError("--steps: too few for a window after the warm-up; take 100")
    return result, every * speeds[-1] if on_cpu else max(rates)


def check_comparable(conditions: Mapping[str, Any], before: Measured) -> None:
    """Raise SettingsError if `conditions`, which may be only some of those of a
    measurement, differ from the conditions of the baseline `before`."""
    known = before.conditions
    if other := differing({name: known[name] for name in conditions}, conditions):
        raise SettingsError(
            f"the baseline was not measured like this run (then -> now): "
            f"{'; '.join(other)}. Set these back, or make a baseline here with --write"
        )


def judge(now: Measured, before: Measured) -> tuple[str, list[str]]:
    """Compare the results `now` with the baseline `before`. Return a sentence about the
    throughput, and a list of problems. If throughput or loss is worse by more than the
    noise, the list also contains the settings and packages that differ."""
    share = median(now.rates) / median(before.rates)
    noise = max(1 - min(one.rates) / max(one.rates) for one in (now, before))
    limit, faults = 1 - max(LEAST_RATE, noise), []
    sentence = f"the throughput is {100 * share:.0f} % of the baseline's"
    if noise > MOST_RATE:
        sentence += f", not compared: identical runs differ by {100 * noise:.0f} % here"
    elif not share >= limit:
        faults.append(f"{sentence}, but at least {100 * limit:.0f} % are expected")
    loss, worst = median(now.losses), max(before.losses)
    allowed = worst + max(LEAST_LOSS * abs(worst), worst - min(before.losses))
    if not loss <= allowed:
        faults.append(
            f"the validation loss is {loss:.4f}, but at most {allowed:.4f} is expected "
            f"(baseline: {median(before.losses):.4f})"
        )
    if faults:
        runs = [TrackedRun("", "", one.params, one.tags) for one in (before, now)]
        found = "; ".join(map(str, differences(*runs)))
        faults.append(f"differences: {found or 'no setting or package'}")
    return sentence, faults
