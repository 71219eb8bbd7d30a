"""Mistakes in users' inputs do not affect training, and a message explains what to
do."""

import logging
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler

import pytest
import torch
from mlflow import MlflowClient

from flatout import tracking
from flatout.engine.launch.launch import run_job
from flatout.engine.models.building import ModelError, build
from flatout.engine.parameters import Settings
from flatout.engine.tasks import make_task
from flatout.tracking import facts
from flatout.tracking.follow import follow
from flatout.tracking.store import prepare
from tests.engine.families import LABEL_NAMES, VOCABULARY
from tests.engine.runs import make_job
from tests.servers import serving


class AsksForALogin(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_: object) -> None:
        pass


def built(settings, label_names):
    return build(settings, make_task(settings, label_names), VOCABULARY, 24, "eager")


@pytest.fixture
def login_server() -> Iterator[str]:
    with serving(AsksForALogin) as url:
        yield url


@pytest.mark.timeout(60)
def test_a_server_that_asks_for_a_login(login_server, tmp_path, caplog):
    prepare(login_server)
    points = tmp_path / "train_metrics.jsonl"
    record = tracking.RunRecord(
        tracking_uri=login_server,
        experiment="flatout",
        name="bert",
        points=str(points),
    )
    folder = tracking.begin(tmp_path / "tracking", record, goes_on=False)
    points.write_text('{"step": 1, "time_s": 1, "metrics": {"train_loss": 1}}\n')
    folder.end("FINISHED")
    with caplog.at_level(logging.WARNING):
        follow(folder.path)
    assert not folder.is_complete()
    said = [r.getMessage() for r in caplog.records if r.name.startswith("flatout")]
    assert said[0].startswith(f"MLflow at {login_server} does not respond (API request")
    assert "failed with error code 401" in said[0] and "\n" not in said[0]
    assert '"step": 1' in points.read_text()


@pytest.mark.parametrize(
    ("hostile", "name"),
    [
        ("models/\N{ROCKET}\N{ROCKET}/../best \N{PARTY POPPER}", "best-"),
        ("\N{PILE OF POO}", "-"),
        ("x" * 5000, "x" * 92),
        ("<img src=x onerror=alert(1)>", "-img-src-x-onerror-alert-1-"),
    ],
)
def test_run_names_are_safe_in_a_browser(store, hostile, name):
    settings = Settings(
        model={"name_or_path": hostile}, train={"learning_rate": 2.5e-4}
    )
    safe = facts.run_name("reviews", settings)
    assert safe == f"reviews_{name}_lr2.5e-4"[:100]
    client = MlflowClient(store)
    run = client.create_run(client.create_experiment("flatout"), run_name=safe)
    assert client.get_run(run.info.run_id).info.run_name == safe


@pytest.mark.parametrize(
    ("task", "labels"),
    [("masked-lm", []), ("sequence-classification", ["only", "two"])],
)
def test_a_model_folder_from_another_task_is_trained_on(tmp_path, caplog, task, labels):
    job = make_job(tmp_path, max_steps=3)
    other = job.settings.model.model_copy(update={"task": task})
    saved = built(other, labels)
    saved.save_pretrained(tmp_path / "other")
    mine = job.settings.model.model_copy(
        update={"name_or_path": str(tmp_path / "other")}
    )
    with caplog.at_level(logging.WARNING):
        loaded = built(mine, LABEL_NAMES)
    [said] = [
        r.getMessage() for r in caplog.records if "start from scratch" in r.getMessage()
    ]
    assert said.startswith(f"not taken from {tmp_path / 'other'}, so they start")
    assert said.endswith("classifier.bias, classifier.weight")
    assert loaded.classifier.out_features == len(LABEL_NAMES)
    weights = saved.base_model.state_dict()
    for name, tensor in loaded.base_model.state_dict().items():
        if not name.startswith("pooler"):  # a masked-lm has none
            assert torch.equal(tensor, weights[name]), name
    settings = job.settings.model_copy(update={"model": mine})
    assert run_job(replace(job, settings=settings)).report.steps == 3


def test_a_model_folder_whose_body_has_other_sizes_is_refused(tmp_path):
    job = make_job(tmp_path)
    model = job.settings.model
    built(model, LABEL_NAMES).save_pretrained(tmp_path)
    wide = {"name_or_path": str(tmp_path), "overrides": {"intermediate_size": 48}}
    with pytest.raises(ModelError, match=r"remove sizes from model\.overrides"):
        built(model.model_copy(update=wide), LABEL_NAMES)
