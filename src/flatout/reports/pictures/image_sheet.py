"""Images on one sheet, each with its label and the model's prediction."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from flatout.engine.rows.opening import rows_from_dataset

MOST_SHOWN = 40
COLUMNS = 8
MAX_NAME_LENGTH = 16


def image_sheet(wrong: pd.DataFrame, rows: Any) -> Any:
    """Show the first of `wrong` (`row`, `label`, `prediction`, `score`) of `rows`, a
    `datasets.Dataset` of images. Without pyplot, whose state is global."""
    from matplotlib.figure import Figure

    shown = wrong.head(MOST_SHOWN)
    lines = max(1, -(-len(shown) // COLUMNS))
    figure = Figure(figsize=(1.6 * COLUMNS, 2 * lines + 0.5), layout="constrained")
    every = list(figure.subplots(lines, COLUMNS, squeeze=False).flat)
    pixels = rows_from_dataset(rows).views(shown["row"].to_numpy(np.int64))
    for axis in every:
        axis.set_axis_off()
    for axis, image, row in zip(every, pixels, shown.itertuples(), strict=False):
        axis.imshow(image.squeeze(), cmap="gray", vmin=0, vmax=255)
        axis.set_title(_caption(row), fontsize=7, parse_math=False)
    figure.suptitle(f"{len(wrong)} wrong of the largest loss; true > predicted")
    return figure


def _caption(row: Any) -> str:
    names = (str(name)[:MAX_NAME_LENGTH] for name in (row.label, row.prediction))
    return f"{' > '.join(names)} ({100 * row.score:.0f} %)\nrow {row.row}"
