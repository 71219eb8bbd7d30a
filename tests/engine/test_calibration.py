"""Calibration and thresholds, compared with NumPy, scikit-learn and plain
transformers."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from sklearn.metrics import f1_score
from transformers import AutoTokenizer

from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.parameters import ModelSettings, SettingsError
from flatout.engine.predict.calibrating import calibrate
from flatout.engine.predict.predicting import predict
from flatout.engine.predict.split_predictions import SplitPredictions
from flatout.engine.tasks import option_faults, task_class
from flatout.engine.tasks._shared.reliability import (
    MOST_SCALED,
    best_threshold,
    calibration_figures,
    fitted_temperature,
    outcomes,
)
from flatout.engine.tokenizing.tokenizer import TokenizerFile
from flatout.project.hooks.run import Run
from flatout.project.hooks.settings import SettingsHooks
from flatout.reports.pictures import reliability_figure
from flatout.tracking.logged_models import TextModel
from tests.engine.families import CONFIGS
from tests.make import exact_settings, save_random
from tests.pipelines.tokens import write_tokens

CLASSES, LABELS = "sequence-classification", "multi-label-classification"
ROWS, MAX_LENGTH = 110, 24


def drawn(kind: str, factor: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Return logits, and labels drawn with the probabilities of half these logits."""
    random = np.random.default_rng(3)
    logits = random.normal(0, 3, (600, 2 if kind == "binary" else 4)).astype("f4")
    if kind == "labels":
        labels = (random.random(logits.shape) < 1 / (1 + np.exp(-logits / 2))) * 1.0
    else:
        shares = np.exp(logits / 2) / np.exp(logits / 2).sum(1, keepdims=True)
        labels = np.array([random.choice(len(row), p=row) for row in shares])
    return logits * np.float32(factor), labels


def plain_error(shares: np.ndarray, hits: np.ndarray) -> float:
    """Return the expected calibration error, computed bin by bin."""
    total = 0.0
    for low in range(15):
        inside = (shares >= low / 15) & (shares < (low + 1) / 15 + (low == 14))
        if inside.any():
            gap = shares[inside].mean() - hits[inside].mean()
            total += inside.mean() * abs(gap)
    return total


def plain_shares(logits: np.ndarray, several: bool) -> np.ndarray:
    given = torch.from_numpy(logits).double()
    return (given.sigmoid() if several else given.softmax(-1)).numpy()


@pytest.mark.parametrize("kind", ["classes", "binary", "labels"])
def test_calibration_errors_are_those_of_numpy_and_fall(kind):
    logits, labels = drawn(kind)
    names = [f"n{number}" for number in range(logits.shape[1])]
    found = calibration_figures(logits, labels, 2.0, names)
    for suffix, divisor in (("_uncalibrated", 1), ("", 2)):
        shares = plain_shares(logits / divisor, kind == "labels")
        if kind == "classes":
            parts = [(shares.max(1), shares.argmax(1) == labels)]
        elif kind == "binary":
            parts = [(shares[:, 1], labels == 1)]
        else:
            parts = list(zip(shares.T, labels.T == 1, strict=True))
        errors = [plain_error(*part) for part in parts]
        assert found[f"calibration_error{suffix}"] == pytest.approx(np.mean(errors))
        if kind == "labels":
            by_name = found[f"calibration_errors{suffix}"]
            assert by_name == pytest.approx(dict(zip(names, errors, strict=True)))
    assert found["calibration_error"] < 0.7 * found["calibration_error_uncalibrated"]
    figure = reliability_figure(found)
    assert [line.name for line in figure.data] == ["calibrated", "T = 1", "T = 2"]
    rows = [int(text.split()[0].replace(",", "")) for text in figure.data[2].text]
    assert sum(rows) == labels.size
    assert len(reliability_figure({}).data) == 1


@pytest.mark.parametrize("kind", ["classes", "binary", "labels"])
def test_the_temperature_is_the_likeliest_and_grows_with_the_logits(kind):
    logits, labels = drawn(kind)
    found = fitted_temperature(logits, labels)
    assert found == pytest.approx(2, rel=0.15)
    assert fitted_temperature(*drawn(kind, 3)) == pytest.approx(3 * found, rel=1e-5)

    def loss(temperature: float) -> float:
        given, true = torch.from_numpy(logits) / temperature, torch.from_numpy(labels)
        if kind == "labels":
            call = torch.nn.functional.binary_cross_entropy_with_logits
            return call(given.double(), true.double()).item()
        return torch.nn.functional.cross_entropy(given.double(), true).item()

    assert loss(found) < min(loss(found * 1.01), loss(found / 1.01))


