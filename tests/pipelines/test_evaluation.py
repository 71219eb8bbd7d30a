"""The evaluate pipeline with the project's catalog, compared with transformers and
scikit-learn."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pandas as pd
import pytest
import torch
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import Pipeline
from kedro.runner import SequentialRunner
from sklearn import metrics
from transformers import AutoTokenizer

from flatout.datasets import TransformersModel
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.models.trained_rows import TrainedRows, row_hashes
from flatout.engine.parameters import ModelSettings
from flatout.engine.predict.judgement import (
    baseline_figures,
    class_table,
    confusion,
)
from flatout.engine.rows.rows import open_rows
from flatout.engine.tokenizing.token_keys import token_key
from flatout.pipelines import train
from flatout.pipelines.evaluate import create_pipeline
from flatout.project.hooks import DataHooks, Run
from tests.engine.families import CONFIGS, LABEL_NAMES, VOCABULARY, task_of
from tests.engine.remote_code import write_model
from tests.make import plain_logits, save_random
from tests.pipelines.tokens import write_tokens
from tests.projects import context_of

SPECIAL = replace(VOCABULARY, special_token_ids=(0, 3, 4))
"""The special tokens of the tokenizer of `write_tokens`."""
CLASSES, LANGUAGE = "sequence-classification", "causal-lm"


def saved_model(data: Path, family: str, task: str) -> Path:
    folder, config = data / "06_models/model", {"model_type": family, **CONFIGS[family]}
    shutil.rmtree(folder, ignore_errors=True)
    settings = ModelSettings(task=task, config=config)
    names = LABEL_NAMES if task == CLASSES else []
    return save_random(folder, data / "06_models/tokenizer", settings, names)


def evaluate(data: Path, task: str = CLASSES, split: str = "test", **runtime):
    """Run the pipeline, and return the catalog with the results."""
    names = json.dumps(LABEL_NAMES if task == CLASSES else [])
    (data / "06_models/label_names.json").write_text(names)
    asked = {"data_dir": str(data), "model": {"task": task}, "runtime": runtime}
    asked |= {"evaluate": {"split": split, "wrong_rows": 3}}
    catalog = context_of("test", runtime_params=asked).catalog
    SequentialRunner().run(create_pipeline(), catalog)
    return catalog


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("data"))


@pytest.mark.parametrize("split", ["test", "validation"])
def test_figures_are_those_of_sklearn_on_what_transformers_predicts(data, split):
    folder = saved_model(data, "bert", CLASSES)
    catalog = evaluate(data, split=split)
    rows = open_rows(data / f"05_model_input/{split}_tokens")
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


def test_a_language_model_has_figures_and_no_rows(data):
    folder = saved_model(data, "gpt2", LANGUAGE)
    catalog = evaluate(data, LANGUAGE)
    rows = open_rows(data / "05_model_input/test_tokens")
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


def test_a_masked_model_is_judged_on_the_masks_of_its_training(data):
    """This is computed by transformers on the tokens that training with this seed
    masks."""
    folder = saved_model(data, "bert", "masked-lm")
    model = load_pretrained(folder).eval()
    rows = open_rows(data / "05_model_input/test_tokens")
    for seed in (7, 42):
        task = task_of("masked-lm", seed, SPECIAL)
        found = task.targets(rows, np.arange(len(rows)), 0, pools_last=False)
        losses = []
        for ids, at, labels in zip(
            found.values, found.places, found.labels, strict=True
        ):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids.tolist()])).logits[0]
            true = torch.tensor(labels.tolist())
            losses += torch.nn.functional.cross_entropy(
                logits[torch.tensor(at.tolist())], true, reduction="none"
            ).tolist()
        report = evaluate(data, "masked-lm", seed=seed).load("evaluation_report")
        assert report["loss"] == pytest.approx(np.mean(losses), rel=1e-5)


def test_the_seed_is_that_of_the_training(data):
    folder = saved_model(data, "bert", "masked-lm")
    by_seed = [
        evaluate(data, "masked-lm", seed=seed).load("test_figures")["loss"]
        for seed in (3, 4)
    ]
    TrainedRows("k", 3, 1, np.zeros(1, np.uint64)).save_pretrained(folder)
    known = evaluate(data, "masked-lm", seed=4).load("test_figures")["loss"]
    assert by_seed[0] != by_seed[1]
    assert known == by_seed[0]


def split_anew(data: Path, seed: int) -> dict[str, list[tuple[int, ...]]]:
    """Split the same rows with another seed, and return the rows by split."""
    together = datasets.concatenate_datasets(
        [
            datasets.load_from_disk(
                f"{data}/05_model_input/{name}_tokens", keep_in_memory=True
            )
            for name in SPLITS
        ]
    ).shuffle(seed)
    found, start = {}, 0
    for name, count in SPLITS.items():
        part = together.select(range(start, start + count)).flatten_indices()
        folder = data / f"05_model_input/{name}_tokens"
        shutil.rmtree(folder)
        part.save_to_disk(str(folder))
        found[name] = [tuple(ids) for ids in part["input_ids"]]
        start += count
    return found


SPLITS = {"train": 48, "validation": 12, "test": 12}


def test_rows_that_were_trained_on_are_counted_in_another_split(tmp_path):
    """The rows are counted with Python's sets. The report of the original split stays
    valid."""
    data = write_tokens(tmp_path)
    then = split_anew(data, 1)
    folder = saved_model(data, "bert", CLASSES)
    train = datasets.load_from_disk(f"{data}/05_model_input/train_tokens")
    TrainedRows.of(train, token_key(train), 42).save_pretrained(folder)
    for split in ("test", "train"):
        seen = len([ids for ids in then[split] if ids in set(then["train"])])
        report = evaluate(data, split=split).load("evaluation_report")
        assert report["trained_on"] == seen
    kept = (data / "08_reporting/evaluation_report.json").read_bytes()

    now = split_anew(data, 2)
    seen = len([ids for ids in now["test"] if ids in set(then["train"])])
    assert seen > 4
    with pytest.raises(ModelError, match=f"{seen} of 12 test rows were trained on"):
        evaluate(data)
    assert (data / "08_reporting/evaluation_report.json").read_bytes() == kept


@pytest.mark.parametrize("known", [True, False])
def test_rows_of_other_data_are_judged_if_their_number_is_known(tmp_path, known):
    data = write_tokens(tmp_path)
    folder = saved_model(data, "bert", CLASSES)
    other = open_rows(data / "05_model_input/train_tokens")
    hashes = np.unique(row_hashes(other)) + np.uint64(1) if known else None
    TrainedRows("of other data", 42, 48, hashes).save_pretrained(folder)
    if known:
        assert evaluate(data).load("evaluation_report")["trained_on"] == 0
    else:
        with pytest.raises(ModelError, match="an unknown number of 12 test rows"):
            evaluate(data)


def test_another_model_or_precision_predicts_otherwise(data):
    file = data / "07_model_output/test_predictions.parquet"
    losses = []
    for family, precision in (("roberta", "fp32"), ("bert", "fp32"), ("bert", "bf16")):
        saved_model(data, family, CLASSES)
        evaluate(data, precision=precision)
        losses.append(pd.read_parquet(file)["loss"])
    other, exact, rounded = losses
    assert not exact.equals(other) and not rounded.equals(exact)
    assert rounded.to_numpy() == pytest.approx(exact.to_numpy(), rel=0.1, abs=0.1)


def test_sets_of_labels_have_a_majority_and_numbers_none():
    sets = pd.DataFrame({"label": ["a, b", "", "a, b", "b"]})
    assert baseline_figures(sets, pd.DataFrame()) == {
        "majority_label": "a, b",
        "majority_accuracy": 0.5,
    }
    assert baseline_figures(sets[:0], pd.DataFrame()) == {}
    assert baseline_figures(pd.DataFrame({"label": [1.0, 4.0]}), pd.DataFrame()) == {}


def test_a_class_that_is_never_predicted_is_told_of(caplog):
    frame = pd.DataFrame({"label": list("aabc"), "prediction": list("aaba")})
    assert confusion(frame, LABEL_NAMES) == [[2, 0, 0], [0, 1, 0], [1, 0, 0]]
    classes = class_table(frame, LABEL_NAMES)
    figures = baseline_figures(frame, classes)
    assert figures == {
        "majority_label": "a",
        "majority_accuracy": 0.5,
        "never_predicted": ["c"],
    }
    assert "classes that are never predicted: 1 ('c')" in caplog.text
    assert classes["f1"].tolist() == [0.8, 1.0, 0.0]


def test_a_matrix_of_twenty_thousand_classes_is_left_out():
    names = [f"c{number}" for number in range(20_000)]
    drawn = np.random.default_rng(0).integers(0, 20_000, (2, 50_000))
    drawn[1, ::2] = drawn[0, ::2]
    frame = pd.DataFrame({"label": drawn[0], "prediction": drawn[1]})
    frame = "c" + frame.astype(str)
    assert confusion(frame, names) == []
    expected = metrics.precision_recall_fscore_support(
        *drawn, labels=range(20_000), zero_division=0
    )
    found = class_table(frame, names)
    columns = ("precision", "recall", "f1", "rows")
    for name, values in zip(columns, expected, strict=True):
        np.testing.assert_allclose(found[name], values, rtol=1e-12)


@pytest.mark.parametrize("names", [["train", "evaluate"], ["evaluate"]])
@pytest.mark.parametrize("trusted", [True, False])
def test_own_code_of_a_model_runs_only_where_this_run_trained_it(
    tmp_path, names, trusted
):
    folder = write_model(tmp_path / "own")
    entry = TransformersModel(filepath=str(folder))
    asked = {"model": {"trust_remote_code": trusted, "name_or_path": str(folder)}}
    (run := Run()).begin(context_of("test", runtime_params=asked))
    hooks, catalog = DataHooks(run), DataCatalog({"model": entry})
    hooks.after_catalog_created(catalog, {})
    made = {"train": train.create_pipeline(), "evaluate": create_pipeline()}
    both = sum((made[name] for name in names), start=Pipeline([]))
    hooks.before_pipeline_run(both, catalog)
    if trusted and "train" in names:
        assert type(entry.load()).__name__ == "OwnForSequenceClassification"
    else:
        with pytest.raises(DatasetError, match="trust_remote_code"):
            entry.load()
