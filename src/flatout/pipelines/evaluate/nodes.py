"""Nodes of the evaluate pipeline: recipes of predictions, then their evaluation."""

from __future__ import annotations

from typing import Any

from flatout.engine.parameters import (
    EvaluateSettings,
    ModelSettings,
    RuntimeSettings,
    Settings,
    TokenizeSettings,
    TrainSettings,
)
from flatout.engine.tasks import names_classes


def predict_split(
    model: Any,
    train: Any,
    validation: Any,
    test: Any,
    label_names: list[str],
    runtime: RuntimeSettings,
    tokenize: TokenizeSettings,
    evaluate: EvaluateSettings,
    options: ModelSettings,
    training: TrainSettings,
    tokenizer: Any | None = None,
) -> dict[str, Any]:
    """Predict the rows of `evaluate.split`, and compute the task's figures; kept if
    this model has made them already. Before it, calibrate the model if settings ask for
    it, and save the calibration to its folder."""
    # Imports torch, which other pipelines in the same registry do not need.
    from flatout.engine.predict.calibrating import calibrate
    from flatout.engine.predict.split_predictions import SplitPredictions

    settings = Settings(
        runtime=runtime,
        tokenize=tokenize,
        evaluate=evaluate,
        model=options,
        train=training,
    )
    calibrate(model, tokenizer, validation, train, label_names, settings)
    rows = {"train": train, "validation": validation, "test": test}[evaluate.split]
    found = SplitPredictions(model, tokenizer, rows, train, label_names, settings)
    return {"predictions": found, "figures": found}


def judge_predictions(
    predictions: Any,
    figures: dict[str, Any],
    train: Any,
    validation: Any,
    test: Any,
    label_names: list[str],
    evaluate: EvaluateSettings,
    tokenizer: Any | None = None,
) -> dict[str, Any]:
    """Make report, table by class, confusion matrix and wrong rows. If rows do not
    have one class each, table and matrix are empty; without answers, wrong rows are."""
    from flatout.engine.predict import judgement

    names = label_names if names_classes(figures["task"]) else []
    classes = judgement.class_table(predictions, names)
    counts = judgement.confusion(predictions, names)
    rows = {"train": train, "validation": validation, "test": test}[evaluate.split]
    return {
        "report": {**figures, **judgement.baseline_figures(predictions, classes)},
        "classes": classes,
        "confusion": {"label_names": names, "counts": counts} if counts else {},
        "wrong": judgement.wrong_rows(
            predictions, rows, tokenizer, evaluate.wrong_rows
        ),
    }


def show_reliability(report: dict[str, Any]) -> Any:
    """Show how often predictions come true, by their probability, as Plotly figure."""
    from flatout.reports.pictures.image_sheet import reliability_figure

    return reliability_figure(report)


def show_wrong_images(
    wrong: Any, train: Any, validation: Any, test: Any, evaluate: EvaluateSettings
) -> Any:
    """Show the first of the `wrong` rows as images in one Matplotlib figure."""
    from flatout.reports.pictures.image_sheet import image_sheet

    rows = {"train": train, "validation": validation, "test": test}[evaluate.split]
    return image_sheet(wrong, rows)
