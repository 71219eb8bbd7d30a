"""MLflow in a process of its own, and the models that it is handed."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch
from mlflow import MlflowClient
from mlflow.models import Model
from transformers import AutoTokenizer, pipeline

from flatout import tracking
from flatout.project.recording.model_logging import ToLog, described
from flatout.tracking import models
from flatout.tracking.baseline import NoAnswer, Work, ask_for_earlier
from flatout.tracking.process.connect import Connect
from flatout.tracking.process.remote import RemoteForwarder
from flatout.tracking.store import forget_active_run
from tests.engine.families import task_model
from tests.pipelines.tokens import write_tokens
from tests.test_tracking import append, history, record


def saved_text_model(tmp_path: Path) -> tuple[Any, Any, models.TextModel]:
    """A masked model and its tokenizer, as the catalog has them."""
    write_tokens(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "06_models" / "tokenizer")
    model = task_model("bert", "masked-lm", "sdpa").model
    folder = tmp_path / "06_models" / "model"
    for part in (model, tokenizer):
        part.save_pretrained(folder)
    found = ToLog(
        rows=[{"input_ids": tokenizer("p5 p6")["input_ids"]}],
        task="masked-lm",
        registration=None,
        report={},
        run_id=str,
        before={},
        done=print,
    )
    return model, tokenizer, described((model, tokenizer), folder, found)


def test_a_saved_model_is_logged_as_mlflow_logs_one_in_memory(
    store, tmp_path, monkeypatch
):
    """The same flavors and requirements; its pipeline answers as the model does."""
    monkeypatch.chdir(tmp_path)
    model, tokenizer, found = saved_text_model(tmp_path)
    tracking.use(store)
    run = MlflowClient().create_run("0")
    uri, _ = models.log_and_register(found, None, run.info.run_id)
    forget_active_run()
    folder = Path(mlflow.artifacts.download_artifacts(uri))
    logged = Model.load(folder)
    mlflow.transformers.save_model(
        {"model": model, "tokenizer": tokenizer},
        tmp_path / "theirs",
        task="fill-mask",
        signature=logged.signature,
        pip_requirements=(folder / "requirements.txt").read_text().splitlines(),
    )
    theirs = Model.load(tmp_path / "theirs")
    ours, others = (
        set((path / "requirements.txt").read_text().split())
        for path in (folder, tmp_path / "theirs")
    )
    assert ours == others
    for name, flavor in theirs.flavors.items():
        assert {**flavor, "source_model_name": None} == {
            **logged.flavors[name],
            "source_model_name": None,
        }
    [example] = logged.load_input_example()
    assert example.startswith("[MASK] ")
    weights = folder / "model" / "model.safetensors"
    assert not weights.is_symlink()
    assert weights.read_bytes() == (found.folder / weights.name).read_bytes()
    answers = mlflow.transformers.load_model(uri)(example)
    expected = pipeline("fill-mask", model=str(found.folder))(example)
    assert [a["token"] for a in answers] == [a["token"] for a in expected]


@pytest.mark.process
def test_a_process_that_has_mlflow_takes_a_run_and_its_model(
    store, tmp_path, caplog, capfd
):
    """What is noted here arrives there; what is said there is said here."""
    *_, found = saved_text_model(tmp_path)
    outbox = tracking.begin(
        tmp_path / "p.jsonl", record(store, tmp_path), goes_on=False
    )
    server = {"mlflow_tracking_uri": store}
    experiment = {"name": "flatout"}
    config = {"server": server, "tracking": {"experiment": experiment}}
    sends = RemoteForwarder(outbox, Connect(config, str(tmp_path)))
    with caplog.at_level(logging.INFO):
        sends.start()
        append(outbox.points, 1, 2, train_loss=0.5)
        outbox.record.params["train.epochs"] = "3"
        outbox.record.tags["torch"] = torch.__version__  # of a class of PyTorch
        assert sends.flush(60)
        wanted = models.Registration("flatout", models.Trained(0.5, "t"), None)
        run_id = outbox.record.run_id
        uri, champion = sends.call(models.log_and_register, found, wanted, run_id)
        assert champion == "models:/flatout/1"
        assert not sends.call(eval, "'torch' in __import__('sys').modules")
        work = Work("flatout", "k", "cpu", outbox.record.run_id)
        with pytest.raises(NoAnswer, match="nothing is not in MLflow"):
            sends.call(ask_for_earlier, store, work, "nothing", 20)
        outbox.record.metrics["test_accuracy"] = 0.75
        assert sends.finish("FINISHED", int(time.time() * 1000))
    assert "version 1 of the model flatout: champion" in caplog.text
    assert "registered model" not in capfd.readouterr().err  # MLflow's own words
    run = MlflowClient(store).get_run(outbox.record.run_id)
    assert run.info.status == "FINISHED" and outbox.record.complete
    assert run.data.params == {"train.epochs": "3"}
    assert run.data.metrics["test_accuracy"] == 0.75
    assert [step for step, *_ in history(store, run.info.run_id)] == [1, 2]
    assert MlflowClient(store).get_logged_model(uri.removeprefix("models:/"))
    assert tracking.sync(outbox.points) == []
    assert sends._process.returncode is not None


@pytest.mark.process
def test_a_process_that_dies_costs_no_run(store, tmp_path, caplog):
    outbox = tracking.begin(
        tmp_path / "p.jsonl", record(store, tmp_path), goes_on=False
    )
    sends = RemoteForwarder(outbox, Connect({"unknown": 1}, str(tmp_path)))
    sends.start()
    sends._process.kill()
    sends.wait_until_tried(30)
    append(outbox.points, 1, train_loss=0.5)
    outbox.record.metrics["test_accuracy"] = 0.75
    assert sends.failing and not sends.flush()
    assert not sends.finish("FINISHED", 1)
    assert "`kedro flatout sync` sends it" in caplog.text
    assert "sent to" in tracking.sync(outbox.points)[0]
    [run] = MlflowClient(store).search_runs(["1"])
    assert run.data.metrics["test_accuracy"] == 0.75


def test_an_answer_that_comes_too_late_is_not_the_next_one(store, tmp_path):
    """Each question has a number of its own, which the answer carries."""
    outbox = tracking.begin(
        tmp_path / "p.jsonl", record(store, tmp_path), goes_on=False
    )
    sends = RemoteForwarder(outbox, Connect({}, str(tmp_path)))
    sends._pipe, theirs = Pipe()
    for _ in range(10):
        with suppress(TimeoutError):
            sends._ask("verdict", limit_s=0.0)
    numbers = [theirs.recv()[1] for _ in range(10)]
    assert len(set(numbers)) == 10 and 0 not in numbers
