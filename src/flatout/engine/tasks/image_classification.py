"""Single-label classification of images, with random crops and flips in training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt

from flatout.engine.data.row_facts import scrambled
from flatout.engine.rows.layout import Ints
from flatout.engine.rows.rows import Rows
from flatout.engine.tasks._task import HeadKind, Targets
from flatout.engine.tasks.sequence_classification import SequenceClassification

DRAWS = 5
"""The number of random values per image: for area, aspect ratio, x, y and flip."""
RATIOS = np.log([3 / 4, 4 / 3])
"""The range of the logarithm of a crop's aspect ratio (Szegedy et al. 2014)."""


class ImageClassification(SequenceClassification):
    """Cross entropy over the classes of the train split. In training, the model family
    crops the images on the device with the boxes in the field `crops`."""

    auto_class = "AutoModelForImageClassification"
    architectures = ("ForImageClassification",)
    head_kind = HeadKind.WHOLE
    pipeline_tag = "image-classification"

    def targets(
        self, rows: Rows, row_ids: Ints, epoch: int, *, pools_last: bool
    ) -> Targets:
        """Return one class per row, and `crops` (B, 5), which differ by epoch."""
        found = super().targets(rows, row_ids, epoch, pools_last=pools_last)
        ids = row_ids if len(row_ids) else np.zeros(1, np.int64)  # one row of padding
        return replace(found, fields={"crops": self._crops(ids, epoch)})

    def _crops(self, row_ids: Ints, epoch: int) -> npt.NDArray[np.float32]:
        """Return crops (B, 5) as described in families/_modeling/crops.py."""
        area, ratio, x, y, mirror = _uniform(row_ids, self.seed, epoch)
        least, mirrored = self.settings.crop_area, self.settings.flip_probability
        if least == 1:
            width = height = np.ones(len(row_ids))
        else:
            share = least + area * (1 - least)
            shape = np.exp(RATIOS[0] + ratio * (RATIOS[1] - RATIOS[0]))
            width = np.minimum(np.sqrt(share * shape), 1)
            height = np.minimum(np.sqrt(share / shape), 1)
        left, top = x * (1 - width), y * (1 - height)
        columns = [left, top, width, height, mirror < mirrored]
        return np.stack(columns, 1).astype(np.float32)


def _uniform(row_ids: Ints, seed: int, epoch: int) -> npt.NDArray[np.float64]:
    """Return random numbers (DRAWS, B) in [0, 1), hashed from seed, epoch and row."""
    places = row_ids.astype(np.uint64) * np.uint64(DRAWS)
    keys = places + np.arange(DRAWS, dtype=np.uint64)[:, None]
    hashes = scrambled(scrambled(keys, seed), epoch)
    found: npt.NDArray[np.float64] = hashes.astype(np.float64) / 2.0**64
    return np.minimum(found, np.nextafter(1, 0))
