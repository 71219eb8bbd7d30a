"""Settings, rows and trainings that many test modules make."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flatout.engine.parameters import Settings, parse_settings
from flatout.engine.rows.opening import rows_from_dataset
from flatout.engine.rows.rows import SplitRows
from flatout.engine.train.setup.job import TrainJob
from tests.engine.families import LABEL_NAMES, NAMED, token_rows
from tests.engine.runs import make_job

SPLITS = {"train": 60, "validation": 20, "test": 21}
"""Rows of each, of trainings on token rows."""


def samples_settings(kind: str, model: Mapping[str, Any], **groups: Any) -> Settings:
    """Of a training on `kind` (arrays, images), 16 samples a step, in one process."""
    train = {
        "rows": kind,
        "global_batch_size": 16,
        "epochs": 3,
        "log_every": 1,
        "error_analysis_every": None,
        "distributed": {"num_processes": 1},
    }
    return parse_settings(
        {
            "runtime": {"precision": "fp32", "threads": 1, "seed": 3},
            "split": {"max_rejected_fraction": 1},
            **groups,
            "model": dict(model),
            "train": train | groups.get("train", {}),
        }
    )


def samples_job(folder: Path, settings: Settings, made: Mapping[str, Any]) -> TrainJob:
    """A training on the splits that recipes have `made` of samples."""
    rows: Sequence[SplitRows] = [
        rows_from_dataset(made[name].to_dataset()) for name in SPLITS
    ]
    regression = settings.model.task == "regression"
    names = () if regression else tuple(made["label_names"])
    places = folder / "run", folder / "metrics.jsonl"
    return TrainJob(settings, *rows, None, names, *places, "k")


def task_rows(task: str, rows: int = SPLITS["train"]) -> dict[str, SplitRows]:
    """Token rows of each split, with the labels of `task`."""
    return {name: token_rows(task, n) for name, n in (SPLITS | {"train": rows}).items()}


def task_job(
    folder: Path, task: str, config: Mapping[str, Any], **train: Any
) -> TrainJob:
    """`make_job`'s training, of another task and model."""
    job = make_job(folder, **train)
    given = job.settings.model_dump(mode="json")
    given["model"] |= {"task": task, "config": dict(config)}
    names = tuple(LABEL_NAMES) if task in NAMED else ()
    chosen = parse_settings(given)
    return replace(job, settings=chosen, label_names=names, **task_rows(task))
