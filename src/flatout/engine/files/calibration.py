"""The temperature and thresholds of a saved model, stored in a file in its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.engine.files.atomic_write import write_text
from flatout.engine.parameters import Settings, SettingsError

CALIBRATION = "calibration.json"
LEAST_ROWS = 100
"""The minimum number of validation rows for fitting a calibration."""


@dataclass(frozen=True)
class Calibration:
    """Values fitted on validation rows. The defaults leave predictions unchanged."""

    temperature: float = 1.0
    """Logits are divided by the temperature before the softmax or sigmoid."""
    thresholds: Mapping[str, float] | None = None
    """The calibrated probability above which each label is predicted, by label name, or
    None if no thresholds were fitted. Of two classes, only the second has a
    threshold."""
    key: str = ""
    """Digest of the model, rows and settings used for fitting."""

    @classmethod
    def read(cls, folder: str | Path | None) -> Calibration:
        """Return the calibration in a saved model's folder, or else the defaults."""
        path = Path(folder or "") / CALIBRATION
        if not folder or not path.is_file():
            return cls()
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def save(self, folder: Path) -> None:
        """Save the calibration next to the weights of the model, atomically."""
        write_text(folder / CALIBRATION, json.dumps(asdict(self), indent=2) + "\n")


def requested(settings: Settings) -> dict[str, str]:
    """Return the options that need fitted values, such as `evaluate.calibrate: true`,
    each with the value that turns it off."""
    asked = {}
    if settings.evaluate.calibrate:
        asked["evaluate.calibrate: true"] = "false"
    if settings.model.label_threshold == "auto":
        asked["model.label_threshold: auto"] = "0.5"
    return asked


def check_rows(count: int, settings: Settings) -> None:
    """Raise SettingsError if `count` validation rows are too few to fit the values that
    the settings request."""
    for name, value in requested(settings).items() if count < LEAST_ROWS else ():
        raise SettingsError(
            f"{name} needs at least {LEAST_ROWS} validation rows, and there are "
            f"{count}: enlarge split.fractions.validation (or the rows of "
            f"raw_validation_texts), or set it to {value}"
        )
