"""The built-in sample data: the handwritten digits that are part of scikit-learn.

The data set has 1,797 images of 8 x 8 pixels with 17 grey levels (Alpaydin & Kaynak
1998, UCI). No download is needed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from kedro.io import DatasetError

from flatout.datasets._entry import PathDataset, ReadOnlyDataset
from flatout.engine.files.atomic_write import write_file, write_folder

LEVELS = 16


class Digits(PathDataset, ReadOnlyDataset):
    """The handwritten digits, read-only. Loading returns the path of a file or folder.

    The digits are written to `filepath` on first use. If `filepath` ends in .npz, it
    becomes a file with the arrays `inputs` (1797, 8, 8) and `label` (1797,). Otherwise
    it becomes a folder of PNG files with a subfolder for each class. If `path` is
    given, that file or folder is used instead of the digits.
    """

    content = "the digits"

    def __init__(
        self,
        *,
        filepath: str,
        path: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(filepath=path or filepath, metadata=metadata)
        self._are_given = path is not None

    def load(self) -> Path:
        if self._are_given and not self._path.exists():
            raise DatasetError(f"there is no file or folder {self._path}")
        if not self._path.exists():
            pixels, labels = _digits()
            if self._path.suffix == ".npz":
                values = pixels.astype(np.float32)
                write_file(self._path, lambda p: _write_arrays(p, values, labels))
            else:
                write_folder(self._path, lambda p: _write_images(p, pixels, labels))
        return self._path

    def _exists(self) -> bool:
        return True


def _digits() -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Return pixels (1797, 8, 8) with values from 0 to 16, and labels (1797,)."""
    from sklearn.datasets import load_digits  # MLflow depends on it

    found = load_digits()
    return found.images.astype(np.uint8), found.target.astype(np.int64)


def _write_arrays(path: Path, values: Any, labels: Any) -> None:
    with path.open("wb") as file:
        np.savez_compressed(file, inputs=values, label=labels)


def _write_images(folder: Path, pixels: Any, labels: Any) -> None:
    from PIL import Image

    for number, (digit, label) in enumerate(zip(pixels, labels, strict=True)):
        place = folder / str(label)
        place.mkdir(parents=True, exist_ok=True)
        grey = (digit * (255 // LEVELS)).astype(np.uint8)
        Image.fromarray(grey).save(place / f"{number:04d}.png")
