"""Node of the detect pipeline."""

from __future__ import annotations

from typing import Any

from flatout.engine.parameters import Settings


def detect_sessions(
    saved: Any, tokenizer: Any, sessions: Any, **groups: Any
) -> dict[str, Any]:
    """Return a table that classifies each session as normal or abnormal, and a report.
    The report compares the results of the `saved` model with the labels, if there are
    any. `groups` are the parameter groups."""
    # These modules import torch, which other registered pipelines do not need.
    from flatout.engine.predict import detection as engine

    table, report = engine.detect(saved, tokenizer, sessions, Settings(**groups))
    return {"detections": table, "report": report}
