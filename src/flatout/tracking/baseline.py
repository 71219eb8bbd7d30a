"""Earlier runs of the same work, asked of a store that may not answer."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from flatout.engine.guard.comparison import RATE, TrackedRun
from flatout.engine.train.recording.metrics_file import parse_point
from flatout.tracking.pages.figures import tagged_figures
from flatout.tracking.store import one_line

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

Answer = TypeVar("Answer")
MAX_RUNS = 1000
METRICS_BEFORE = "report/"
"""Before the names of what earlier versions had as metrics of one point."""


class NoAnswer(Exception):
    """The store was asked and gave nothing; the text says why."""


@dataclass(frozen=True)
class Work:
    """What earlier runs of the same must have."""

    experiment: str
    key: str
    device: str
    own: str | None
    """Id of the run that asks."""


def ask_for_earlier(
    tracking_uri: str, work: Work, named: str | None, limit_s: float
) -> list[TrackedRun]:
    """The run that is `named`, or those of the same work. Raises NoAnswer, also where
    the store takes longer than `limit_s`."""

    def question() -> list[TrackedRun]:
        from mlflow import MlflowClient

        client = MlflowClient(tracking_uri)
        if named is not None:
            return [named_run(client, named)]
        return earlier_runs(client, work.experiment, work.key, work.device, work.own)

    return ask(question, limit_s)


def earlier_runs(
    client: MlflowClient, experiment: str, work_key: str, device: str, own: str | None
) -> list[TrackedRun]:
    """Finished runs of the same work on the same device, the fastest first."""
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return []
    runs = client.search_runs(
        [found.experiment_id],
        f"tags.work_key = '{work_key}' and tags.device = '{device}' "
        "and attributes.status = 'FINISHED'",
        max_results=MAX_RUNS,
        order_by=["attributes.start_time DESC"],
    )
    found = [_tracked(run) for run in runs if run.info.run_id != own]
    return sorted(found, key=lambda run: run.samples_per_s or 0.0, reverse=True)


def rates_since(points: Path, begin_s: float) -> list[float]:
    """Samples/s of the windows behind the warm-up that were noted after `begin_s`."""
    if not points.exists():
        return []
    lines = map(parse_point, points.read_bytes().splitlines())
    metrics = [p["metrics"] for p in lines if p and p["time_s"] >= begin_s]
    rates = [found.get("train_samples_per_second") for found in metrics]
    return [rate for rate in rates if rate is not None and not math.isnan(rate)]


def named_run(client: MlflowClient, run_id: str) -> TrackedRun:
    """The run that `guard.baseline` names; whatever it trained. Raises NoAnswer."""
    try:
        run = _tracked(client.get_run(run_id))
    except Exception as error:
        raise NoAnswer(
            f"guard.baseline: {run_id} is not in MLflow ({one_line(error)}); give the "
            "id of a finished run, or null"
        ) from error
    if run.samples_per_s is None:
        raise NoAnswer(
            f"guard.baseline: run {run_id} has no {RATE}; give the id of a "
            "finished training of this version, or null"
        )
    return run


def _tracked(run: Run) -> TrackedRun:
    data, info = run.data, run.info
    before = {k.removeprefix(METRICS_BEFORE): v for k, v in data.metrics.items()}
    figures = {**before, **tagged_figures(data.tags)}
    return TrackedRun(info.run_id, info.run_name, data.params, data.tags, figures)


def ask(question: Callable[[], Answer], limit_s: float) -> Answer:
    """What `question` gives within `limit_s`. Raises NoAnswer."""
    answers: list[Answer] = []
    faults: list[Exception] = []

    def run() -> None:
        try:
            answers.append(question())
        except Exception as error:
            faults.append(error)

    thread = threading.Thread(target=run, name="flatout-guard", daemon=True)
    thread.start()
    thread.join(limit_s)
    if answers:
        return answers[0]
    if faults and isinstance(faults[0], NoAnswer):
        raise faults[0]
    if faults:
        raise NoAnswer(f"MLflow did not say which runs it has ({one_line(faults[0])})")
    raise NoAnswer(f"MLflow gave no answer within {limit_s:g} s")
