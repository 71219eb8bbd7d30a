"""The benchmark pipeline: nodes as functions, a real run, and files that are kept."""

import csv
import json
import shutil
import signal
import threading
from pathlib import Path

import datasets
import pandas as pd
import pytest
import yaml

from flatout.datasets import CsvTable, KeptTable, TunedParameters
from flatout.engine.benchmark.outcome import BenchmarkError
from flatout.engine.benchmark.recommend import provenance
from flatout.engine.benchmark.runner import ALONE
from flatout.engine.launch.job_files import token_key
from flatout.engine.machine.environment import device_name
from flatout.engine.parameters import parse_settings
from flatout.engine.rows.rows import rows_from_dataset
from flatout.pipelines.benchmark import create_pipeline
from flatout.pipelines.benchmark.nodes import (
    check_trials,
    show_benchmark,
    write_tuned,
)
from flatout.project.hooks import Run, SettingsHooks
from flatout.project.tuned import tuned_mismatches
from flatout.reports.markdown import time_text
from flatout.reports.report import ladder_text, report_text
from flatout.tracking.outcomes import record_node_outputs
from flatout.tracking.record import RunRecord
from tests.pipelines.tokens import write_tokens
from tests.projects import context_of, copied_conf, interrupted, ran, runs_of

TRIAL = {
    "trial_id": "001",
    "mode": "grid",
    "kind": "end_to_end",
    "status": "ok",
    "label": "",
    "note": "",
    "strategy": "packed",
    "precision": "fp32",
    "token_budget": 512,
    "global_batch_size": 8,
    "num_workers": 0,
    "prefetch_factor": 2,
    "pin_memory": True,
    "world_size": 1,
    "samples_per_s": 50.0,
    "samples_per_s_spread_pct": 1.0,
    "loader_samples_per_s": None,
    "total_ms": 160.0,
    "io_ms": 1.0,
    "forward_ms": 60.0,
    "backward_ms": 90.0,
    "optimizer_ms": 5.0,
    "gpu_util_pct": 92.0,
    "compile": True,
    "cuda_graphs": True,
    "reserved_memory_gib": 1.5,
    "elapsed_s": 9.0,
}
RUNG = {
    "rung": 0,
    "name": "conf/slow",
    "samples_per_s": 10.0,
    "individual": 1.0,
    "cumulative": 1.0,
    "spread_pct": 3.0,
    "kept": True,
    "changes_optimisation": False,
    "status": "ok",
    "note": "",
    "leave_one_out": None,
    "leave_one_out_spread_pct": None,
    "leave_one_out_note": "",
}
GAINED = {"samples_per_s": 25.0, "individual": 2.5, "cumulative": 2.5}
GAINED |= {"leave_one_out": 1.2, "leave_one_out_spread_pct": 2.0}
TF32 = {**RUNG, "rung": 1, "name": "TF32", **GAINED}
LADDER = pd.DataFrame([RUNG, TF32])
NOTHING = dict.fromkeys(("samples_per_s", "individual", "cumulative"))
TRIALS = pd.DataFrame([TRIAL])
FAILED = {**TRIAL, "label": "as configured", "status": "timeout"}
FAILED |= {"note": "stopped after 60 s", "log": "l.txt"}
TIMES = {"epochs": 3.0, "hours_before": 2.0, "hours_after": 1.0}
SUMMARY = {
    "mode": "tune",
    "answer": "Tuned.",
    "date": "2026-01-02 03:04:05",
    "device": "H200",
    "peak_tflops": 989.5,
    "versions": {"torch": "2.13"},
    "rows": 1000,
    "mean_tokens": 92.0,
    "longest_tokens": 320,
    "global_batch_size": 8,
    "max_steps": None,
    "memory_gib": 140.0,
    "memory_headroom": 0.1,
    "trials": {"ok": 1},
    "reused_trials": 0,
    "skipped": [],
    "elapsed_s": 60.0,
    "failed": None,
    "picks": {"fastest": TRIAL, "most_efficient": TRIAL, "recommended": TRIAL},
    "verdict": {
        "trial_id": "001",
        "bound": "compute",
        "because": "busy",
        "advice": "more devices",
    },
    "time_to_train": TIMES,
    "tuned": {
        "gained": True,
        "changes_optimisation": False,
        "provenance": {
            "samples_per_s": 50.0,
            "samples_per_s_low": 48.0,
            "samples_per_s_high": 52.0,
            "samples_per_s_before": 40.0,
        },
    },
    "profile": None,
}


