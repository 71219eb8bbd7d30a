"""Labels of sessions from a file of their own, as loghub's anomaly_label.csv."""

from __future__ import annotations

from pathlib import Path

from flatout.engine.data.columns import listed
from flatout.engine.data.raw_texts import RawTextsError, name_of
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.sessions.parts import label_of


def read_labels(path: Path) -> dict[str, str]:
    """`normal` or `abnormal` by session: of a file of two columns, name and label.
    Raises RawTextsError."""
    reader = TextFiles(path)
    columns = reader.column_names
    if len(columns) != 2:
        raise RawTextsError(
            f"{path} has the columns {listed(columns)}; a file of labels has two, the "
            "session's name and its label (Normal or Anomaly)"
        )
    found: dict[str, str] = {}
    for batch in reader.batches(columns):
        names, labels = (batch.columns[column].to_pylist() for column in columns)
        for name, label in zip(names, labels, strict=True):
            if name is not None and label is not None:
                found[name_of(name)] = label_of(name_of(label))
    return found
