"""The model card, the upload to a simulated Hub, and MLflow's model server."""

import json
import os
import sys
import urllib.request
from pathlib import Path

import huggingface_hub
import numpy as np
import pandas as pd
import pytest
from huggingface_hub import HfApi, ModelCard
from mlflow import MlflowClient
from scipy.stats import bootstrap

from flatout.datasets import TransformersModel
from flatout.engine.export import hub
from flatout.engine.files.calibration import Calibration
from flatout.engine.models.building import ModelError, load_pretrained
from flatout.engine.models.trained_rows import TrainedRows
from flatout.engine.parameters import parse_settings
from flatout.project.saved_model import write_own_card
from flatout.tracking.logged_models import log_text_model
from tests import warm
from tests.conftest import PROJECT
from tests.engine.test_export import CLASSES, TEXTS, Made
from tests.hub import Hub
from tests.projects import ran
from tests.servers import free_port, wait_for

NEW = {"public": False, "force": False}


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """A data folder with a model and its reports."""
    data = tmp_path_factory.mktemp("data")
    made = Made(data, "bert", CLASSES)
    config = json.loads((made.folder / "config.json").read_text())
    text = json.dumps({**config, "flatout_task": CLASSES})
    (made.folder / "config.json").write_text(text)
    TrainedRows("k3y", 3, 48, np.arange(4, dtype=np.uint64)).save_pretrained(
        made.folder
    )
    Calibration(1.7, {"b": 0.3}).save(made.folder)
    wrong = np.arange(100) < 30
    table = pd.DataFrame({"loss": np.linspace(0, 2, 100), "wrong": wrong})
    (data / "07_model_output").mkdir()
    table.to_parquet(data / "07_model_output/test_predictions.parquet")
    judged = {"accuracy": 0.7, "loss": 1.0, "f1_macro": 0.6, "rows": 100}
    judged |= {"split": "test", "calibration_error": 0.02}
    trained = {"samples_per_s": 1234.5, "device": "CPU", "versions": {"torch": "2.13"}}
    (data / "08_reporting").mkdir()
    for name, report in {"evaluation": judged, "train": trained}.items():
        path = data / f"08_reporting/{name}_report.json"
        path.write_text(json.dumps(report))
    return data


@pytest.fixture
def server(monkeypatch):
    """A simulated Hub, which this process may connect to."""
    found = Hub()
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_DISABLE_XET", True)
    whole = HfApi.__init__

    def here(self, *args, **options):
        whole(self, *args, **{**options, "endpoint": found.url})

    monkeypatch.setattr(HfApi, "__init__", here)
    yield found
    found.shutdown()
    found.server_close()


def test_the_card_tells_what_is_known(data, tmp_path):
    folder = data / "06_models/model"
    command = ["kedro", "run", "--params=a=b c,source=sql://ann:s3cret@host/x"]
    hub.write_card(folder, "a/b", data / "08_reporting", command)
    card = ModelCard.load(folder / "README.md")
    assert card.data.pipeline_tag == "text-classification"
    assert (card.data.library_name, card.data.tags) == ("transformers", ["flatout"])
    known = bootstrap((np.arange(100) >= 30,), np.mean, random_state=0)
    line = next(line for line in card.text.splitlines() if "| accuracy" in line)
    half = float(line.split("±")[1].strip(" |"))
    assert half == pytest.approx(1.96 * known.standard_error, rel=0.05)
    for text in (
        "sequence-classification, with a model of type bert",
        "kedro run '--params=a=b c,source=sql://ann:***@host/x'",
        *("48 train rows, key `k3y`", "| f1_macro | 0.6000 |  |", "temperature 1.7"),
        *("{'b': 0.3}", "| calibration_error | 0.0200 |", "samples_per_s 1,234.5"),
        "{'torch': '2.13'}",
    ):
        assert text in card.text
    own = "# my own words\n"
    (folder / "README.md").write_text(own)
    hub.write_card(folder, "a/b", data / "08_reporting", ["kedro", "run"])
    assert (folder / "README.md").read_text() == own
    (folder / "README.md").unlink()


def test_a_command_is_quoted_and_a_folder_without_write_access_is_named(
    data, monkeypatch, caplog
):
    folder = data / "06_models/model"
    entry = TransformersModel(filepath=str(folder))
    metrics = str(data / "08_reporting/train_metrics.jsonl")
    own = parse_settings({"paths": {"metrics": metrics}})
    monkeypatch.setattr(sys, "argv", ["kedro", "run", "--params=a=b c"])
    write_own_card(entry, "a/b", own)
    assert "kedro run '--params=a=b c'" in (folder / "README.md").read_text()
    (folder / "README.md").unlink()

    def refuse(*_):
        raise PermissionError("Permission denied")

    monkeypatch.setattr(hub, "write_text", refuse)
    write_own_card(entry, "a/b", own)
    assert f"{folder} has no model card: Permission denied" in caplog.text


