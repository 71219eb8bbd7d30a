"""Parts shared by tasks with named labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def unknown_label(labels: Any, names: Sequence[str]) -> str | None:
    """Return a message on unknown labels in a column of names, or of lists of them."""
    rows = pa.chunked_array([pa.array(range(len(labels)), pa.int64())])
    if pa.types.is_list(labels.type):
        rows, labels = pc.list_parent_indices(labels), pc.list_flatten(labels)
    unknown = pc.invert(pc.is_in(labels, pa.array(names, pa.string())))
    if not (count := pc.count_distinct(rows.filter(unknown)).as_py()):
        return None
    first = pc.index(unknown, True).as_py()
    return (
        f"{count} rows have a label that train never has, the first "
        f"{labels[first].as_py()!r} in row {rows[first].as_py()}: nothing could learn "
        "it. Give train such rows, or take these out"
    )


def named_labels(names: Sequence[str]) -> dict[str, Any]:
    """Return the labels of a model's config, by number and name."""
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