@pytest.mark.parametrize("kind", ["classes", "binary", "labels"])
def test_without_a_wrong_row_the_temperature_is_at_its_bound(kind):
    """The loss falls with the temperature, even where it is below the rounding error
    of the probabilities."""
    logits, labels = drawn(kind)
    right = labels == 1 if kind == "labels" else np.eye(logits.shape[1])[labels] == 1
    wrong = -6.0 if kind == "labels" else 1.0
    found = fitted_temperature(np.where(right, 6.0, wrong), labels)
    assert found == 1 / MOST_SCALED


def test_thresholds_are_those_of_a_search_with_scikit_learn():
    logits, labels = drawn("labels")
    for count in (3, 40, 200):
        shares, hits = (part[:count, 0] for part in outcomes(logits, labels))
        shares = np.round(shares, 2) if count == 40 else shares
        values = np.unique(shares)
        tried = (np.concatenate([[0], values[:-1]]) + values) / 2
        scores = np.array([f1_score(hits, shares > one) for one in tried])
        found = best_threshold(shares, hits)
        assert f1_score(hits, shares > found) == pytest.approx(scores.max())
        best = tried[np.isclose(scores, scores.max())]
        assert found == pytest.approx(best[np.abs(best - 0.5).argmin()])
    assert best_threshold(shares, np.zeros(200, bool)) is None


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    data = write_tokens(tmp_path_factory.mktemp("tokens"))
    return data / "06_models/tokenizer"


def saved(folder: Path, tokenizer: Path, task: str, names: list[str], factor=1.0):
    """Save a model with random weights whose logits are multiplied by `factor`."""
    config = {"model_type": "bert", **CONFIGS["bert"]}
    save_random(folder, tokenizer, ModelSettings(task=task, config=config), names)
    if factor != 1:
        model = load_pretrained(folder)
        for weight in model.classifier.parameters():
            weight.data *= factor
        model.save_pretrained(folder)
    return folder


def texts(seed: int) -> list[str]:
    random = np.random.default_rng(seed)
    return [
        " ".join(
            f"p{piece}" for piece in random.integers(5, 100, random.integers(3, 12))
        )
        for _ in range(ROWS)
    ]


def plain_logits(folder: Path, rows: list[str]) -> np.ndarray:
    model, known = load_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        return model(**known(rows, padding=True, return_tensors="pt")).logits.numpy()


def split_of(folder: Path, rows: list[str], task: str) -> Dataset:
    """Return tokens with labels drawn with the probabilities of half the model's
    logits."""
    logits, random = plain_logits(folder, rows) / 2, np.random.default_rng(7)
    if task == LABELS:
        hits = random.random(logits.shape) < plain_shares(logits, True)
        labels = pa.array(hits.astype("f4").tolist(), pa.list_(pa.float32(), 3))
    else:
        shares = plain_shares(logits, False)
        labels = pa.array([int(random.choice(len(row), p=row)) for row in shares])
    ids = AutoTokenizer.from_pretrained(folder)(rows)["input_ids"]
    ids = pa.array(ids, pa.list_(pa.int32()))
    return Dataset(pa.table({"input_ids": ids, "labels": labels}))


def settings_of(task: str, threshold: float | str = 0.5, calibrates: bool = False):
    return exact_settings(
        tokenize={"max_length": MAX_LENGTH},
        model={"task": task, "label_threshold": threshold, "name_or_path": "saved"},
        evaluate={"calibrate": calibrates},
        predict={"text_column": "text"},
    )


def fit(folder: Path, rows: Dataset, names: list[str], settings) -> dict:
    parts = load_pretrained(folder), TokenizerFile(folder)
    given = (rows, rows, names, settings.changed({"evaluate.split": "validation"}))
    calibrate(SplitPredictions(*parts, *given))
    return json.loads((folder / "calibration.json").read_text())


def predictions(folder: Path, rows: list[str], settings) -> pd.DataFrame:
    parts = load_pretrained(folder), TokenizerFile(folder)
    made = predict(*parts, pd.DataFrame({"text": rows}), settings)
    return pa.Table.from_batches(made.batches(), made.schema).to_pandas()