def test_a_page():
    report = show_benchmark(TRIALS, SUMMARY, LADDER)
    for text in (
        "# Benchmark: tune",
        "2026-01-02 03:04:05, H200, peak by data sheet 989.50 TFLOP/s",
        "| recommended | 001 | 8 | packed | 512 | 0 | fp32 | 50 | 92 | 1.5 |",
        "## Bound by: compute",
        "The steps of 3 epochs need 1 h instead of 2 h.",
    ):
        assert text in report


@pytest.mark.parametrize(
    ("hours", "text"),
    [
        (None, ""),
        (8.08e-05, "0.291 s"),
        (0.0125, "45 s"),
        (0.035, "2.1 min"),
        (1.2, "1.2 h"),
        (5260.0, "5,260 h"),
    ],
)
def test_times_have_the_unit_that_fits(hours, text):
    assert time_text(hours) == text


SLOW_DISK = {"of": "003", "files": {}, "note": "stopped after 2 s"}
TRACE = {"trace": {"file": "t.json.gz", "view": "a browser"}}
REFUSED = {**FAILED, "status": "error", "log": "", "note": "batch 64 is too large"}


@pytest.mark.parametrize(
    ("changes", "said", "unsaid"),
    [
        (
            {"time_to_train": {**TIMES, "epochs": 1.0, "hours_before": None}},
            "The steps of 1 epoch need 1 h.",
            "max_steps",
        ),
        (
            {"mode": "ladder"},
            "| TF32 | 25 | 2.50x | 3 | 2.50x | yes | 1.20x (IQR 2 %) |",
            "Profile of",
        ),
        ({}, "| fp32 | 50 | 92 | 1.5 | 1.07 | 33.3 |\n", "| TF32 |"),
        (
            {"picks": dict.fromkeys(SUMMARY["picks"]), "failed": REFUSED},
            "Trial 001 (as configured) ended as error: batch 64 is too large.\n",
            "Its log",
        ),
        (
            {"profile": SLOW_DISK},
            "## Profile of trial 003\n\nIt left no files: stopped after 2 s. "
            "`benchmark_trials.csv` names its log.\n",
            "a browser",
        ),
        (
            {"profile": {**SLOW_DISK, "files": TRACE}},
            "## Profile of trial 003\n\n- trace: `t.json.gz` (a browser)\n",
            "It left no files",
        ),
    ],
)
def test_the_page_says_what_came_of_it(changes, said, unsaid):
    page = report_text({**SUMMARY, **changes}, TRIALS, LADDER)
    assert said in page
    assert unsaid not in page


def test_trials_that_differ_in_little_are_told_apart():
    configured = {**TRIAL, "label": "as configured"}
    several = {**TRIAL, "trial_id": "002", "label": float("nan"), "world_size": 2}
    loader = {**TRIAL, "trial_id": "003", "kind": "loader", "samples_per_s": None}
    loader |= {"loader_samples_per_s": 900.0, "reserved_memory_gib": None}
    one = show_benchmark(pd.DataFrame([configured]), SUMMARY, LADDER)
    assert "| trial | label | kind | devices | batch | strategy |" in one
    assert "| samples/s | GPU % | memory GiB | status |" in one
    trials = pd.DataFrame([configured, several, loader])
    shown = show_benchmark(trials, SUMMARY, LADDER)
    assert "| 001 | as configured | end_to_end | 1 | 8 | packed |" in shown
    assert "| 002 |  | end_to_end | 2 | 8 | packed |" in shown
    assert "| samples/s | loader/s | GPU % | memory GiB | status |" in shown
    assert "|  | 900 | 92 |  | ok |" in shown


