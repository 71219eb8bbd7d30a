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
    """Export the `saved` model to all configured formats, and measure each on the test
    split. `groups` are the parameter groups."""
    # These modules import torch, which other registered pipelines do not need.
    from flatout.engine.export.exporting import export
    from flatout.engine.predict.split_predictions import SplitPredictions

    settings = Settings(**groups).changed({"predict.strategy": "grouped"})
    given = (test_rows, train_rows, label_names, settings)
    report = export(SplitPredictions(saved, tokenizer, *given))
    return {"report": report, "table": pd.DataFrame(report["formats"])}
