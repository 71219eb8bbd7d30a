"""Mode journey: whole commands by turns, medians that add up, jobs without a script."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import BertTokenizerFast

from flatout.engine.benchmark.journey.commands import WholeRun, timed
from flatout.engine.benchmark.journey.journey import STARTS, Journey, run_journey
from flatout.engine.benchmark.journey.scripts import (
    no_script,
    script_job,
    script_variables,
)
from flatout.engine.benchmark.peers.trainer_script import encode
from flatout.engine.benchmark.runner import Bench
from flatout.engine.machine import environment
from flatout.engine.parameters import RuntimeSettings, SettingsError
from tests.engine.benches import job_files, settings
from tests.engine.test_peers import job_of
from tests.engine.test_standby import gone

COMMAND = """
import json, pathlib, sys
given = json.loads(sys.argv[1])
data, turns = pathlib.Path(given["data_dir"]), pathlib.Path(sys.argv[2])
made = sorted(str(p.relative_to(data)) for p in data.rglob("*") if p.is_file())
with turns.open("a") as file:
    file.write(json.dumps([made, given["runtime"], given["train"]]) + chr(10))
with data.joinpath("01_raw", "texts.csv").open("a") as file:
    file.write("good,1" + chr(10))
if len(turns.read_text().splitlines()) == int(sys.argv[3]):
    sys.exit("Error: the disk is full")
