"""A custom task and a custom family in every pipeline."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch
from transformers import AutoTokenizer

from flatout.datasets import TextFiles
from flatout.engine.data.raw_texts import open_raw_texts
from flatout.engine.data.split_recipes import plan_split
from flatout.engine.models.building import load_pretrained
from flatout.engine.parameters import parse_settings
from flatout.engine.tasks import columns_of
from tests.conftest import PROJECT
from tests.own_family import ToyForSequenceClassification
from tests.projects import copied_conf, interrupted, ran, write_environment
from tests.test_packaging import AS_MODULE

pytestmark = pytest.mark.process

WORDS = "stock price falls after weak report while team wins a late match".split()
PARAMETERS = {
    "model": {
        "task": "tests.own_task.TwoNumbers",
        "family": "tests.own_family",
        "config": {"model_type": "toy"},
    },
    "tokenize": {"vocab_size": 100},
    "train": {"max_steps": 120, "epochs": 20, "batching": "packed"},
    "predict": {"strategy": "packed"},
    "benchmark": {"mode": "grid", "min_window_s": 0, "repeats": 1}
    | {"batch_sizes": [16], "num_workers": [0], "strategies": ["packed"]},
}
FILES = ("own.csv", "own.jsonl", "own.parquet")


@pytest.fixture(scope="module")
def frame() -> pd.DataFrame:
    """Return texts with the number of occurrences of two words."""
    chance = random.Random(0)
    texts = [chance.choices(WORDS, k=chance.randint(3, 25)) for _ in range(400)]
    return pd.DataFrame(
        {
            "text": [" ".join(words) for words in texts],
            "label": [[w.count("price") / 1, w.count("team") / 2] for w in texts],
        }
    )


@pytest.fixture(scope="module")
def conf(frame, tmp_path_factory) -> Path:
    """A copy of conf/test in which a user has set a custom task and family."""
    folder = tmp_path_factory.mktemp("own")
    frame.to_parquet(folder / "own.parquet")
    frame.to_json(folder / "own.jsonl", orient="records", lines=True)
    frame.assign(label=frame["label"].map(json.dumps)).to_csv(
        folder / "own.csv", index=False
    )
    file = str(folder / "own.jsonl")
    entry = {"type": "flatout.datasets.TextFiles", "filepath": file}
    write_environment(copied_conf(folder), "own", PARAMETERS, {"raw_texts": entry})
    return folder / "conf"


def command(conf: Path, data: Path, *options: str) -> list[str]:
    where = (f"--conf-source={conf}", f"--params=data_dir={data},runtime.threads=1")
    return ["run", "--env=own", *where, *options]


def run(*arguments) -> str:
    return ran(*command(*arguments), PYTHONPATH=str(PROJECT))


@pytest.fixture(scope="module")
def finished(conf, empty_store) -> Path:
    """The data folder of a whole `kedro run`."""
    data = conf.parent / "data"
    data.mkdir()
    shutil.copy(empty_store, data / "mlflow.db")
    run(conf, data)
    return data


@pytest.mark.parametrize("file", FILES)
def test_lists_of_numbers_are_read_from_every_kind_of_file(conf, frame, file):
    raw = open_raw_texts(TextFiles(filepath=str(conf.parent / file)).load())
    settings = parse_settings({"model": PARAMETERS["model"]})
    columns = columns_of(settings.split, settings.model.task)
    made, found = plan_split(raw, columns, settings.split), {}
    for split in ("train", "validation", "test"):
        rows = made[f"{split}_rows"].to_dataset()
        found |= dict(zip(rows["text"], rows["label"], strict=True))
    assert found == dict(zip(frame["text"], frame["label"], strict=True))


@pytest.mark.slow
def test_neither_the_task_nor_its_labels_load_torch(conf, empty_store, tmp_path):
    shutil.copy(empty_store, tmp_path / "mlflow.db")
    split = ["kedro", *command(conf, tmp_path, "--pipelines=split")]
    done = subprocess.run(
        [sys.executable, "-c", AS_MODULE, *split],
        cwd=PROJECT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "imported: []" in done.stdout


def test_it_trains_and_predicts_as_its_own_model_does(finished, conf):
    report = json.loads((finished / "08_reporting/train_report.json").read_text())
    assert report["strategy"] == "packed" and report["padding_pct"] == 0
    assert report["final_loss"] < report["initial_loss"]
    run(conf, finished, "--pipelines=predict")
    found = pd.read_parquet(finished / "07_model_output/predictions.parquet")
    folder = finished / "06_models/model"
    model = load_pretrained(folder).eval()
    assert type(model) is ToyForSequenceClassification
    tokenizer = AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        rows = [
            model(tokenizer(text, return_tensors="pt")["input_ids"]).logits[0]
            for text in found["text"]
        ]
    expected = torch.stack(rows).numpy()
    assert found[["first", "second"]].to_numpy() == pytest.approx(expected, abs=1e-5)
    assert expected.std(0).min() > 1e-3


def test_it_is_evaluated_behind_the_training(finished):
    """The evaluation of the saved model gives the same loss as the training run."""
    reports = finished / "08_reporting"
    train = json.loads((reports / "train_report.json").read_text())
    found = json.loads((reports / "evaluation_report.json").read_text())
    assert found["loss"] == pytest.approx(train["test_loss"], rel=1e-5)
    rows = pd.read_parquet(finished / "07_model_output/test_predictions.parquet")
    losses = [
        sum((a - b) ** 2 for a, b in zip(*map(_numbers, pair), strict=True))
        for pair in zip(rows["label"], rows["prediction"], strict=True)
    ]
    assert rows["loss"].to_numpy() == pytest.approx(losses, rel=0.02, abs=0.02)
    wrong = pd.read_csv(reports / "wrong_predictions.csv")
    assert wrong["loss"].is_monotonic_decreasing


def _numbers(text: str) -> list[float]:
    return [float(number) for number in text.split()]


def test_it_goes_on_bit_for_bit(finished, conf, tmp_path):
    kept = shutil.ignore_patterns("08_reporting", "checkpoints", "model", "last_model")
    shutil.copytree(finished, tmp_path / "data", ignore=kept)
    arguments = command(conf, tmp_path / "data", "--pipelines=train")
    points, log = tmp_path / "data/08_reporting/train_metrics.jsonl", tmp_path / "log"
    trains = lambda: points.is_file() and "grad_norm" in points.read_text()  # noqa: E731
    status = interrupted(arguments, log, trains, 15, PYTHONPATH=str(PROJECT))
    assert status == 143, log.read_text()
    run(conf, tmp_path / "data", "--pipelines=train")
    histories = [
        pd.read_csv(data / "08_reporting/train_history.csv")
        for data in (finished, tmp_path / "data")
    ]
    exact = ["step", "loss", "learning_rate", "grad_norm"]
    assert histories[0][exact].equals(histories[1][exact])


@pytest.mark.slow
def test_its_steps_are_benchmarked(finished, conf):
    run(conf, finished, "--pipelines=benchmark")
    trials = pd.read_csv(finished / "08_reporting/benchmark_trials.csv")
    assert trials["kind"].tolist() == ["end_to_end", "end_to_end"]
    assert set(trials["status"]) == {"ok"}


def test_the_page_shows_the_task_as_it_is():
    code = (PROJECT / "tests/own_task.py").read_text()
    assert f"```python\n{code}```" in (PROJECT / "docs/own_task.md").read_text()
    assert len(code.splitlines()) < 60
