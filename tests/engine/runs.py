"""Small training runs for the tests of launching, checkpoints and faults."""

import json
import logging
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flatout.engine.files.content_key import file_hash
from flatout.engine.launch.launch import run_job
from flatout.engine.launch.results import read_result, write_result
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import Runtime
from flatout.engine.parameters import parse_settings
from flatout.engine.train.loop import TrainResult, train
from flatout.engine.train.setup.job import TrainJob
from tests.engine.families import CONFIGS, LABEL_NAMES, VOCABULARY, token_rows
from tests.forks import fork_two

NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CPU = Runtime(torch.device("cpu"), "CPU", "fp32", Ranks(), threads=1)
H200 = Runtime(torch.device("cuda"), "NVIDIA H200", "bf16", Ranks(), threads=1)


class Crash(BaseException):
    """Leaves the same state as a kill, but without ending the process."""


def make_job(folder: Path, *, config=None, rows=60, seed=0, data_key="k", **train):
    """Return a job with 12 steps of 16 samples in 3 epochs, and several micro-batches
    per step."""
    settings = parse_settings(
        {
            "runtime": {"seed": seed, "precision": "fp32", "threads": 1},
            "model": {
                "config": {"model_type": "bert", **CONFIGS["bert"], **(config or {})}
            },
            "tokenize": {"max_length": 24},
            "train": {
                "global_batch_size": 16,
                "token_budget": 120,
                "epochs": 3,
                "log_every": 3,
                "learning_rate": 1e-3,
                "distributed": {"num_processes": 1},
                **train,
            },
        }
    )
    task = "sequence-classification"
    return TrainJob(
        settings,
        token_rows(task, rows),
        token_rows(task, 20),
        token_rows(task, 21),
        VOCABULARY,
        tuple(LABEL_NAMES),
        folder / "run",
        folder / "metrics.jsonl",
        data_key,
    )


def changed(job: TrainJob, **groups: dict[str, Any]) -> TrainJob:
    """Return a copy of `job` with other values in these groups of its settings."""
    settings = job.settings
    update = {
        name: getattr(settings, name).model_copy(update=values)
        for name, values in groups.items()
    }
    return replace(job, settings=settings.model_copy(update=update))


def run_forked(job: TrainJob) -> TrainResult:
    """Run `run_job` without the launcher, in ranks that do not repeat the imports."""
    settings = job.settings.train.distributed
    ranks = int(settings.num_processes)
    fork_two(_train, job, strategy=settings.strategy, ranks=ranks)
    return read_result(job)


def _train(runtime, group, job: TrainJob) -> None:
    own = replace(group, settings=job.settings.train.distributed)
    result = train(job, runtime, own)
    if runtime.ranks.is_main:
        write_result(job, result)


def curve(result) -> list[tuple]:
    """Return the values that must be equal bit for bit, even after faults."""
    return [
        (p.step, p.loss.hex(), p.grad_norm.hex(), p.learning_rate.hex())
        for p in result.history
    ]


def weights(result: TrainResult) -> tuple[str, ...]:
    """Return hashes of the best and the last weights."""
    folders = (result.model_folder, result.last_model_folder)
    return tuple(file_hash(folder / "model.safetensors") for folder in folders)


def metrics_of(job: TrainJob) -> dict[str, dict[int, float]]:
    """Return the values in the metrics file by metric and step."""
    found: dict[str, dict[int, float]] = {}
    for point in map(json.loads, job.metrics_file.read_text().splitlines()):
        for name, value in point["metrics"].items():
            found.setdefault(name, {})[point["step"]] = value
    return found


def points(job: TrainJob) -> list[tuple[int, str, str]]:
    """Return (step, metric, value) for the metrics file, except for times."""
    lines = job.metrics_file.read_text().splitlines()
    return [
        (point["step"], name, float(value).hex())
        for point in map(json.loads, lines)
        for name, value in point["metrics"].items()
        if "per_second" not in name and "wait" not in name
    ]


@contextmanager
def when_logged(text: str, action):
    """Call `action` at the first line of the engine's log that begins with `text`."""
    logger, handler = logging.getLogger("flatout.engine"), logging.Handler()
    level = logger.level

    def emit(record):
        if record.getMessage().startswith(text) and handler in logger.handlers:
            logger.removeHandler(handler)
            action()

    handler.emit = emit
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def crash():
    raise Crash


def crashed(job: TrainJob, text: str) -> None:
    """Train until a line of the log begins with `text`."""
    with pytest.raises(Crash), when_logged(text, crash):
        run_job(job)