def test_an_overconfident_model_gets_three_times_the_temperature(tokenizer, tmp_path):
    names, settings = ["a", "b", "c"], settings_of(CLASSES, calibrates=True)
    plain = saved(tmp_path / "plain", tokenizer, CLASSES, names)
    loud = saved(tmp_path / "loud", tokenizer, CLASSES, names, factor=3.0)
    rows = split_of(plain, texts(1), CLASSES)
    found = [fit(folder, rows, names, settings) for folder in (plain, loud)]
    temperature = found[1]["temperature"]
    assert temperature == pytest.approx(3 * found[0]["temperature"], rel=0.05)
    written = (loud / "calibration.json").stat().st_mtime_ns
    assert fit(loud, rows, names, settings) == found[1]
    assert (loud / "calibration.json").stat().st_mtime_ns == written

    other = texts(2)
    logits = plain_logits(loud, other)
    shares = plain_shares(logits / temperature, False)
    wanted = [names[number] for number in logits.argmax(1)]
    answered = predictions(loud, other, settings_of(CLASSES))
    assert answered["label"].tolist() == wanted
    assert answered["score"].to_numpy() == pytest.approx(shares.max(1), abs=1e-5)
    served = TextModel(str(loud), "text-classification").predict(other)
    assert served["label"].tolist() == wanted
    assert served["score"].to_numpy() == pytest.approx(shares.max(1), abs=1e-5)

    test = split_of(plain, other, CLASSES)
    parts = load_pretrained(loud), TokenizerFile(loud)
    judged = SplitPredictions(*parts, test, test, names, settings)
    report, table = judged.value(), judged.table().to_pandas()
    assert table["prediction"].tolist() == wanted
    assert table["score"].to_numpy() == pytest.approx(shares.max(1), abs=1e-5)
    hits = shares.argmax(1) == np.array(test["labels"])
    assert report["calibration_error"] == pytest.approx(
        plain_error(shares.max(1), hits), abs=1e-4
    )
    assert report["temperature"] == temperature
    assert report["calibration_error"] < report["calibration_error_uncalibrated"]


def test_served_models_name_each_label_that_predict_names(tokenizer, tmp_path):
    """There may be any number of labels, even one, and no fitted thresholds."""
    for names in (["a", "b", "c"], ["a"]):
        place = tmp_path / str(len(names))
        folder = saved(place, tokenizer, LABELS, names, factor=2.0)
        given = plain_shares(plain_logits(folder, texts(2)), True) > 0.5
        shown = [", ".join(np.array(names)[row]) for row in given]
        served = TextModel(str(folder), "text-classification").predict(texts(2))
        assert served["label"].tolist() == shown
        answered = predictions(folder, texts(2), settings_of(LABELS))
        assert [", ".join(row) for row in answered["label"]] == shown


@pytest.mark.parametrize("calibrates", [False, True])
@pytest.mark.parametrize("task", [CLASSES, LABELS])
def test_picked_thresholds_decide_wherever_the_model_answers(
    tokenizer, tmp_path, task, calibrates
):
    names = ["a", "b", "c"] if task == LABELS else ["no", "yes"]
    settings = settings_of(task, "auto", calibrates)
    folder = saved(tmp_path / "model", tokenizer, task, names, factor=2.0)
    with pytest.raises(SettingsError, match="no thresholds yet: run kedro run"):
        predictions(folder, ["p5"], settings)
    rows = split_of(folder, texts(1), task)
    found = fit(folder, rows, names, settings)
    assert (found["temperature"] == 1) is not calibrates
    assert list(found["thresholds"]) == (names if task == LABELS else ["yes"])

    def shares_of(rows: list[str]) -> np.ndarray:
        logits = plain_logits(folder, rows) / found["temperature"]
        shares = plain_shares(logits, task == LABELS)
        return shares if task == LABELS else shares[:, 1:]

    cuts = np.array(list(found["thresholds"].values()))
    true = np.array(rows["labels"]).reshape(ROWS, -1)
    for shares, hits, cut in zip(shares_of(texts(1)).T, true.T, cuts, strict=True):
        tried = [f1_score(hits, shares > one) for one in np.linspace(0.01, 0.99, 99)]
        assert f1_score(hits, shares > cut) >= max(tried) - 1e-9

    other = texts(2)
    given = shares_of(other) > cuts
    chosen = [names[int(row[0])] for row in given]
    if task == LABELS:
        chosen = [[n for n, on in zip(names, row, strict=True) if on] for row in given]
    answered = predictions(folder, other, settings)
    assert [x if task == CLASSES else list(x) for x in answered["label"]] == chosen
    test = split_of(folder, other, task)
    parts = load_pretrained(folder), TokenizerFile(folder)
    judged = SplitPredictions(*parts, test, test, names, settings)
    shown = chosen if task == CLASSES else [", ".join(row) for row in chosen]
    assert judged.table()["prediction"].to_pylist() == shown
    assert judged.value()["label_thresholds"] == found["thresholds"]
    guess = given if task == LABELS else given[:, 0]
    expected = f1_score(np.array(test["labels"]), guess, average="macro")
    assert judged.value()["f1_macro"] == pytest.approx(expected)
    served = TextModel(str(folder), "text-classification").predict(other)
    assert served["label"].tolist() == shown
    if task == CLASSES:
        of_yes = shares_of(other)[:, 0]
        scores = np.where(given[:, 0], of_yes, 1 - of_yes)
        assert served["score"].to_numpy() == pytest.approx(scores, abs=1e-5)


