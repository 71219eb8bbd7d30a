"""What a finished run hands over, as one file beside its models.

It is how ranks answer the process that launched them, and it outlives a process that
dies before it has put the results where they belong.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatout.engine.job import TrainJob
from flatout.engine.jobs.checkpoint_folder import (
    RESULT,
    discard,
    step_folders,
    write_text_whole,
)
from flatout.engine.jobs.distributed import differing
from flatout.engine.jobs.identity import identity
from flatout.engine.loop import TrainResult
from flatout.engine.report import LogPoint, TrainReport

logger = logging.getLogger(__name__)


def write_result(job: TrainJob, result: TrainResult) -> None:
    """Under the job's folder; its checkpoints are of no more use then."""
    fields: dict[str, Any] = {
        "identity": identity(job),
        "model_folder": result.model_folder.name,
        "last_model_folder": result.last_model_folder.name,
        "report": result.report.as_dict(),
        "history": [asdict(point) for point in result.history],
        "confusion": result.confusion,
    }
    write_text_whole(job.work_folder / RESULT, json.dumps(fields))
    for folder in step_folders(job.work_folder):
        discard(folder)


def read_result(folder: Path) -> TrainResult:
    """What `write_result` left in `folder`."""
    return _parse(folder, json.loads((folder / RESULT).read_text(encoding="utf-8")))


def take_over(job: TrainJob) -> TrainResult | None:
    """The result of this very training, where one finished and nobody took it: the
    process that asked for it died. None where there is none."""
    path = job.work_folder / RESULT
    if job.settings.train.resume != "auto" or not path.is_file():
        return None
    fields = json.loads(path.read_text(encoding="utf-8"))
    if differences := differing(fields["identity"], identity(job)):
        logger.warning(
            "a finished training in %s was never collected; a new one starts, because "
            "of %s",
            job.work_folder,
            "; ".join(differences),
        )
        return None
    logger.info("this training is finished already: its results are in %s", path.parent)
    return _parse(job.work_folder, fields)


def _parse(folder: Path, fields: dict[str, Any]) -> TrainResult:
    return TrainResult(
        model_folder=folder / fields["model_folder"],
        last_model_folder=folder / fields["last_model_folder"],
        report=TrainReport(**fields["report"]),
        history=[LogPoint(**point) for point in fields["history"]],
        confusion=fields["confusion"],
    )
