"""Parts shared by tasks whose rows have a list of labels each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc


def unknown_label(labels: Any, names: Sequence[str]) -> str | None:
    """Return a message on the first unknown label of an Arrow column of lists."""
    flat = pc.list_flatten(labels)
    unknown = pc.invert(pc.is_in(flat, pa.array(names, pa.string())))
    if not pc.sum(unknown).as_py():
        return None
    first = pc.index(unknown, True).as_py()
    row = pc.list_parent_indices(labels)[first].as_py()
    return (
        f"row {row} has the label {flat[first].as_py()!r}, which train never has: "
        "nothing could learn it. Give train such rows, or take these out"
    )


def named_labels(names: Sequence[str]) -> dict[str, Any]:
    """Return the labels of a model's config, by number and name."""
    return {
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
    }