def test_a_ladder_says_which_rungs_failed_and_why():
    failed = {**RUNG, **NOTHING, "status": "oom", "note": "stopped at 2.0 GiB resident"}
    text = ladder_text(pd.DataFrame([failed, {**RUNG, "name": "TF32", "note": "n"}]))
    assert text.splitlines()[2].endswith("| total | kept | leave-one-out | status |")
    shown = "| conf/slow |  |  | 3 |  | no |  | oom: stopped at 2.0 GiB resident |"
    assert shown in text
    assert "| TF32 | 10 | 1.00x | 3 | 1.00x | yes |  | ok |" in text
    alone = {**RUNG, "name": "TF32", "note": f"n; {ALONE}"}
    text = ladder_text(pd.DataFrame([RUNG, alone]))
    assert f"| 1.00x | yes |  | ok, {ALONE} |" in text


def test_a_ladder_shows_what_each_optimisation_gains_last(tmp_path):
    note = "together with CUDA graphs"
    failed = {**RUNG, "name": "bf16", "leave_one_out_note": "oom: stopped at 2.0 GiB"}
    steps = pd.DataFrame([RUNG, TF32, {**TF32, "leave_one_out_note": note}, failed])
    table = KeptTable(filepath=str(tmp_path / "ladder.csv"))
    table.save(steps)
    for found in (steps, table.load()):
        cells = [row.split(" | ")[-1] for row in ladder_text(found).splitlines()[4:8]]
        assert cells == [
            " |",
            "1.20x (IQR 2 %) |",
            f"1.20x (IQR 2 %), {note} |",
            "oom: stopped at 2.0 GiB |",
        ]


@pytest.mark.parametrize(
    ("steps", "metrics"),
    [
        (pd.DataFrame(), {}),
        (pd.DataFrame([RUNG]), {}),
        (
            pd.DataFrame([RUNG, {**TF32, "name": "mixed precision (bf16)"}]),
            {"leave_one_out_mixed-precision-bf16": 1.2},
        ),
    ],
)
def test_gains_are_metrics_of_the_run(steps, metrics):
    record = RunRecord("", "", "")
    summary = {**SUMMARY, "picks": {}}
    outputs = {"trials": TRIALS, "summary": summary, "ladder": steps}
    named = {f"benchmark_{name}": output for name, output in outputs.items()}
    record_node_outputs(record, named)
    assert record.metrics == metrics


def test_an_empty_benchmark_is_shown_as_such():
    empty = {**SUMMARY, "picks": {"fastest": None}, "verdict": None, "failed": FAILED}
    empty |= {"time_to_train": None, "trials": {}, "tuned": None}
    shown = show_benchmark(pd.DataFrame(), empty, pd.DataFrame())
    assert write_tuned(empty) == ""
    assert (
        "Trial 001 (as configured) ended as timeout: stopped after 60 s. "
        "Its log: `l.txt`"
    ) in shown
    trials = pd.DataFrame([FAILED, {**FAILED, "trial_id": "002", "log": float("nan")}])
    for summary, told in (
        (empty, "Trial 001 (as configured) ended as timeout: stopped after 60 s."),
        ({**empty, "failed": None}, "Trial 001 (as configured) ended as timeout"),
    ):
        with pytest.raises(
            BenchmarkError, match="no training could be measured, 2"
        ) as no:
            check_trials(trials, summary, shown)
        assert told in str(no.value)
    beside = [{**TRIAL, "kind": "loader"}]
    with pytest.raises(BenchmarkError, match=r"no training .*, 2 were"):
        check_trials(pd.concat([trials, pd.DataFrame(beside)]), empty, "")
    check_trials(pd.concat([trials, TRIALS]), empty, "")