def test_reports_of_an_earlier_model_are_left_out(data):
    folder = data / "06_models/model"
    config = folder / "config.json"
    before = config.stat().st_mtime_ns
    os.utime(config, ns=(before + 10**12, before + 10**12))
    hub.write_card(folder, "a/b", data / "08_reporting", ["kedro", "run"])
    assert "accuracy" not in (folder / "README.md").read_text()
    os.utime(config, ns=(before, before))
    (folder / "README.md").unlink()


def test_only_models_of_flatout_get_a_card(tmp_path):
    with pytest.raises(ModelError, match=r"has no model to push: train one"):
        hub.write_card(tmp_path, "a/b", tmp_path, ["kedro", "run"])
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ModelError, match="another tool: push it with `hf upload`"):
        hub.write_card(tmp_path, "a/b", tmp_path, ["kedro", "run"])
    entry = TransformersModel(filepath=str(tmp_path))
    write_own_card(entry, "a/b", parse_settings({}))
    assert not (tmp_path / "README.md").exists()


def test_a_repository_is_private_complete_and_not_overwritten(data, server):
    folder = data / "06_models/model"
    assert hub.push(folder, "me/one", "hf_right", **NEW).startswith(server.url)
    assert server.private == {"me/one": True}
    stored = {n: c for n, c in server.files["me/one"].items() if n[0] != "."}
    assert stored == {n: p.read_bytes() for n, p in hub.files_of(folder).items()}
    server.files["me/one"]["other.bin"] = b"theirs"
    commits = sum("/commit/" in asked for asked in server.asked)
    with pytest.raises(ModelError, match=r"has content \(.*--force"):
        hub.push(folder, "me/one", "hf_right", **NEW)
    assert sum("/commit/" in asked for asked in server.asked) == commits
    hub.push(folder, "me/one", "hf_right", public=False, force=True)
    assert {n for n in server.files["me/one"] if n[0] != "."} == {*stored}


@pytest.mark.parametrize(
    ("repository", "token", "message"),
    [
        ("me/one", "hf_wrong", "was not pushed: .*token's rights"),
        ("me/one", None, r"needs a token.*HF_TOKEN.*credentials\.yml"),
        ("no such name", "hf_right", "was not pushed: .*Check the name"),
    ],
)
def test_a_refused_push_says_why(data, server, monkeypatch, repository, token, message):
    monkeypatch.setattr(hub, "get_token", lambda: None)
    with pytest.raises(ModelError, match=message):
        hub.push(data / "06_models/model", repository, token, **NEW)
    assert not server.files


@pytest.mark.process
def test_a_model_is_pushed_and_read_back(data, tmp_path):
    server, folder = Hub(), data / "06_models/model"
    known = {"HF_ENDPOINT": server.url, "HF_HUB_OFFLINE": "0", "HF_TOKEN": "hf_right"}
    known |= {"HF_HUB_DISABLE_XET": "1"}
    given = f"data_dir={data},split.group_column=null"
    asked = ("--params", given)
    listed = ran("flatout", "push", "me/two", "--dry-run", *asked, **known)
    assert "model.safetensors" in listed
    assert not server.asked
    ran("flatout", "push", "me/two", *asked, **known)
    for name, content in server.files["me/two"].items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert f"kedro run --params={given}" in (tmp_path / "README.md").read_text()
    pairs = zip(
        load_pretrained(tmp_path).parameters(),
        load_pretrained(folder).parameters(),
        strict=True,
    )
    assert all(bool((one == other).all()) for one, other in pairs)


@pytest.mark.process
def test_mlflow_serves_what_predict_answers(tmp_path, store):
    made = Made(tmp_path / "model", "bert", CLASSES)
    Calibration(2.5).save(made.folder)
    import mlflow

    mlflow.set_tracking_uri(store)
    mlflow.set_experiment(experiment_id="0")  # from this test, not from another one
    run = MlflowClient(store).create_run("0")
    uri = log_text_model(made.folder, "text-classification", run.info.run_id)
    port, log = free_port(), tmp_path / "log"
    # This is the app that `mlflow models serve` starts.
    command = ["-m", "uvicorn", "mlflow.pyfunc.scoring_server.app:app", "--port"]
    served = {"__pyfunc_model_path__": uri, "MLFLOW_TRACKING_URI": store}
    process = warm.start([*command, str(port)], log, PROJECT, served)
    try:
        wait_for(f"http://127.0.0.1:{port}/ping", process, log)
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/invocations",
            json.dumps({"inputs": TEXTS}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            found = pd.DataFrame(json.loads(answer.read())["predictions"])
    finally:
        process.kill()
    wanted = made.predicted()
    assert found["label"].tolist() == wanted["label"].tolist()
    assert found["score"].to_numpy() == pytest.approx(wanted["score"], abs=1e-5)
