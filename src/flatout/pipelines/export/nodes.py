"""Node of the export pipeline."""

from __future__ import annotations

from typing import Any

import pandas as pd

from flatout.engine.parameters import Settings


def export_model(
    saved: Any,
    train_rows: Any,
    test_rows: Any,
    label_names: list[str],
    tokenizer: Any | None = None,
    **groups: dict[str, Any],
) -> dict[str, Any]:
    """Write the formats of the `saved` model, and measure each on the test split.
    `groups`: parameters by group."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.export.exporting import export

    splits = {"train": train_rows, "test": test_rows}
    report = export(saved, tokenizer, splits, label_names, Settings(**groups))
    return {"report": report, "table": pd.DataFrame(report["formats"])}
