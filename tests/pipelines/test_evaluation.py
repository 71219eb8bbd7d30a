"""The evaluate pipeline on the project's catalog, against transformers and sklearn."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from kedro.framework.session import KedroSession
from kedro.framework.startup import bootstrap_project
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import Pipeline
from kedro.runner import SequentialRunner
from sklearn import metrics
from transformers import AutoTokenizer

from flatout.datasets import TransformersModel
from flatout.engine.models.building import load_pretrained
from flatout.engine.predict.judgement import (
    class_figures,
    class_table,
    confusion_counts,
)
from flatout.engine.rows.tokens import TokenRows
from flatout.pipelines import train
from flatout.pipelines.evaluate import create_pipeline
from flatout.project.catalog_hooks import TrustHooks
from flatout.tracking.pages.pictures import _confusion, draw
from tests.conftest import PROJECT
from tests.engine.families import LABEL_NAMES, built
from tests.engine.remote_code import write_model
from tests.pipelines.tokens import write_tokens

CLASSES, LANGUAGE = "sequence-classification", "causal-lm"


def saved_model(data: Path, family: str, task: str) -> Path:
    """A model of random weights, large enough that its answers differ."""
    model = built(family, task)
    for weight in model.parameters():
        weight.data *= 15 if weight.dim() > 1 else 1
    folder = data / "06_models/model"
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(data / "06_models/tokenizer")
    tokenizer.save_pretrained(folder)
    return folder


def evaluate(data: Path, task: str = CLASSES, split: str = "test"):
    """Run the pipeline; the catalog has what came of it."""
    bootstrap_project(PROJECT)
    asked = {"data_dir": str(data), "model": {"task": task}}
    asked |= {"evaluate": {"split": split, "wrong_rows": 3}}
    session = KedroSession.create(PROJECT, env="test", runtime_params=asked)
    catalog = session.load_context().catalog
    SequentialRunner().run(create_pipeline(), catalog)
    return catalog


def plain_logits(folder: Path, rows: TokenRows) -> np.ndarray:
    """By transformers alone, a row at a time."""
    model, found = load_pretrained(folder).eval(), []
    with torch.no_grad():
        for ids in rows.views(np.arange(len(rows))):
            found.append(model(input_ids=torch.tensor([ids.tolist()])).logits[0])
    return found


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    folder = write_tokens(tmp_path_factory.mktemp("data"))
    names = folder / "06_models/label_names.json"
    names.write_text(json.dumps(LABEL_NAMES))
    return folder


@pytest.mark.parametrize("split", ["test", "validation"])
def test_figures_are_those_of_sklearn_on_what_transformers_predicts(data, split):
    folder = saved_model(data, "bert", CLASSES)
    catalog = evaluate(data, split=split)
    rows = TokenRows.open(data / f"05_model_input/{split}_tokens")
    logits = torch.stack(plain_logits(folder, rows))
    shares, best = logits.softmax(-1).numpy(), logits.argmax(-1).tolist()
    labels = rows.labels_of(np.arange(len(rows)))
    true, named = ([LABEL_NAMES[n] for n in of] for of in (labels.tolist(), best))
    losses = torch.nn.functional.cross_entropy(
        logits, torch.from_numpy(labels.copy()), reduction="none"
    )

    found = catalog.load("test_predictions")
    assert found["row"].tolist() == list(range(len(rows)))
    assert (found["label"].tolist(), found["prediction"].tolist()) == (true, named)
    assert found["loss"].to_numpy() == pytest.approx(losses.numpy(), abs=1e-4)
    probabilities = found[[f"probability_{name}" for name in LABEL_NAMES]].to_numpy()
    assert probabilities == pytest.approx(shares, abs=1e-5)

    report = catalog.load("evaluation_report")
    assert (report["split"], report["rows"]) == (split, len(rows))
    assert report["loss"] == pytest.approx(losses.mean().item(), abs=1e-4)
    assert report["accuracy"] == pytest.approx(metrics.accuracy_score(true, named))
    macro = metrics.f1_score(true, named, average="macro", zero_division=0)
    assert report["f1_macro"] == pytest.approx(macro)
    assert report["majority_accuracy"] == max(map(true.count, true)) / len(true)

    confusion = catalog.load("confusion_matrix")
    expected = metrics.confusion_matrix(true, named, labels=LABEL_NAMES)
    assert confusion == {"label_names": LABEL_NAMES, "counts": expected.tolist()}
    by_class = metrics.precision_recall_fscore_support(
        true, named, labels=LABEL_NAMES, zero_division=0
    )
    table = catalog.load("class_metrics")
    assert table["label"].tolist() == LABEL_NAMES
    for name, column in zip(
        ("precision", "recall", "f1", "rows"), by_class, strict=True
    ):
        assert table[name].to_numpy() == pytest.approx(column), name

    wrong = catalog.load("wrong_predictions")
    order = np.argsort(-losses.numpy(), kind="stable").tolist()
    worst = [row for row in order if true[row] != named[row]][:3]
    assert wrong["row"].tolist() == worst
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [rows.views(np.array([row]))[0].tolist() for row in worst]
    texts = tokenizer.batch_decode(ids, skip_special_tokens=True)
    assert [text.split() for text in wrong["text"]] == [t.split() for t in texts]


def test_predictions_of_the_same_model_are_kept_and_of_another_made_again(data):
    saved_model(data, "bert", CLASSES)
    file = data / "07_model_output/test_predictions.parquet"
    evaluate(data)
    written = file.stat().st_mtime_ns
    evaluate(data)
    assert file.stat().st_mtime_ns == written
    kept = pd.read_parquet(file)
    saved_model(data, "roberta", CLASSES)
    evaluate(data)
    assert not pd.read_parquet(file)["loss"].equals(kept["loss"])


def test_a_language_model_has_figures_and_no_rows(data):
    folder = saved_model(data, "gpt2", LANGUAGE)
    (data / "06_models/label_names.json").write_text("[]")
    catalog = evaluate(data, LANGUAGE)
    (data / "06_models/label_names.json").write_text(json.dumps(LABEL_NAMES))
    rows = TokenRows.open(data / "05_model_input/test_tokens")
    total = count = 0
    for logits, ids in zip(
        plain_logits(folder, rows), rows.views(np.arange(len(rows))), strict=True
    ):
        targets = torch.tensor(ids.tolist())[1:]
        total += torch.nn.functional.cross_entropy(
            logits[:-1], targets, reduction="sum"
        ).item()
        count += len(targets)
    report = catalog.load("evaluation_report")
    assert report["loss"] == pytest.approx(total / count, rel=1e-5)
    assert len(catalog.load("test_predictions")) == 0
    assert catalog.load("confusion_matrix") == {}
    assert len(catalog.load("wrong_predictions")) == 0


def test_a_class_that_is_never_predicted_is_told_of(caplog):
    frame = pd.DataFrame({"label": list("aabc"), "prediction": list("aaba")})
    counts = confusion_counts(frame, LABEL_NAMES)
    assert counts.tolist() == [[2, 0, 0], [0, 1, 0], [1, 0, 0]]
    figures = class_figures(counts, LABEL_NAMES)
    assert figures == {
        "majority_label": "a",
        "majority_accuracy": 0.5,
        "never_predicted": ["c"],
    }
    assert "classes that are never predicted: 1 ('c')" in caplog.text
    assert class_table(counts, LABEL_NAMES)["f1"].tolist() == [0.8, 1.0, 0.0]


def test_classes_go_by_their_names(tmp_path):
    """Stars from 1 to 5, not classes from 0 to 4: in the picture as in the file."""
    names = ["1", "2", "3", "4", "a name that is longer than the picture is wide"]
    frame = pd.DataFrame({"label": names, "prediction": names[::-1]})
    counts = confusion_counts(frame, names).tolist()
    path = tmp_path / "confusion_matrix.json"
    path.write_text(json.dumps({"label_names": names, "counts": counts}))
    assert [drawn.name for drawn in draw(tmp_path)] == ["confusion_matrix.png"]
    axis = _confusion(path).axes[0]
    for labels in (axis.get_xticklabels(), axis.get_yticklabels()):
        assert [label.get_text() for label in labels] == [*"1234", names[4][:24]]


@pytest.mark.parametrize("names", [["train", "evaluate"], ["evaluate"]])
@pytest.mark.parametrize("trusted", [True, False])
def test_own_code_of_a_model_runs_only_where_this_run_trained_it(
    tmp_path, names, trusted
):
    folder = write_model(tmp_path / "own")
    entry = TransformersModel(filepath=str(folder))
    bootstrap_project(PROJECT)
    asked = {"model": {"trust_remote_code": trusted, "name_or_path": str(folder)}}
    session = KedroSession.create(PROJECT, env="test", runtime_params=asked)
    hooks = TrustHooks()
    hooks.after_context_created(session.load_context())
    made = {"train": train.create_pipeline(), "evaluate": create_pipeline()}
    run = sum((made[name] for name in names), start=Pipeline([]))
    hooks.before_pipeline_run(run, DataCatalog({"model": entry}))
    if trusted and "train" in names:
        assert type(entry.load()).__name__ == "OwnForSequenceClassification"
    else:
        with pytest.raises(DatasetError, match="trust_remote_code"):
            entry.load()
