"""Node of the detect pipeline."""

from __future__ import annotations

from typing import Any

from flatout.engine.parameters import Settings


def detect_sessions(
    saved: Any, tokenizer: Any, sessions: Any, **groups: Any
) -> dict[str, Any]:
    """Classify each session by the `saved` model; compare with the labels if there are
    any. `groups`: parameters by group."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict import detection as engine

    table, report = engine.detect(saved, tokenizer, sessions, Settings(**groups))
    return {"detections": table, "report": report}