def test_a_table_that_two_machines_write_is_whole_whenever_it_is_read(tmp_path):
    file = tmp_path / "sweep_trials.csv"
    rows = pd.DataFrame({"trial_id": ["001", "010"], "rate": [0.1 + 0.2, 1e-5]})
    writers = [CsvTable(filepath=str(file)) for _ in range(2)]
    writers[0].save(rows)
    ended = threading.Event()

    def write(table) -> None:
        while not ended.is_set():
            table.save(rows)

    threads = [threading.Thread(target=write, args=[table]) for table in writers]
    for thread in threads:
        thread.start()
    try:
        for _ in range(100):
            pd.testing.assert_frame_equal(writers[0].load(), rows)
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def test_a_mode_without_a_ladder_leaves_the_last_one(tmp_path):
    table = KeptTable(filepath=str(tmp_path / "ladder.csv"))
    assert table.load().empty
    table.save(LADDER)
    table.save(pd.DataFrame())
    assert table.load()["name"].tolist() == ["conf/slow", "TF32"]


def test_nothing_recommended_leaves_the_tuned_environment(tmp_path):
    dataset = TunedParameters(filepath=str(tmp_path / "tuned" / "parameters.yml"))
    dataset.save("train: {}\n")
    dataset.save("")
    assert dataset.load() == "train: {}\n"


def test_what_was_written_says_how_to_train_with_it(tmp_path, caplog):
    caplog.set_level("INFO")
    file = tmp_path / "conf" / "tuned" / "parameters.yml"
    entry = TunedParameters(filepath=str(file), measured_in={"environment": "images"})
    entry.save("train:\n  global_batch_size: 16\ntuned:\n  device: cpu\n")
    assert "kedro run --env=tuned, with the same --params" in caplog.text
    assert yaml.safe_load(file.read_text()) == {
        "train": {"global_batch_size": 16},
        "tuned": {"device": "cpu", "environment": "images"},
    }


@pytest.fixture(scope="module")
def data(tmp_path_factory, empty_store) -> Path:
    """A data folder after split and tokenize."""
    folder = write_tokens(tmp_path_factory.mktemp("data"))
    shutil.copy(empty_store, folder / "mlflow.db")
    return folder


@pytest.mark.process
@pytest.mark.slow
def test_a_grid_from_the_command_line(data):
    parameters = (
        f"data_dir={data},benchmark.mode=grid,benchmark.batch_sizes=16 64,"
        "benchmark.min_window_s=0,runtime.threads=1"
    )
    said = ran("run", "--env=test", "--pipelines=benchmark", f"--params={parameters}")
    folder = data / "08_reporting"
    with (folder / "benchmark_trials.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert [(line["kind"], line["status"]) for line in lines] == [
        ("end_to_end", "ok"),  # as configured
        ("end_to_end", "ok"),
        ("end_to_end", "error"),
    ]
    assert "larger than the data (48 train rows)" in lines[2]["note"]
    assert float(lines[1]["samples_per_s"]) > 0
    summary = json.loads((folder / "benchmark_summary.json").read_text())
    recommended = summary["picks"]["recommended"]["trial_id"]
    assert recommended in ("001", "002")
    assert "Bound by: " in said and "benchmark_report.md" in said
    gained = summary["tuned"]["gained"]
    assert recommended == "002" or not gained
    advice = (
        "Train with them: kedro run" if gained else "No measured settings are faster"
    )
    assert advice in " ".join(said.split())
    tuned = yaml.safe_load((data / "tuned" / "parameters.yml").read_text())
    assert (
        tuned["train"]["batching"] == {"001": "packed", "002": "grouped"}[recommended]
    )
    assert "# Benchmark: grid" in (folder / "benchmark_report.md").read_text()
    assert_nested_runs(data)


