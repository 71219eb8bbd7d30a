"""Store the result of a finished run in a file next to its models.

With this file, the ranks return the result to the process that launched them. If that
process dies before it has stored the result elsewhere, the result is not lost.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from typing import Any

from flatout.engine.checkpoints.checkpoint_folder import (
    FINISHED,
    RESULT,
    CheckpointError,
    discard,
    inside,
    step_folders,
)
from flatout.engine.checkpoints.resume import differing
from flatout.engine.files.atomic_write import write_text
from flatout.engine.files.content_key import file_hash
from flatout.engine.train.loop import TrainResult
from flatout.engine.train.recording.report import LogPoint, TrainReport
from flatout.engine.train.setup.identity import result_identity
from flatout.engine.train.setup.job import TrainJob

logger = logging.getLogger(__name__)


def write_result(job: TrainJob, result: TrainResult) -> None:
    """Write the result to the job's folder, and remove the checkpoints from it."""
    fields: dict[str, Any] = {
        "identity": result_identity(job),
        "files": _hashes(result),
        "model_folder": result.model_folder.name,
        "last_model_folder": result.last_model_folder.name,
        "report": asdict(result.report),
        "history": [asdict(point) for point in result.history],
    }
    write_text(job.work_folder / RESULT, json.dumps(fields))
    for folder in step_folders(job.work_folder):
        discard(folder)


def read_result(job: TrainJob) -> TrainResult:
    """Read the result that `write_result` wrote to the job's folder."""
    path = job.work_folder / RESULT
    return _parse(job, json.loads(path.read_text(encoding="utf-8")))


def load_finished_result(job: TrainJob) -> TrainResult | None:
    """Return the result of a finished run with the same settings and data, or None if
    the job's folder has no such result. Such a result exists if an earlier process died
    before storing it elsewhere, or if the same run is repeated."""
    found = [job.work_folder / name for name in (RESULT, FINISHED)]
    path = next((path for path in found if path.is_file()), None)
    if path is None or job.settings.train.resume != "auto":
        return None
    if job.settings.train.distributed.num_machines > 1:
        logger.warning(
            "%s is not used, because the other machines do not have it: training "
            "again. With train.distributed.num_machines: 1 it would be used",
            path,
        )
        return None
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
        if differences := differing(fields["identity"], result_identity(job)):
            if path.name == RESULT:
                logger.warning(
                    "the result of the finished run in %s was never saved; a new run "
                    "starts, because of these differences: %s",
                    *(path.parent, "; ".join(differences)),
                )
            return None
        result = _parse(job, fields)
        if fields["files"] != _hashes(result):
            raise ValueError("a model was changed after it was written")
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError) as error:
        logger.warning("%s is not used (%s): training again", path, error)
        return None
    logger.info(
        "this training run has already finished with the same data and settings: its "
        "model and report are used (validation loss %.4f, test loss %.4f). To train "
        "again, set train.resume: never",
        result.report.validation_loss,
        result.report.test_loss,
    )
    return result


def _hashes(result: TrainResult) -> dict[str, dict[str, str]]:
    """Return the hashes of the files in each model folder, excluding subfolders."""
    return {
        folder.name: {
            path.name: file_hash(path)
            for path in sorted(folder.iterdir())
            if path.is_file()
        }
        for folder in (result.model_folder, result.last_model_folder)
    }


def _parse(job: TrainJob, fields: dict[str, Any]) -> TrainResult:
    folder = job.work_folder
    folders = {
        key: inside(folder / RESULT, key, folder, fields[key])
        for key in ("model_folder", "last_model_folder")
    }
    return TrainResult(
        **folders,
        report=TrainReport(**fields["report"]),
        history=[LogPoint(**point) for point in fields["history"]],
        trust_remote_code=job.settings.model.trust_remote_code,
    )
