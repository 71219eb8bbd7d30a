"""Nodes of the evaluate pipeline: predict a split, then evaluate the predictions."""

from __future__ import annotations

from typing import Any

from flatout.engine.parameters import EvaluateSettings, Settings
from flatout.engine.tasks import names_classes


def predict_split(
    saved: Any,
    train_rows: Any,
    validation_rows: Any,
    test_rows: Any,
    label_names: list[str],
    tokenizer: Any | None = None,
    **groups: Any,
) -> dict[str, Any]:
    """Return the predictions of the `saved` model for the rows of `evaluate.split`, a
    DataFrame, and the task's metrics. If calibration is configured, the model is
    calibrated first, and the calibration is saved in the model's folder. `groups` are
    the parameter groups."""
    # These modules import torch, which other registered pipelines do not need.
    from flatout.engine.predict.calibrating import calibrate
    from flatout.engine.predict.split_predictions import SplitPredictions

    settings = Settings(**groups)
    known, chosen = (train_rows, label_names), {"evaluate.split": "validation"}
    given = (*known, settings.changed(chosen))
    calibrate(SplitPredictions(saved, tokenizer, validation_rows, *given))
    splits = {"train": train_rows, "validation": validation_rows, "test": test_rows}
    rows = splits[settings.evaluate.split]
    found = SplitPredictions(saved, tokenizer, rows, *known, settings)
    return {"predictions": found.table().to_pandas(), "figures": found.value()}


def judge_predictions(
    predictions: Any,
    figures: dict[str, Any],
    label_names: list[str],
    evaluate: EvaluateSettings,
    tokenizer: Any | None = None,
    **splits: Any,
) -> dict[str, Any]:
    """Return the report, the metrics per class, the confusion matrix and the table of
    wrongly predicted rows. `figures` are the metrics of the split. The metrics per
    class and the confusion matrix are empty unless each row has exactly one class. The
    table is empty if there are no labels."""
    from flatout.engine.predict import judgement

    names = label_names if names_classes(figures["task"]) else []
    classes = judgement.class_table(predictions, names)
    counts = judgement.confusion(predictions, names)
    rows = splits[f"{evaluate.split}_rows"]
    return {
        "report": {**figures, **judgement.baseline_figures(predictions, classes)},
        "classes": classes,
        "confusion": {"label_names": names, "counts": counts} if counts else {},
        "wrong": judgement.wrong_rows(
            predictions, rows, tokenizer, evaluate.wrong_rows
        ),
    }


def show_reliability(report: dict[str, Any]) -> Any:
    """Return a Plotly reliability diagram: accuracy by predicted probability."""
    from flatout.reports.pictures import reliability_figure

    return reliability_figure(report)


def show_wrong_images(wrong: Any, evaluate: EvaluateSettings, **splits: Any) -> Any:
    """Return a Matplotlib figure of the first images among the `wrong` rows."""
    from flatout.reports.pictures import image_sheet

    return image_sheet(wrong, splits[f"{evaluate.split}_rows"])
