"""Temperature and thresholds of a saved model, in a file of its folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from flatout.engine.files.atomic_write import write_text

CALIBRATION = "calibration.json"


@dataclass(frozen=True)
class Calibration:
    """Values that were fitted on validation rows; the defaults change nothing."""

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

    def save(self, folder: Path) -> None:
        """Write next to the weights of the model, atomically."""
        write_text(folder / CALIBRATION, json.dumps(asdict(self), indent=2) + "\n")