@pytest.mark.process
def test_a_sweep_ended_by_ctrl_c_says_what_it_keeps(data, tmp_path):
    parameters = (
        f"data_dir={data},benchmark.mode=grid,benchmark.min_window_s=0,"
        "benchmark.num_workers=0 1 2,runtime.threads=1"
    )
    log = tmp_path / "log"
    log.touch()
    command = ["run", "--env=test", "--pipelines=benchmark", f"--params={parameters}"]
    has_a_trial = lambda: "] ok" in log.read_text()  # noqa: E731
    status = interrupted(command, log, has_a_trial, signal.SIGINT)
    assert status == 128 + signal.SIGINT
    assert (
        "Interrupted: the measured trials are kept; the same command continues with "
        "the rest"
    ) in " ".join(log.read_text().split())
    assert "Traceback" not in log.read_text()


def assert_nested_runs(data: Path) -> None:
    runs = {run.info.run_id: run for run in runs_of(data)}
    nested = [r for r in runs.values() if "mlflow.parentRunId" in r.data.tags]
    statuses = sorted(run.info.status for run in nested)
    assert statuses == ["FAILED", *["FINISHED"] * 2]
    [parent] = {run.data.tags["mlflow.parentRunId"] for run in nested}
    top = runs[parent]
    assert top.data.metrics["recommended_samples_per_s"] > 0
    assert top.data.tags["bound_by"]


def test_the_tuned_environment_is_one_that_kedro_trains_with(tmp_path):
    conf = copied_conf(tmp_path)
    tuned = conf / "tuned/parameters.yml"
    tuned.parent.mkdir()
    tuned.write_text(
        "train:\n  token_budget: 1024\n  loader: {num_workers: 1}\n"
        "tuned: {device: H200}\n"
    )
    context = context_of("tuned", conf_source=str(conf))
    settings = parse_settings(context.config_loader["parameters"])
    assert settings.train.token_budget == 1024
    assert settings.train.loader.prefetch_factor == 2
    assert settings.tuned == {"device": "H200"}


def test_settings_tuned_elsewhere_warn_before_training(data, caplog):
    settings = parse_settings(
        {
            "model": {"config": {"model_type": "bert"}},
            "tuned": {"device": "H200", "token_key": "other", "versions": 3},  # broken
        }
    )
    rows = datasets.load_from_disk(str(data / "05_model_input" / "train_tokens"))
    found = tuned_mismatches(settings, rows)
    assert [text.split()[:2] for text in found] == [
        ["device", "H200,"],
        ["data", "other,"],
    ]
    caplog.clear()
    hooks = SettingsHooks(run := Run())
    run.settings = settings
    node = create_pipeline().nodes[0]
    hooks.before_node_run(node, {"train_tokens": rows})
    assert not caplog.text
    hooks.before_node_run(node._copy(name="train_model"), {"train_tokens": rows})
    assert "were measured with another device H200, here " in caplog.text


@pytest.mark.parametrize(
    ("came", "level"), [(100.0, "INFO"), (80.0, "WARNING")], ids=["inside", "below"]
)
def test_a_training_ends_with_what_trials_gave(data, caplog, came, level):
    rows = datasets.load_from_disk(str(data / "05_model_input" / "train_tokens"))
    settings = parse_settings({"model": {"config": {"model_type": "bert"}}})
    here = provenance(settings, device_name(), 1, token_key(rows_from_dataset(rows)))
    promise = {"samples_per_s_low": 95.0, "samples_per_s_high": 105.0}
    hooks = SettingsHooks(run := Run())
    run.settings = settings.model_copy(update={"tuned": {**here, **promise}})
    node = create_pipeline().nodes[0]._copy(name="train_model")
    hooks.before_node_run(node, {"train_tokens": rows})
    assert not caplog.records
    with caplog.at_level("INFO"):
        hooks.after_node_run(
            node, {"train_report": {"samples_per_s": came, "train_wall_s": 9.0}}
        )
    [record] = caplog.records
    assert record.levelname == level
    assert (
        f"trials gave 95.0 to 105.0 samples/s, this training {came:.1f}: "
        in record.message
    )