def test_a_temperature_changes_no_label_of_a_number_as_threshold(tokenizer, tmp_path):
    settings = settings_of(LABELS, 0.3, calibrates=True)
    names = ["a", "b", "c"]
    folder = saved(tmp_path, tokenizer, LABELS, names)
    rows = texts(1)
    before = predictions(folder, rows, settings)
    fit(folder, split_of(folder, rows, LABELS), names, settings)
    after = predictions(folder, rows, settings)
    assert [*map(list, before["label"])] == [*map(list, after["label"])]
    assert not np.allclose(before["probability_a"], after["probability_a"])


def test_thresholds_do_not_depend_on_earlier_calibrations(tokenizer, tmp_path):
    names, picks = ["no", "yes"], settings_of(CLASSES, "auto")
    folders = [
        saved(tmp_path / place, tokenizer, CLASSES, names, factor=3.0) for place in "ab"
    ]
    rows = split_of(folders[0], texts(1), CLASSES)
    plain = fit(folders[0], rows, names, picks)
    fit(folders[0], rows, names, settings_of(CLASSES, calibrates=True))
    with pytest.raises(SettingsError, match=r"evaluate.calibrate: true to fit both"):
        fit(folders[0], rows, names, picks)
    both = settings_of(CLASSES, "auto", calibrates=True)
    later, once = (fit(folder, rows, names, both) for folder in folders)
    assert later["temperature"] == once["temperature"] != plain["temperature"] == 1
    assert later["thresholds"] == once["thresholds"]
    (folders[0] / "calibration.json").unlink()
    assert fit(folders[0], rows, names, picks) == plain


def test_what_cannot_be_calibrated_is_refused(tokenizer, tmp_path):
    names = ["a", "b", "c"]
    folder = saved(tmp_path / "model", tokenizer, CLASSES, names)
    rows = split_of(folder, texts(1), CLASSES)
    asks = settings_of(CLASSES, calibrates=True)
    with pytest.raises(SettingsError, match=r"at least 100 validation.*are 99: e"):
        fit(folder, rows.select(range(99)), names, asks)
    hooks, node = SettingsHooks(run := Run()), SimpleNamespace(short_name="train_model")
    run.settings = asks
    with pytest.raises(SettingsError, match="there are 9: e"):  # before the training
        hooks.before_node_run(node, {"validation_tokens": rows.select(range(9))})
    picks = settings_of(CLASSES, "auto")
    with pytest.raises(SettingsError, match=r"label_threshold: auto.*there are 0: enl"):
        fit(folder, rows.select([]), names, picks)
    with pytest.raises(SettingsError, match=r"auto is for two classes.*has 3 classes"):
        fit(folder, rows, names, picks)
    model = load_pretrained(folder)
    model.config.name_or_path = model.name_or_path = "somebody/model"
    with pytest.raises(ModelError, match="somebody/model is not a folder"):
        known = (TokenizerFile(folder), rows, rows, names, asks)
        calibrate(SplitPredictions(model, *known))
    assert not (folder / "calibration.json").exists()

    number = settings_of("regression", "auto", calibrates=True)
    faults = "\n".join(option_faults(number, task_class("regression")))
    assert "evaluate.calibrate: true needs a probability" in faults
    assert "label_threshold: auto needs a probability" in faults
    labels = pa.array(np.arange(ROWS, dtype="f4"))
    folder = saved(tmp_path / "number", tokenizer, "regression", [])
    numbers = Dataset(pa.table({"input_ids": rows.data["input_ids"], "labels": labels}))
    with pytest.raises(SettingsError, match="regression does not have: set it to f"):
        fit(folder, numbers, [], number)
