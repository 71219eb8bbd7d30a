"""Temperature and thresholds of a saved model, in a file of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.engine.files.atomic_write import write_text
from flatout.engine.parameters import Settings, SettingsError

CALIBRATION = "calibration.json"
LEAST_ROWS = 100
"""Fewest validation rows of a fit."""


@dataclass(frozen=True)
class Calibration:
    """Values fitted on validation rows; the defaults leave predictions unchanged."""

    temperature: float = 1.0
    """Logits are divided by it before they become probabilities."""
    thresholds: Mapping[str, float] | None = None
    """Calibrated probability above which a label is predicted, by its name; of two
    classes only the second one's. None: not fitted."""
    key: str = ""
    """Digest of the model, rows and settings of the fit."""

    @classmethod
    def read(cls, folder: str | Path | None) -> Calibration:
        """Read from a saved model's folder; the defaults if it has no file."""
        path = Path(folder or "") / CALIBRATION
        if not folder or not path.is_file():
            return cls()
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @staticmethod
    def check_rows(count: int, settings: Settings) -> None:
        """Raise SettingsError if a wanted fit has too few validation rows."""
        calibrates = settings.evaluate.calibrate
        picks = settings.model.label_threshold == "auto"
        if count >= LEAST_ROWS or not (calibrates or picks):
            return
        name, value = "evaluate.calibrate: true", "false"
        if not calibrates:
            name, value = "model.label_threshold: auto", "0.5"
        raise SettingsError(
            f"{name} needs at least {LEAST_ROWS} validation rows, and there are "
            f"{count}: enlarge split.fractions.validation (or the rows of "
            f"raw_validation_texts), or set it to {value}"
        )

    def save(self, folder: Path) -> None:
        """Write next to the weights of the model, atomically."""
        write_text(folder / CALIBRATION, json.dumps(asdict(self), indent=2) + "\n")
