"""Fit the temperature and thresholds of a saved model on the validation split."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from flatout.engine.files import calibration
from flatout.engine.files.calibration import Calibration
from flatout.engine.files.content_key import ContentKey
from flatout.engine.models.building import ModelError
from flatout.engine.parameters import SettingsError
from flatout.engine.predict.checks import model_file_hashes
from flatout.engine.predict.split_predictions import SplitPredictions
from flatout.engine.tasks import Calibrated, calibration_faults
from flatout.engine.tasks._shared import reliability
from flatout.engine.tokenizing.token_keys import token_key

logger = logging.getLogger(__name__)

FORMAT_VERSION = 3
"""Increase this whenever the same input would give a different calibration."""


def calibrate(found: SplitPredictions) -> None:
    """Fit the temperature (`evaluate.calibrate`) and thresholds
    (`model.label_threshold: auto`) on the validation rows of `found`, and save both to
    the model's folder, unless it has values fitted with the same model, rows and
    settings. Raises SettingsError or ModelError if the model cannot be calibrated, or
    if only thresholds are requested and the folder has a temperature."""
    if not calibration.requested(found.settings):
        return
    calibration.check_rows(len(found.tokens), found.settings)
    folder = Path(found.model.config.name_or_path)
    if not folder.is_dir():
        raise ModelError(
            f"{folder} is not a folder, in which a calibration could be saved: let the "
            "entry model of the catalog name the folder of a model"
        )
    calibrates, known = found.settings.evaluate.calibrate, Calibration.read(folder)
    if known.temperature != 1 and not calibrates:
        raise SettingsError(
            f"model.label_threshold: auto, but {folder} has a fitted temperature, on "
            "which thresholds depend: set evaluate.calibrate: true to fit both, or "
            f"delete {folder / calibration.CALIBRATION}"
        )
    key = _key(found)
    if known.key != key:
        _fitted(found, key).save(folder)


def _key(found: SplitPredictions) -> str:
    """Return the digest of everything that determines the calibration."""
    settings = found.settings
    fields = {
        "format": FORMAT_VERSION,
        "model": model_file_hashes(found.model.config),
        "tokens": token_key(found.tokens),
        "train": token_key(found.train) if found.trained else None,
        "label_names": list(found.label_names),
        "evaluate.split": settings.evaluate.split,
        "runtime.precision": settings.runtime.precision,
        "seed": found.seed,
        "model.label_threshold": settings.model.label_threshold,
        "model.mask_probability": settings.model.mask_probability,
        "model.temperature": settings.model.temperature,
        "model.matryoshka": settings.model.matryoshka,
        "calibrate": settings.evaluate.calibrate,
    }
    return ContentKey(fields).digest


def _fitted(found: SplitPredictions, key: str) -> Calibration:
    predictor, rows, _ = found.opened
    task, thresholds = predictor.task, {}
    if not isinstance(task, Calibrated):
        raise SettingsError("; ".join(calibration_faults(found.settings, type(task))))
    picks = found.settings.model.label_threshold == "auto"
    if picks and not task.thresholded:
        raise SettingsError(
            "model.label_threshold: auto is for two classes or several labels, and the "
            f"model has {len(task.label_names)} classes: set it to 0.5"
        )
    logits, labels = predictor.logits(rows), rows.labels_of(np.arange(len(rows)))
    calibrates = found.settings.evaluate.calibrate
    temperature = reliability.fitted_temperature(logits, labels) if calibrates else 1.0
    if temperature in (reliability.MOST_SCALED, 1 / reliability.MOST_SCALED):
        logger.warning(
            "the temperature has reached its bound: the model is right on all "
            "validation rows, or no better than chance. Calibrate with more validation "
            "rows, or delete calibration.json in the model's folder"
        )
    shares, hits = reliability.outcomes(logits / temperature, labels)
    columns = zip(task.thresholded, shares.T, hits.T, strict=True) if picks else ()
    for name, *column in columns:
        if (best := reliability.best_threshold(*column)) is None:
            told = "no validation row has the label %r: its threshold is 0.5"
            logger.warning(told, name)
        thresholds[name] = 0.5 if best is None else best
    told = "calibrated on %d validation rows: temperature %.4g, %s"
    chosen = f"thresholds {thresholds}" if picks else "no thresholds"
    logger.info(told, len(rows), temperature, chosen)
    return Calibration(temperature, thresholds or None, key)