data.joinpath("report.json").write_text(json.dumps({"phases_s": {"steps": 0.01}}))
"""
PLACES = {"train_report": "report.json", "model": "model"}


@pytest.fixture
def travel(tmp_path):
    """A journey of flatout alone, whose command dies in the process `dies`."""
    raw = tmp_path / "01_raw"
    raw.mkdir()
    (raw / "texts.csv").write_text("text,label\n")

    def start(dies: int = 0, **options):
        def argv(file, changes):
            told = json.dumps(changes)
            return [sys.executable, "-c", COMMAND, told, str(turns), str(dies)]

        turns = tmp_path / "turns"
        asked = settings(mode="journey", contenders="flatout", repeats=2, **options)
        folder = tmp_path / "journey"
        bench = Bench(asked, job_files(tmp_path), folder)
        bench.start()
        journey = run_journey(bench, WholeRun(argv, tmp_path, raw, PLACES))
        journey.run()
        return journey, [json.loads(line) for line in turns.read_text().splitlines()]

    return start


def test_cold_has_raw_data_alone_and_warm_what_cold_has_left(travel):
    journey, turns = travel()
    cold = [["01_raw/texts.csv"], {"seed": 42}, {"resume": "never"}]
    left = [["01_raw/texts.csv", "report.json"], {"seed": 43}, {"resume": "never"}]
    assert turns == [cold, left, cold, left]
    labels = [trial.label for trial in journey.bench.results]
    assert labels == [
        f"flatout, {s}, turn {n}" for n in (1, 2) for s in ("cold", "warm")
    ]


def test_raw_data_is_a_copy_that_a_command_may_write_to(travel, tmp_path):
    journey, _ = travel()
    text = "text,label\n"
    assert (tmp_path / "01_raw" / "texts.csv").read_text() == text
    copy = journey.home("flatout") / "data" / "01_raw" / "texts.csv"
    assert copy.read_text() == text + 2 * "good,1\n"  # cold and warm


def test_phases_add_up_to_the_median_by_the_clock_outside(travel):
    rows = travel()[0].summary()["rows"]
    assert [row["name"] for row in rows] == ["flatout, cold", "flatout, warm"]
    for row in rows:
        assert row["median_s"] == pytest.approx(sum(row["turns_s"]) / 2)
        assert sum(row["phases_s"].values()) == pytest.approx(row["median_s"])
        assert row["phases_s"]["steps"] == pytest.approx(0.01)


def test_a_turn_that_fails_is_named_with_its_log(travel):
    journey, turns = travel(dies=3)
    assert len(turns) == 3
    cold, warm = journey.summary()["rows"]
    failed = cold["failed"]
    assert (failed["label"], failed["status"]) == ("flatout, cold, turn 2", "error")
    assert failed["note"] == "ended with 1: Error: the disk is full"
    assert "Error: the disk is full" in Path(failed["log"]).read_text()
    assert len(cold["turns_s"]) == 1
    assert warm["failed"] is None


def test_a_journey_that_was_cut_short_goes_on(travel):
    _, turns = travel(dies=3)
    assert len(turns) == 3
    journey, turns = travel()  # `running` is still there
    assert len(turns) == 5
    assert journey.bench.reused == 2
    assert all(len(row["turns_s"]) == 2 for row in journey.summary()["rows"])


def test_a_command_that_hangs_is_ended(tmp_path):
    asleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    found = timed(asleep, tmp_path / "log", tmp_path, os.environ, 0.5, None)
    assert (found.status, found.note) == ("timeout", "stopped after 0.5 s")


ASKER = """
import os, sys
from pathlib import Path
from flatout.engine.benchmark.journey.commands import timed
folder = Path(sys.argv[1])
sleeps = "import os, pathlib, sys, time; "
sleeps += "pathlib.Path(sys.argv[1]).write_text(str(os.getpid())); time.sleep(600)"
command = [sys.executable, "-c", sleeps, str(folder / "pid")]
timed(command, folder / "log", folder, os.environ, 600, None)
"""


def test_a_command_ends_with_a_benchmark_that_was_killed(tmp_path):
    asker = subprocess.Popen([sys.executable, "-c", ASKER, tmp_path])
    file = tmp_path / "pid"
    while not (file.exists() and file.read_text()):
        assert asker.poll() is None
        time.sleep(0.05)
    asker.kill()
    asker.wait()
    gone(int(file.read_text()))


def test_the_contenders_change_places_from_turn_to_turn(tmp_path):
    asked = settings(mode="journey", repeats=2)
    bench = Bench(asked, job_files(tmp_path), tmp_path)
    plan = Journey(bench, WholeRun(lambda *_: [], tmp_path, tmp_path, {})).plan()
    told = [one.label.split(", ")[:2] for one in plan]
    names = ["flatout", "trainer-default", "trainer-best"]
    once = [[name, start] for name in names for start in STARTS]
    back = [[name, start] for name in reversed(names) for start in STARTS]
    assert told == [*once, *back]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("text", None),
        ("pieces", None),
        ("log keys", "transformers has no model of type log_key_lstm"),
        ("numbers", "train.rows is arrays, and the scripts read texts"),
    ],
)
def test_a_job_without_a_script_says_why(kind, why, tmp_path):
    assert no_script(job_of(kind, tmp_path)) == why


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"train": {"layer_decay": 0.9}}, "the Trainer has no train.layer_decay"),
        (
            {"train": {"schedule": "wsd"}},
            "the Trainer has no train.schedule: wsd",
        ),
        (
            {"tokenize": {"join_texts": True}},
            "they do not join texts (tokenize.join_texts)",
        ),
    ],
)
def test_settings_without_a_flag_say_so(change, why, tmp_path):
    job = job_of("text", tmp_path)
    [(group, values)] = change.items()
    found = getattr(job.settings, group).model_copy(update=values)
    changed = job.settings.model_copy(update={group: found})
    assert no_script(replace(job, settings=changed)) == why


def test_the_script_is_told_the_same_optimisation(tmp_path):
    job = job_of("text", tmp_path)
    made = {"tokenizer": tmp_path / "tokenizer", "model": tmp_path / "model"}
    told = script_job("trainer-best", job, tmp_path, made, tmp_path)
    assert (told["labels"], told["config"]) == ("class", str(tmp_path / "model"))
    arguments = told["arguments"]
    assert arguments["max_steps"] == 6
    assert arguments["per_device_train_batch_size"] == len(job.train)
    assert arguments["per_device_eval_batch_size"] == 4 * len(job.train)
    assert arguments["learning_rate"] == 1e-2
    assert told["evaluate_at_end"]
    assert "eval_strategy" not in arguments
    default = script_job("trainer-default", job, tmp_path, made, tmp_path)["arguments"]
    assert "optim" not in default


def test_labels_are_what_the_models_loss_takes(tmp_path):
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad"]
    vocabulary = tmp_path / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    tokenizer = BertTokenizerFast(str(vocabulary))
    numbers = {"no": 0, "yes": 1, "so": 2}

    def labels(kind, found):
        batch = {"text": ["good bad good", "bad"], "label": found}
        encoded = encode(batch, tokenizer, kind, numbers, 4)
        assert [len(ids) for ids in encoded["input_ids"]] == [4, 3]
        return encoded.get("labels")

    assert labels("class", ["yes", "no"]) == [1, 0]
    assert labels("number", [1, 2.5]) == [1.0, 2.5]
    assert labels("several", [["so", "no"], []]) == [[1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    assert labels("tokens", None) is None


def test_commands_set_their_own_variables(monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("OWN", "kept")
    found = environment.environment_of_commands(RuntimeSettings(), {"CACHE": "there"})
    assert not {"MLFLOW_TRACKING_URI", "OMP_NUM_THREADS", "RANK"} & found.keys()
    assert (found["OWN"], found["CACHE"]) == ("kept", "there")


def test_the_best_script_has_variables_that_are_best_too():
    runtime = RuntimeSettings(threads=3)
    found = script_variables("trainer-best", runtime)
    assert (found["OMP_NUM_THREADS"], found["GOMP_SPINCOUNT"]) == ("3", "10000")
    assert "TOKENIZERS_PARALLELISM" not in found
    assert "OMP_NUM_THREADS" not in script_variables("trainer-default", runtime)


def test_without_kedro_nobody_knows_the_command(tmp_path):
    bench = Bench(settings(mode="journey"), job_files(tmp_path), tmp_path)
    with pytest.raises(SettingsError, match="journey starts whole commands"):
        run_journey(bench, None)
