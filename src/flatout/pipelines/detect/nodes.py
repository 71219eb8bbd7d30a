"""Nodes of the detect pipeline: parameters in, the engine's results out."""

from __future__ import annotations

from typing import Any

from flatout.engine.parameters import (
    DetectSettings,
    ModelSettings,
    PredictSettings,
    RuntimeSettings,
    Settings,
    SplitSettings,
    TokenizeSettings,
)


def detect_sessions(
    model: Any,
    tokenizer: Any,
    sessions: Any,
    runtime: RuntimeSettings,
    trained: ModelSettings,
    split: SplitSettings,
    tokenize: TokenizeSettings,
    predict: PredictSettings,
    detect: DetectSettings,
) -> dict[str, Any]:
    """Classify each session; compare with the labels if there are any."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict import detection as engine

    settings = Settings(
        runtime=runtime,
        model=trained,
        split=split,
        tokenize=tokenize,
        predict=predict,
        detect=detect,
    )
    table, report = engine.detect(model, tokenizer, sessions, settings)
    return {"detections": table, "report": report}
