"""The project as users see it: real commands, real files and a real tracking store."""

import csv
import json
import re
import shlex
import shutil
import signal
import time
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import pytest
from kedro.framework.project import pipelines
from kedro.framework.startup import bootstrap_project
from mlflow import MlflowClient

from flatout.engine.parameters import parse_settings
from flatout.pipeline_registry import DEFAULT
from flatout.project.sessions import ProjectSession
from flatout.tracking.follow import sync
from tests.command_runs import EVERY, NOT_RUN, RUN, small_project
from tests.conftest import PROJECT, kedro, started
from tests.engine import benches
from tests.notebook import cells_of
from tests.projects import context_of, interrupted, ran, runs_of

pytestmark = pytest.mark.process

ENVIRONMENTS = ("local", "test", "slow")
LIVE_METRICS = {
    "train_samples_per_second",
    "train_tokens_per_second",
    "train_loss",
    "learning_rate",
    "grad_norm",
    "loader_wait_pct",
}
RATES = {m for m in LIVE_METRICS if m.endswith(("per_second", "wait_pct"))}


NOTEBOOK_FIGURES = """
import json
print(json.dumps({
    "samples": report["samples"],
    "steps": history.index.tolist(),
    "classes": len(confusion["label_names"]),
    "run": runs["status"].tolist(),
    "trials": trials["samples_per_s"].tolist(),
    "drawn": catalog.exists("token_figure"),
}))
"""


class Run(NamedTuple):
    data: Path
    output: str
    elapsed_s: float


@pytest.fixture(scope="module")
def finished(tmp_path_factory, corpus: Path, empty_store: Path) -> Run:
    """A run of `kedro run --env=test` in a temporary folder."""
    data = started(tmp_path_factory.mktemp("data") / "data", corpus, empty_store)
    begin_s = time.perf_counter()
    output = ran("run", "--env=test", f"--params=data_dir={data}")
    elapsed_s = time.perf_counter() - begin_s
    sync(data / "08_reporting/tracking")  # a busy machine may need more than 20 s
    return Run(data, output, elapsed_s)


@pytest.fixture
def tokens(finished: Run, empty_store: Path, tmp_path: Path) -> Path:
    """A data folder with tokens and without a training run."""
    data = tmp_path / "data"
    data.mkdir()
    shutil.copy(empty_store, data / "mlflow.db")
    for name in ("05_model_input", "06_models"):
        shutil.copytree(finished.data / name, data / name)
    shutil.rmtree(data / "06_models" / "checkpoints")
    return data


def test_a_run_leaves_the_files_that_scripts_rely_on(finished):
    for name in (
        "02_intermediate/rejected_rows.parquet",
        "05_model_input/train_tokens",
        "06_models/model/model.safetensors",
        "06_models/last_model/model.safetensors",
        "08_reporting/token_report.json",
        "08_reporting/train_report.json",
        "08_reporting/train_summary.csv",
        "08_reporting/train_history.csv",
        "08_reporting/train_metrics.jsonl",
        "07_model_output/test_predictions.parquet",
        "08_reporting/evaluation_report.json",
        "08_reporting/class_metrics.csv",
        "08_reporting/confusion_matrix.json",
        "08_reporting/wrong_predictions.csv",
        "mlflow.db",
    ):
        assert (finished.data / name).exists(), name


