"""Mode journey from the command line: real commands, beside a real Trainer script."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import yaml
from mlflow import MlflowClient
from transformers import AutoModelForSequenceClassification

from flatout.engine.parameters import SettingsError, parse_settings
from flatout.project.parameters.whole_run import KedroRun
from flatout.reports.journey import PHASES, answer, chart, journey_text
from flatout.reports.pictures.benchmark import all_figures, journey
from tests.conftest import PROJECT, kedro
from tests.pipelines.test_benchmark import LADDER, SUMMARY


def row(name, start, seconds, **changes):
    phases_s = {"imports": 2.0, "steps": seconds - 3.0, "end": 1.0}
    return {
        "name": f"{name}, {start}",
        "contender": name,
        "start": start,
        "turns_s": [seconds],
        "median_s": seconds,
        "phases_s": phases_s,
        "samples": 128,
        "test_accuracy": 0.5,
        "model": "m",
        "over_best_script": None,
        "failed": None,
        **changes,
    }


OWN = [row("flatout", "cold", 20.0), row("flatout", "warm", 10.0)]
SCRIPTS = [row("trainer-best", "cold", 40.0), row("trainer-best", "warm", 25.0)]
FAILED = {
    "label": "trainer-default, cold, turn 2",
    "status": "error",
    "note": "ended with 1",
    "log": "there/log.txt",
}


def told(*rows, alone=None):
    return {"alone": alone, "rows": list(rows)}


def test_one_sentence_says_what_whole_commands_take():
    begin = (
        "From the command to the saved model flatout takes 20.0 s cold and 10.0 s warm"
    )
    assert answer(told(*OWN, *SCRIPTS)) == (
        f"{begin}, the fastest Trainer script, trainer-best, 40.0 s cold and 25.0 s "
        "warm: 0.50 and 0.40 of its time."
    )
    assert answer(told(*OWN, alone="rows are images")) == (
        f"{begin}; no Trainer script stands beside it: rows are images."
    )
    bad = row("trainer-default", "cold", 3.0, median_s=None, phases_s={}, failed=FAILED)
    assert answer(told(*OWN, bad)) == (
        f"{begin}; no Trainer script stands beside it: none has run to its end. "
        "trainer-default, cold, turn 2 ended as error: ended with 1; its log: "
        "there/log.txt."
    )


def test_the_table_has_ten_lines_and_the_page_every_phase():
    lines = chart(told(*OWN, *SCRIPTS)).splitlines()
    assert len(lines) == 10
    assert lines[0].split() == [
        *("seconds", "flatout,", "cold", "warm", "trainer-best,", "cold", "warm")
    ]
    assert lines[-1].split() == ["all", "20.0", "10.0", "40.0", "25.0"]
    page = journey_text({"journey": told(*OWN, *SCRIPTS)})
    assert "| end of the process | 1.00 | 1.00 | 1.00 | 1.00 |" in page
    assert "| flatout, cold | 20.0 | 20.0 |  | 128 | 0.5 | `m` |" in page


def test_bars_reach_up_to_the_wall_time():
    figure = journey([*OWN, *SCRIPTS])
    assert [bar.name for bar in figure.data] == [
        *(PHASES[name] for name in ("imports", "steps", "end"))
    ]
    assert figure.layout.barmode == "stack"
    heights = [
        sum(found) for found in zip(*(bar.y for bar in figure.data), strict=True)
    ]
    assert heights == [20.0, 10.0, 40.0, 25.0]
    summary = {**SUMMARY, "mode": "journey", "journey": told(*OWN)}
    shown = all_figures(pd.DataFrame(), summary, LADDER)
    assert shown["phases"].layout.title.text == "From the command to the saved model"


def test_the_other_run_has_the_same_parameters_and_some_more(tmp_path):
    given = {"train": {"epochs": 2, "loader": {"num_workers": 0}}, "own": "a, b"}
    run = KedroRun("test", "/conf", given)
    changes = {"data_dir": "there", "train": {"resume": "never"}}
    command = run.argv(tmp_path / "run.yml", changes)
    assert command == [
        *(sys.executable, "-m", "kedro", "run", f"--config={tmp_path / 'run.yml'}")
    ]
    train = {**given["train"], "resume": "never"}
    assert yaml.safe_load((tmp_path / "run.yml").read_text())["run"] == {
        "env": "test",
        "conf_source": "/conf",
        "params": {"own": "a, b", "data_dir": "there", "train": train},
    }


@pytest.mark.process
def test_entries_with_fixed_paths_would_be_overwritten(tmp_path):
    conf = tmp_path / "conf"
    shutil.copytree(PROJECT / "conf", conf)
    model = {"type": "flatout.datasets.TransformersModel", "filepath": "data/mine"}
    (conf / "test/catalog.yml").write_text(yaml.safe_dump({"model": model}))
    done = kedro(
        *("run", "--env=test", f"--conf-source={conf}", "--pipelines=benchmark"),
        f"--params=data_dir={tmp_path / 'data'},benchmark.mode=journey",
    )
    assert done.returncode == 2
    said = " ".join(done.stdout.split())
    assert "would overwrite model: begin the path in the catalog with" in said


def test_a_mode_that_is_nearly_one_is_answered():
    with pytest.raises(SettingsError, match=r"'scaling' or 'journey' \(got 'jurney'\)"):
        parse_settings({"benchmark": {"mode": "jurney"}})


def own_models():
    """Of the project's own data folder, with the times they were written at."""
    found = (PROJECT / "data/06_models").glob("*/config.json")
    return {file: file.stat().st_mtime_ns for file in found}


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
    """The whole mode by real commands, one turn; the project's own data stays."""
    before = own_models()
    data = tmp_path_factory.mktemp("journey") / "data"
    options = ["benchmark.mode=journey", "benchmark.repeats=1"]
    options += ["benchmark.contenders=flatout trainer-best", f"data_dir={data}"]
    params = f"--params={','.join(options)}"
    names = "--pipelines=split,tokenize,benchmark"
    command = [sys.executable, "-m", "kedro", "run", "--env=test", names, params]
    done = subprocess.run(
        command, cwd=PROJECT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert own_models() == before
    return data, done


@pytest.mark.slow
@pytest.mark.process
def test_whole_commands_are_accounted_for(travelled):
    data, done = travelled
    summary = json.loads((data / "08_reporting/benchmark_summary.json").read_text())
    trials = pd.read_csv(data / "08_reporting/benchmark_trials.csv")
    assert list(trials["status"]) == ["ok"] * 4
    assert summary["journey"]["alone"] is None
    rows = {one["name"]: one for one in summary["journey"]["rows"]}
    assert list(rows) == [
        f"{name}, {start}"
        for name in ("flatout", "trainer-best")
        for start in ("cold", "warm")
    ]
    outside = dict(zip(trials["label"], trials["elapsed_s"], strict=True))
    for name, one in rows.items():
        elapsed_s = outside[f"{name}, turn 1"]
        assert sum(one["phases_s"].values()) == pytest.approx(elapsed_s, rel=0.03)
        assert all(seconds >= -0.05 for seconds in one["phases_s"].values())
        assert one["phases_s"]["steps"] > 0
        model = AutoModelForSequenceClassification.from_pretrained(one["model"])
        assert model.config.num_labels == 4
    assert {(one["samples"], one["steps"]) for one in rows.values()} == {(128, 8)}
    # What flatout says of itself, by its own clock, before its process ends.
    own = Path(rows["flatout, warm"]["model"]).parents[1] / "08_reporting"
    report = json.loads((own / "train_report.json").read_text())
    inside_s, elapsed_s = (
        sum(report["phases_s"].values()),
        outside["flatout, warm, turn 1"],
    )
    assert 0.9 * elapsed_s < inside_s < elapsed_s
    assert report["samples"] == 128
    assert summary["answer"] in " ".join(done.stderr.split())


@pytest.mark.slow
@pytest.mark.process
def test_warm_has_cold_ones_tokens_and_mlflow_has_the_picture(travelled):
    data, _ = travelled
    logs = data / "08_reporting/benchmark_logs/journey"
    texts = [file.read_text() for file in sorted(logs.glob("*/log.txt"))]
    encoded = [text for text in texts if "train_tokens: 326 rows" in text]
    assert len(encoded) == 1  # by the cold run alone
    client = MlflowClient(f"sqlite:///{data}/mlflow.db")
    experiment = client.get_experiment_by_name("flatout").experiment_id
    [run] = client.search_runs([experiment], "metrics.flatout_cold_s > 0")
    assert run.data.metrics["trainer-best_warm_s"] > 0
    assert "benchmark.html" in {
        file.path for file in client.list_artifacts(run.info.run_id)
    }
