"""Where training runs: in this process, or in one process a device."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatout.engine.assemble import TrainJob
from flatout.engine.loop import TrainResult, train
from flatout.engine.model import Vocabulary
from flatout.engine.runtime import set_up
from flatout.engine.settings import Settings
from flatout.engine.tokens import TokenRows


def run_training(
    settings: Settings,
    train_tokens: Any,
    validation_tokens: Any,
    test_tokens: Any,
    tokenizer: Any,
    label_names: Sequence[str],
    folder: Path,
) -> TrainResult:
    """Train on three token Datasets; checkpoints and models go under `folder`."""
    job = TrainJob(
        settings=settings,
        train=TokenRows.from_dataset(train_tokens),
        validation=TokenRows.from_dataset(validation_tokens),
        test=TokenRows.from_dataset(test_tokens),
        vocabulary=Vocabulary.of(tokenizer),
        label_names=tuple(label_names),
        work_folder=folder,
        metrics_file=Path(settings.paths.metrics),
    )
    return run_job(job)


def run_job(job: TrainJob) -> TrainResult:
    """Train `job` and give back what the main rank gives."""
    return train(job, set_up(job.settings.runtime))