def test_history_has_a_line_a_log_point(finished):
    with (finished.data / "08_reporting/train_history.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows] == ["2", "4", "6", "8"]
    report = json.loads((finished.data / "08_reporting/train_report.json").read_text())
    assert report["samples"] == 8 * 16
    assert report["final_loss"] == float(rows[-1]["loss"])


def test_the_summary_is_the_report_as_one_line(finished):
    report = json.loads((finished.data / "08_reporting/train_report.json").read_text())
    with (finished.data / "08_reporting/train_summary.csv").open() as file:
        [line] = csv.DictReader(file)
    for name in ("samples_per_s", "step_ms_p50", "loader_wait_pct", "final_loss"):
        assert float(line[name]) == pytest.approx(report[name])
    assert line["versions.torch"] == report["versions"]["torch"]
    assert line["warnings"] == "; ".join(report["warnings"])


def test_every_second_of_the_command_is_in_a_phase(finished):
    """The phases cover the time until the line is printed, but not the interpreter's
    exit."""
    report = json.loads((finished.data / "08_reporting/train_report.json").read_text())
    [(wall, line)] = re.findall(r"where ([\d.]+) s went: (imports .*)", finished.output)
    wall_s = float(wall)
    assert -0.2 < wall_s - 0.9 * finished.elapsed_s
    assert wall_s < finished.elapsed_s + 0.05  # the printed time is rounded
    printed = {name: float(s) for name, s in map(str.split, line.split(", "))}
    assert sum(printed.values()) == pytest.approx(wall_s, rel=0.03, abs=0.1)
    trained = ("model", "first_step", "steps", "evaluation", "checkpoints")
    assert all(report["phases_s"][name] > 0 for name in trained)
    [file] = (finished.data / "08_reporting/tracking").glob("*/run.json")
    record = json.loads(file.read_text())
    tracked = {k: v for k, v in record["figures"].items() if k.startswith("time/")}
    before_s = wall_s - printed["tracking"]  # the last delivery is later
    assert sum(tracked.values()) == pytest.approx(before_s, rel=0.05, abs=0.1)
    assert tracked["time/steps_s"] == pytest.approx(report["phases_s"]["steps"])


def test_the_saved_model_predicts(finished, store, tmp_path):
    """There is one prediction per row of the test split, equal to that of
    transformers."""
    from datasets import load_from_disk
    from transformers import pipeline

    for name in ("03_primary/test_rows", "06_models/model"):
        shutil.copytree(finished.data / name, tmp_path / name)
    arguments = ("--env=test", f"--params=data_dir={tmp_path}")
    ran("run", "--pipelines=predict", *arguments)
    texts = list(load_from_disk(tmp_path / "03_primary/test_rows")["text"])
    found = pd.read_parquet(tmp_path / "07_model_output/predictions.parquet")
    assert found["row"].tolist() == list(range(len(texts)))
    assert found["reason"].isna().all()
    ask = pipeline("text-classification", str(tmp_path / "06_models/model"))
    answers = ask(texts, truncation=True, max_length=64)
    assert found["label"].tolist() == [answer["label"] for answer in answers]
    scores = [answer["score"] for answer in answers]
    assert (found["score"] - scores).abs().max() < 1e-5


def test_a_checkpoint_keeps_its_own_sizes(finished):
    """The sizes in `model.config` of conf/base only apply to training from scratch."""
    from flatout.engine.models.building import build
    from flatout.engine.rows.vocabulary import Vocabulary
    from flatout.engine.tasks import make_task

    context = context_of("local")
    parameters = context.config_loader["parameters"]
    checkpoint = str(finished.data / "06_models/model")
    parameters["model"]["name_or_path"] = checkpoint
    parameters["model"]["overrides"] = {"hidden_dropout_prob": 0.25}
    settings = parse_settings(parameters).model
    model = build(
        settings, make_task(settings, list("abcd")), Vocabulary(600, 0), 64, "eager"
    )
    assert model.config.hidden_size == 32
    assert model.config.hidden_dropout_prob == 0.25


def test_the_run_is_in_the_tracking_store(finished):
    client = MlflowClient(f"sqlite:///{finished.data}/mlflow.db")
    [run] = runs_of(finished.data)
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "docstrings_bert-2x32_lr1e-3"
    for metric in LIVE_METRICS:
        steps = [m.step for m in client.get_metric_history(run.info.run_id, metric)]
        warm_up = {2} if metric in RATES else set()
        assert sorted(steps) == sorted({2, 4, 6, 8} - warm_up), metric
    report = json.loads((finished.data / "08_reporting/train_report.json").read_text())
    assert run.data.metrics["test_accuracy"] == report["test_accuracy"]
    # A metric has a curve unless runs are sorted by it.
    single = {
        name
        for name in run.data.metrics
        if len({m.step for m in client.get_metric_history(run.info.run_id, name)}) < 2
    }
    few = ("train_accuracy", "validation_", "system/")  # of 8 steps
    assert {n for n in single if not n.startswith(few)} == {"test_accuracy"}
    text = run.data.tags["mlflow.note.content"]
    assert re.search(r"\| samples_per_s \| [\d,.]+ \|", text)
    assert re.search(r"\| time/steps_s \| [\d.]+ \|", text)
    assert "| split_rows_in | 400 |" in text
    assert 0 < run.data.metrics["system/system_memory_usage_percentage"] < 100
    assert run.data.params["train.global_batch_size"] == "16"
    assert run.data.params["model.config.hidden_size"] == "32"
    assert run.data.params["split.fractions.train"] == "0.8"
    tags = run.data.tags
    rate = pytest.approx(report["samples_per_s"], rel=1e-5)
    assert float(tags["samples_per_s"]) == rate
    assert tags["exit_reason"] == "finished"
    assert tags["kedro_env"] == "test"
    for name in ("precision", "device", "attention", "strategy"):
        assert tags[name] == report[name]
    assert tags["version.torch"] == report["versions"]["torch"]
    assert tags["guard"] == "first"
    artifacts = {a.path for a in client.list_artifacts(run.info.run_id)}
    assert {
        "train_report.json",
        "train_history.csv",
        "evaluation_report.json",
        "class_metrics.csv",
        "confusion_matrix.json",
        "guard.json",
    } <= artifacts


def test_the_model_is_in_the_registry(finished):
    import mlflow

    uri = f"sqlite:///{finished.data}/mlflow.db"
    client = MlflowClient(uri, uri)
    champion = client.get_model_version_by_alias("flatout", "champion")
    [run] = runs_of(finished.data)
    assert champion.run_id == run.info.run_id
    assert champion.tags["token_key"] == run.data.tags["token_key"]
    mlflow.set_tracking_uri(uri)
    model = mlflow.pyfunc.load_model("models:/flatout@champion")
    answers = model.predict(["a docstring", "another"])
    assert list(answers.columns) == ["label", "score"]
    assert len(answers) == 2
    assert model.metadata.signature is not None


def test_a_slow_training_is_told_of_with_what_differs(finished, tokens):
    """The slow run does the same work in 16 padded micro-batches instead of a packed
    one."""
    runs = tokens / "08_reporting/runs.jsonl"
    baseline = json.loads((finished.data / "08_reporting/runs.jsonl").read_text())
    # The machine may have been busy in the earlier run, so its rate is set.
    rate = 10 * baseline["figures"]["guard_samples_per_s"]
    baseline["figures"]["guard_samples_per_s"] = rate
    runs.parent.mkdir(exist_ok=True)
    runs.write_text(json.dumps(baseline) + "\n")
    slow = (
        "runtime.attention=eager,train.batching=fixed,train.token_budget=64,"
        "train.synchronize_every_step=true,guard.on_slow=fail"
    )
    arguments = ("run", "--env=test", "--pipelines=train")
    done = kedro(*arguments, f"--params=data_dir={tokens},{slow}")
    assert done.returncode == 7, done.stdout
    assert "Differences (all " in done.stdout

    verdict = json.loads((tokens / "08_reporting/guard.json").read_text())
    [run] = runs_of(tokens)
    assert (verdict["state"], verdict["baseline"]) == ("slow", baseline["run_id"])
    assert {difference["name"] for difference in verdict["differences"]} >= {
        "runtime.attention",
        "train.batching",
        "train.token_budget",
    }
    now = float(run.data.tags["guard_samples_per_s"])
    assert verdict["rate_pct"] == pytest.approx(100 * now / rate, rel=1e-4)
    rate_pct = float(run.data.tags["guard_rate_pct"])
    assert rate_pct == pytest.approx(verdict["rate_pct"], rel=1e-5)
    assert run.info.status == "FINISHED"
    assert run.data.tags["guard"] == "slow"
    assert run.data.tags["work_key"] == baseline["tags"]["work_key"]
    assert len(runs.read_text().splitlines()) == 2
    assert (tokens / "06_models/model/model.safetensors").exists()


def test_the_same_command_again_trains_and_registers_nothing(finished, tmp_path):
    """No run is recorded. The catalog's model, which was deleted, is restored."""
    data = tmp_path / "data"
    shutil.copytree(finished.data, data)
    model = data / "06_models/model/model.safetensors"
    weights = model.read_bytes()
    shutil.rmtree(model.parent)
    report = data / "08_reporting/train_report.json"
    points = data / "08_reporting/train_metrics.jsonl"
    before, logged = report.read_text(), points.read_text()

    for _ in range(2):
        arguments = ("--env=test", "--pipelines=train", f"--params=data_dir={data}")
        said = " ".join(ran("run", *arguments).split())
        assert "this training run has already finished" in said
    assert model.read_bytes() == weights
    assert (report.read_text(), points.read_text()) == (before, logged)
    client = MlflowClient(*2 * [f"sqlite:///{data}/mlflow.db"])
    assert len(client.search_model_versions("name='flatout'")) == 1
    [run] = runs_of(data)
    assert run.data.tags["exit_reason"] == "finished"


@pytest.fixture(scope="module")
def small(finished: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_project(tmp_path_factory.mktemp("small") / "project", finished.data)


@pytest.mark.parametrize("command", RUN)
def test_a_command_of_the_documents_as_it_stands(small, command):
    program, *words = shlex.split(command)
    arguments = ["run", *words] if program == "flatout" else words
    ran(*arguments, cwd=small)


def test_a_command_that_is_not_run_as_it_stands_has_a_reason():
    for pattern, why in NOT_RUN.items():
        assert any(re.fullmatch(pattern, command) for command in EVERY), pattern
        file, _, name = why.partition("::")
        if name:
            assert f"def {name}(" in (PROJECT / file).read_text(), why


def test_the_notebook_shows_what_the_run_left(finished, tmp_path):
    """Run all cells as Jupyter would, on the results of a run and a measured trial."""
    data = tmp_path / "data"
    shutil.copytree(finished.data, data)
    trial = benches.trial(samples_per_s=12.5)
    table = data / "08_reporting" / "benchmark_trials.csv"
    pd.DataFrame([trial.as_row()]).to_csv(table, index=False)
    words = ("-m", "tests.notebook", "notebooks/review.ipynb")
    given = f"data_dir = {str(data)!r}"
    said = ran(*words, given, NOTEBOOK_FIGURES, MPLBACKEND="Agg")
    assert json.loads(said.strip().splitlines()[-1]) == {
        "samples": 128,
        "steps": [2, 4, 6, 8],
        "classes": 4,
        "run": ["FINISHED"],
        "trials": [12.5],
        "drawn": True,
    }


def test_the_notebook_is_kept_without_outputs():
    cells = cells_of(PROJECT / "notebooks" / "review.ipynb")
    assert len(cells) > 5
    assert [(cell["outputs"], cell["execution_count"]) for cell in cells] == [
        ([], None)
    ] * len(cells)


def test_a_run_that_fails_before_its_first_node_has_nothing_to_send(data):
    options = ("--env=test", "--pipelines=train", f"--params=data_dir={data}")
    done = kedro("run", *options, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert done.returncode == 3
    assert "train_tokens" in done.stdout and "MLflow" not in done.stdout
    assert not list(data.glob("08_reporting/tracking/*"))


def test_a_dead_tracking_server_hurts_nobody(tokens, store):
    dead = "http://127.0.0.1:9"
    asked = ("run", "--env=test", "--pipelines=train", f"--params=data_dir={tokens}")
    said = " ".join(ran(*asked, MLFLOW_TRACKING_URI=dead).split())
    assert f"MLflow at {dead} does not respond" in said
    assert "guard: the first run of this workload" in said
    assert f"`kedro flatout sync --data-dir={tokens}` sends it" in said
    lines = (tokens / "08_reporting/train_metrics.jsonl").read_text().splitlines()
    logged = [p["step"] for p in map(json.loads, lines) if "train_loss" in p["metrics"]]
    assert logged == [2, 4, 6, 8]

    ran("flatout", "sync", f"--data-dir={tokens}", f"--tracking-uri={store}")
    [run] = runs_of(store)
    assert run.info.status == "FINISHED"
    sent = MlflowClient(store).get_metric_history(run.info.run_id, "train_loss")
    assert {point.step for point in sent} == {2, 4, 6, 8}
    assert run.data.params["train.global_batch_size"] == "16"


def test_split_has_a_run_of_its_own(finished, store, tmp_path):
    others = shutil.ignore_patterns("mlflow.db", "mlartifacts", "06_models")
    shutil.copytree(finished.data, tmp_path, ignore=others, dirs_exist_ok=True)
    arguments = ("--env=test", "--pipelines=split", f"--params=data_dir={tmp_path}")
    ran("run", *arguments)
    [run] = runs_of(store)
    assert run.info.run_name.startswith("data")
    report = json.loads((finished.data / "08_reporting/split_report.json").read_text())
    rows = f"| split_rows_train | {report['rows_out']['train']} |"
    assert rows in run.data.tags["mlflow.note.content"]
    # It contains none of the earlier training run.
    assert not MlflowClient(store).list_artifacts(run.info.run_id)


@pytest.mark.parametrize(
    ("environment", "strategy", "max_steps"),
    [("local", "auto", None), ("test", "auto", 8), ("slow", "fixed", None)],
)
def test_every_environment_has_valid_parameters(environment, strategy, max_steps):
    settings = parse_settings(context_of(environment).config_loader["parameters"])
    assert settings.train.batching == strategy
    assert settings.train.max_steps == max_steps
    # Values that an environment does not set come from base, not from the class.
    assert settings.train.global_batch_size == 16
    assert settings.train.learning_rate == 1e-3


OF_AN_ENVIRONMENT = {"arrays": "arrays", "images": "images", "detect": "deeplog"}
"""Maps each pipeline to the environment whose catalog has the pipeline's entries."""


@pytest.mark.parametrize(("name", "environment"), OF_AN_ENVIRONMENT.items())
def test_a_pipeline_of_an_environment_finds_its_entries_there(name, environment):
    catalog = context_of(environment).catalog
    pipelines.set_requested(None)
    entries = pipelines[name].inputs() | pipelines[name].outputs()
    assert {entry for entry in entries if entry not in catalog} == set()


@pytest.mark.parametrize("environment", ENVIRONMENTS)
def test_every_free_input_is_in_the_catalog(environment):
    context = context_of(environment)
    catalog = context.catalog
    pipelines.set_requested(None)
    assert {"split", "tokenize", "train", "benchmark", "predict"} <= set(pipelines)
    for name, pipeline in pipelines.items():
        if name in OF_AN_ENVIRONMENT:
            continue
        missing = {entry for entry in pipeline.inputs() if entry not in catalog}
        assert missing == set(), name
        # Models and data sets in memory would be copied whenever they are passed on.
        in_memory = {e for e in pipeline.outputs() if e not in catalog}
        assert in_memory == set(), name


def test_the_default_pipeline_goes_from_split_to_evaluate():
    context_of("local")
    pipelines.set_requested(None)
    parts = [pipelines[name] for name in DEFAULT]
    expected = {node.name for part in parts for node in part.nodes}
    assert {node.name for node in pipelines["__default__"].nodes} == expected


@pytest.mark.parametrize("named", [["split", "tokenize"], None])
def test_nodes_go_by_their_short_names_and_by_their_full_ones(named):
    bootstrap_project(PROJECT)
    session = ProjectSession.create(PROJECT)
    given = ("split_rows", "encode_rows", "tokenize.make_tokenizer", "none")
    assert session.full_names(given, {"pipeline_names": named}) == [
        *("split.split_rows", "tokenize.encode_rows"),
        *("tokenize.make_tokenizer", "none"),
    ]


def test_kedro_viz_shows_the_pipelines_with_layers(tmp_path):
    for name in ("conf", "src"):  # viz builds into its project
        shutil.copytree(PROJECT / name, tmp_path / name)
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    ran("viz", "build", cwd=tmp_path)
    shown = json.loads((tmp_path / "build/api/main").read_text())
    names = {pipeline["id"] for pipeline in shown["pipelines"]}
    assert {
        "__default__",
        "split",
        "tokenize",
        "train",
        "benchmark",
        "predict",
        "evaluate",
    } <= names
    # Kedro-Viz places the layers of other pipelines anywhere, and only draws layers
    # with nodes.
    layers = [layer for layer in shown["layers"] if layer != "model_output"]
    assert "model_output" in shown["layers"]  # what evaluate keeps
    assert layers == [
        "raw",
        "intermediate",
        "primary",
        "feature",
        "model_input",
        "models",
        "reporting",
    ]
    boxes = shown["modular_pipelines"]
    children = {child["id"] for child in boxes["__root__"]["children"]}
    assert children & boxes.keys() == set(DEFAULT)
    assert {"train_rows", "train_tokens", "model"} <= {
        n["name"] for n in shown["nodes"]
    }
    predict = json.loads((tmp_path / "build/api/pipelines/predict").read_text())
    found = {node["name"]: node.get("layer") for node in predict["nodes"]}
    assert found["predict_texts"] == "primary"
    assert found["model"] == found["model_tokenizer"] == "models"
    assert found["predictions"] == "model_output"
    assert predict["layers"][-1] == "model_output"


LONGER = "train.max_steps=60,train.epochs=1000,train.checkpoint.every_steps=5"


def interrupted_run(data: Path, signum: int) -> int:
    """Start a training run, send `signum` after some points are logged, and return its
    exit code."""
    command = ["run", "--pipeline=train", "--env=test"]
    points = data / "08_reporting" / "train_metrics.jsonl"

    def count() -> int:
        return points.read_text().count('"train_loss"') if points.exists() else 0

    enough = count() + 5
    command.append(f"--params=data_dir={data},{LONGER}")
    return interrupted(command, data / "log", lambda: count() >= enough, signum)


def test_a_killed_and_a_stopped_run_go_on_in_the_same_mlflow_run(tokens: Path):
    assert interrupted_run(tokens, signal.SIGKILL) == -signal.SIGKILL
    assert interrupted_run(tokens, signal.SIGTERM) == 143
    [stopped] = runs_of(tokens)
    assert stopped.info.status == "KILLED"
    assert stopped.data.tags["exit_reason"] == "interrupted"
    arguments = ("run", "--pipeline=train", "--env=test")
    said = ran(*arguments, f"--params=data_dir={tokens},{LONGER}")
    assert "resuming from step" in said
    [run] = runs_of(tokens)
    assert run.info.run_id == stopped.info.run_id
    assert run.info.status == "FINISHED"
    assert run.data.tags["exit_reason"] == "finished"
    assert int(run.data.tags["resumed_from_step"]) >= 3
    assert {"token_key", "work_key", "guard"} <= set(run.data.tags)
    client = MlflowClient(f"sqlite:///{tokens}/mlflow.db")
    history = client.get_metric_history(run.info.run_id, "train_loss")
    assert [point.step for point in history] == list(range(2, 61, 2))
    checkpoints = tokens / "06_models" / "checkpoints"
    assert not list(checkpoints.glob("step-*"))
