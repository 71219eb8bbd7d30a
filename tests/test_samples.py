"""Images, from files to metrics, with the commands that users run."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from kedro.framework.project import pipelines
from kedro_viz.integrations.kedro.data_loader import load_data
from mlflow import MlflowClient
from PIL import Image
from sklearn import metrics
from transformers import pipeline

from flatout.tracking.follow import sync
from tests.conftest import PROJECT
from tests.engine.test_images import pictures
from tests.projects import ran, runs_of

pytestmark = pytest.mark.process
ASKED = (
    "images.channels=3,split.max_rejected_fraction=0.1,runtime.threads=1,"
    "train.epochs=3,train.log_every=1"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory, empty_store) -> Path:
    """The data folder after a whole run of --env=images and a prediction."""
    data = tmp_path_factory.mktemp("images")
    shutil.copy(empty_store, data / "mlflow.db")
    raw = pictures(data / "01_raw/digits", 200)
    (raw / "dark/empty.png").write_bytes(b"")
    noise = np.random.default_rng(6).integers(0, 120, (8, 8, 3)).astype(np.uint8)
    (raw / "light/odd.png").unlink(missing_ok=True)
    Image.fromarray(noise).save(raw / "light/odd.png")
    asked = "--pipelines=images,train,evaluate,predict"
    ran("run", "--env=images", asked, f"--params=data_dir={data},{ASKED}")
    sync(data / "08_reporting/tracking")  # a busy machine may need more than 20 s
    return data


def report(data: Path, name: str):
    return json.loads((data / "08_reporting" / name).read_text())


def test_figures_are_those_of_the_predictions(finished):
    table = pd.read_parquet(finished / "07_model_output/test_predictions.parquet")
    right = metrics.accuracy_score(table["label"], table["prediction"])
    assert report(finished, "evaluation_report.json")["accuracy"] == right
    assert report(finished, "train_report.json")["test_accuracy"] == right
    wrong = pd.read_csv(finished / "08_reporting/wrong_predictions.csv")
    assert len(wrong) == (table["prediction"] != table["label"]).sum()
    assert all(wrong["source"].str.endswith(".png"))
    card = (finished / "06_models/model/README.md").read_text()
    assert f"| accuracy | {right:.4f} |" in card


def test_mlflow_has_the_sheet_and_the_model(finished):
    store = f"sqlite:///{finished}/mlflow.db"
    client = MlflowClient(store, store)
    [run] = [r for r in runs_of(store) if "test_accuracy" in r.data.metrics]
    files = {a.path for a in client.list_artifacts(run.info.run_id)}
    assert "wrong_images.png" in files
    version = client.get_model_version_by_alias("flatout", "champion")
    assert version.run_id == run.info.run_id
    sheet = Image.open(finished / "08_reporting/wrong_images.png")
    assert sheet.width > 1000


def test_every_file_is_predicted_or_told_of(finished):
    table = pd.read_parquet(finished / "07_model_output/predictions.parquet")
    assert len(table) == 202
    told = table[table["reason"].notna()]
    assert told["source"].tolist() == ["dark/empty.png"]
    rejected = pd.read_parquet(finished / "02_intermediate/rejected_images.parquet")
    assert rejected["source"].tolist() == ["dark/empty.png"]
    assert set(table["label"].dropna()) <= {"dark", "light"}


def test_transformers_reads_the_images_as_the_model_was_trained_to(finished):
    table = pd.read_parquet(finished / "07_model_output/predictions.parquet")
    classify = pipeline("image-classification", model=str(finished / "06_models/model"))
    for row in table[table["reason"].isna()].head(5).itertuples():
        answers = classify(str(finished / "01_raw/digits" / row.source))
        found = {answer["label"]: answer["score"] for answer in answers}
        expected = {"dark": row.probability_dark, "light": row.probability_light}
        assert found == pytest.approx(expected, abs=1e-3)


def test_kedro_viz_shows_the_sheet(finished):
    pipelines.set_requested(None)
    options = {"env": "images", "extra_params": {"data_dir": str(finished)}}
    catalog, shown, _ = load_data(PROJECT, **options)
    assert "wrong_images" in shown["__default__"].outputs()
    assert "train_images" in shown["train"].inputs()
    assert len(catalog.get("wrong_images").preview()) > 1000


def test_the_guard_compares_a_second_training_with_the_first(finished):
    """This test is the last one, because it replaces the model."""
    params = f"--params=data_dir={finished},{ASKED},train.resume=never"
    ran("run", "--env=images", "--pipelines=train", params)
    runs = sorted(runs_of(finished), key=lambda run: run.info.start_time)
    trained = [run for run in runs if "guard" in run.data.tags]
    first, second = (run.data.tags["guard"] for run in trained)
    assert first == "first"
    assert second in ("healthy", "busy", "slow")
    lines = (finished / "08_reporting/runs.jsonl").read_text().splitlines()
    first_id = json.loads(lines[0])["run_id"]
    assert trained[1].data.tags["guard_baseline"] == first_id
