"""The sweep: what it tries, stores and refuses."""

import json
import sys

import numpy as np
import pytest
from optuna.trial import create_trial

from flatout.engine.benchmark.trials import processes as trials
from flatout.engine.parameters import SettingsError, SweepSettings, parse_settings
from flatout.engine.sweep import study
from flatout.engine.sweep.best import SweepError, choose_best
from flatout.engine.sweep.devices import sets_of
from flatout.engine.sweep.folds import fold_files
from flatout.engine.sweep.queued import ANSWER, PLACE, best_trial_by_place
from flatout.engine.sweep.space import check_sweep, combinations
from flatout.engine.sweep.sweep import run_sweep
from tests.conftest import PROJECT
from tests.engine import benches
from tests.engine.test_folds import splits_of

RATE, BATCH = "train.learning_rate", "train.global_batch_size"


def settings(folder=".", **sweep):
    dumped = benches.settings().model_dump(mode="json")
    kept = {"folder": str(folder), "storage": f"{folder}/sweep.db"}
    return parse_settings({**dumped, "sweep": {**kept, **sweep}})


@pytest.fixture
def formula(monkeypatch, tmp_path, warm_trials):
    """Run trials of tests/engine/sweep_trial.py. The value contains the lines of
    executed trials."""
    monkeypatch.setattr(trials, "MODULE", "tests.engine.sweep_trial")
    monkeypatch.setenv("PYTHONPATH", f"{PROJECT}:{PROJECT}/src")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    file = tmp_path / "sweep" / "ran"
    return lambda: file.read_text().splitlines() if file.exists() else []


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [("ok", "oom", 0), ("oom", "ok", 1), ("ok", "ok", 1), ("error", "oom", 1)],
)
@pytest.mark.parametrize("turned", [False, True])
def test_of_a_combination_that_was_tried_twice_what_ended_well_is_kept(
    first, second, kept, turned
):
    tried = []
    for number, status in enumerate((first, second)):
        trial = create_trial(
            value=0.0, user_attrs={PLACE: 7, ANSWER: {"status": status}}
        )
        trial.number = number
        tried.append(trial)
    found = best_trial_by_place(tried[::-1] if turned else tried)
    assert {place: trial.number for place, trial in found.items()} == {7: kept}


def test_a_grid_is_every_combination_once():
    swept = SweepSettings(grid={RATE: [0.1, 0.2, 0.1], BATCH: [8, 16]})
    assert combinations(swept) == [
        {RATE: 0.1, BATCH: 8},
        {RATE: 0.1, BATCH: 16},
        {RATE: 0.2, BATCH: 8},
        {RATE: 0.2, BATCH: 16},
    ]


def test_the_command_line_may_nest_and_null_drops():
    nested = {RATE: [1.0], BATCH: None, "train": {"learning_rate": "3e-4 0.001"}}
    nested |= {"model": {"config": {"hidden_size": 32}}}
    swept = SweepSettings(grid=nested)
    assert swept.grid == {RATE: [3e-4, 0.001], "model.config.hidden_size": [32]}
    over_base = {RATE: [1.0], BATCH: [16], "train": {"learning_rate": None}}
    assert SweepSettings(grid=over_base).grid == {BATCH: [16]}
    ranges = {"train": {"learning_rate": {"low": 1e-4, "high": 1e-2, "log": True}}}
    swept = SweepSettings(sampler="tpe", ranges=ranges)
    assert swept.ranges[RATE].high == 1e-2


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"grid": {"train.learning_rat": [1.0]}}, f"did you mean {RATE}?"),
        ({"grid": {"trian.learning_rate": [1.0]}}, "did you mean train?"),
        ({"grid": {RATE: [0.1, -1.0]}}, f"{RATE}: should be greater than 0"),
        ({"grid": {"tokenize.max_length": [64]}}, "token rows are made before"),
        ({"grid": {"train.distributed.num_processes": [2]}}, "cannot be swept"),
    ],
)
def test_what_cannot_be_swept_is_refused_before_anything_runs(sweep, message):
    with pytest.raises(SettingsError, match="sweep") as refused:
        check_sweep(settings(**sweep))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("sweep", "message"),
    [
        ({"grid": {}}, "are empty: name"),
        ({"grid": {RATE: []}}, f"no values to try for {RATE}"),
        ({"ranges": {RATE: {"low": 1, "high": 2}}}, "ranges need sampler tpe"),
        (
            {"sampler": "tpe", "ranges": {RATE: {"low": 2, "high": 1}}},
            "low 2 is not below high 1",
        ),
        ({"gird": {}}, "did you mean sweep.grid?"),
        ({"sampler": "tpe", "ranges": {RATE: {"lo": 1, "high": 2}}}, f"{RATE}.low: is"),
        ({"sampler": "tpe", "ranges": {RATE: 1}}, "should be a group of parameters"),
    ],
)
def test_a_sweep_that_makes_no_sense_is_refused(sweep, message):
    with pytest.raises(SettingsError) as refused:
        settings(**sweep)
    assert message in str(refused.value)


@pytest.mark.process
@pytest.mark.slow
def test_a_trial_has_a_rank_on_each_of_its_devices(tmp_path, monkeypatch, warm_trials):
    """This is a real training run, in which two cores simulate two GPUs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "sweep"
    asked = settings(folder, grid={RATE: [0.1]}, devices_per_trial=2)
    [row] = run_sweep(asked, benches.job_files(tmp_path))
    assert (row["status"], row["note"]) == ("ok", "")
    figures = json.loads((folder / row["key"] / "answer.json").read_text())["figures"]
    assert (figures["world_size"], figures["steps"]) == (2, 6)


@pytest.mark.process
def test_memory_that_one_device_has_not_is_asked_of_two(tmp_path, formula):
    """Trials that succeeded on one device are not repeated."""
    grid, files = {RATE: [0.02], BATCH: [8, 13]}, benches.job_files(tmp_path)
    for ranks, ran in ((1, 2), (1, 3), (2, 4)):
        study = f"study_{ranks}_{ran}_{len(formula())}"
        asked = settings(
            tmp_path / "sweep", grid=grid, study=study, devices_per_trial=ranks
        )
        rows = run_sweep(asked, files)
        assert [row["status"] for row in rows] == ["ok", "oom"]
        assert len(formula()) == ran


@pytest.mark.process
def test_trials_that_fail_cost_the_others_nothing(tmp_path, formula):
    grid = {RATE: [0.02], BATCH: [8, 13, 17]}
    asked = settings(tmp_path / "sweep", grid=grid)
    files = benches.job_files(tmp_path)
    rows = run_sweep(asked, files)
    assert [list(row.values())[:8] for row in rows] == [
        ["001", 0.02, 8, 0.01, 0.02, 8.0, "ok", ""],
        ["002", 0.02, 13, None, None, None, "oom", rows[1]["note"]],
        ["003", 0.02, 17, None, None, None, "error", "ValueError: seventeen"],
    ]
    with open(rows[2]["log"]) as log:
        assert "ValueError: seventeen" in log.read()
    again = run_sweep(asked, files)
    assert again[:2] == rows[:2]
    assert [row["trial_id"] for row in again] == ["001", "002", "003"]
    assert len(formula()) == 4  # an error is tried again


@pytest.mark.process
def test_each_setting_is_trained_with_every_seed_or_fold(tmp_path, formula):
    folder, files = tmp_path / "sweep", benches.job_files(tmp_path)
    grid = {RATE: [0.02, 0.03]}
    rows = run_sweep(settings(folder, grid=grid, seeds=2), files)
    asked = [(row[RATE], row["runtime.seed"], row["status"]) for row in rows]
    assert asked == [(r, seed, "ok") for r in grid[RATE] for seed in (42, 43)]
    best = choose_best(rows, settings(folder, grid=grid, seeds=2))
    assert best["settings"] == {RATE: 0.02}

    splits = splits_of(np.arange(72) % 2, [48, 60])
    folds = fold_files(files, splits, 2, folder / "rows")
    rows = run_sweep(settings(folder, grid={RATE: [0.02]}), files, folds)
    assert [(row["fold"], row["test_loss"]) for row in rows] == [(1, 0.5), (2, 0.5)]
    asked = [
        json.loads((folder / row["key"] / "spec.json").read_text()) for row in rows
    ]
    tested = [one["job"]["splits"]["test"] for one in asked]
    assert tested == [str(one.splits["test"]) for one in folds]


@pytest.mark.process
def test_each_gpu_takes_the_next_trial(tmp_path, formula, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab")
    grid = {RATE: [0.1, 0.2, 0.3]}
    asked = settings(tmp_path / "sweep", grid=grid)
    rows = run_sweep(asked, benches.job_files(tmp_path))
    assert [row[RATE] for row in rows] == [0.1, 0.2, 0.3]
    ran = dict(line.split() for line in formula())
    assert set(ran) == {"0.1", "0.2", "0.3"}
    assert set(ran.values()) == {"4", "GPU-ab"}


@pytest.mark.process
def test_other_settings_or_tokens_are_trained_anew(tmp_path, formula):
    folder, grid = tmp_path / "sweep", {RATE: [0.1]}
    files = benches.job_files(tmp_path)
    run_sweep(settings(folder, grid=grid), files)
    by_accuracy = {"grid": grid, "choose_by": "validation_accuracy"}
    run_sweep(settings(folder, **by_accuracy), files)
    assert len(formula()) == 1, "another study takes what was trained before"
    run_sweep(settings(folder, grid={**grid, "runtime.seed": [1]}), files)
    run_sweep(settings(folder, grid=grid), benches.job_files(tmp_path / "b", rows=40))
    assert len(formula()) == 3
    larger = run_sweep(settings(folder, grid={RATE: [0.1, 0.2]}), files)
    assert [row[RATE] for row in larger] == [0.1, 0.2]
    assert len(formula()) == 4


@pytest.mark.process
def test_a_figure_that_no_trial_has_ends_the_sweep_at_the_first(tmp_path, formula):
    """Names of compute_metrics are unknown before it has been called."""
    files, grid = benches.job_files(tmp_path), {RATE: [0.1, 0.2]}
    asked = settings(tmp_path / "sweep", grid=grid)
    train = asked.train.model_copy(update={"compute_metrics": "tests.own_metrics.any"})

    def sweep(name):
        options = asked.sweep.model_copy(update={"choose_by": name})
        run_sweep(asked.model_copy(update={"train": train, "sweep": options}), files)

    with pytest.raises(SettingsError, match=r"acuracy: did you mean validation_accu"):
        sweep("validation_acuracy")
    assert len(formula()) == 1
    sweep("validation_accuracy")
    assert len(formula()) == 2


@pytest.mark.process
def test_other_own_code_is_another_sweep(tmp_path, formula, monkeypatch):
    """Each of three modules is changed in turn. The third is next to the task's
    module."""
    dumped = settings(tmp_path / "sweep", grid={RATE: [0.1]}).model_dump(mode="json")
    dumped["model"] |= {"task": "my_tasks.mine.TwoNumbers", "family": "own_family"}
    asked, files = parse_settings(dumped), benches.job_files(tmp_path)

    def sweep_with(changed=None):
        folder = tmp_path / f"with_{changed}"
        (folder / "my_tasks").mkdir(parents=True, exist_ok=True)
        task = "from tests.own_task import TwoNumbers\n"
        modules = {"my_tasks/mine.py": task, "own_family.py": ""}
        modules |= {"my_tasks/__init__.py": "", "my_tasks/losses.py": ""}
        for name, code in modules.items():
            (folder / name).write_text(code + "SCALE = 2" * (name == changed))
        with monkeypatch.context() as here:
            here.syspath_prepend(str(folder))
            here.setenv("PYTHONPATH", f"{folder}:{PROJECT}:{PROJECT}/src")
            for name in [n for n in sys.modules if n.split(".")[0] == "my_tasks"]:
                del sys.modules[name]
            return run_sweep(asked, files)

    first = sweep_with()
    assert sweep_with() == first
    names = ("my_tasks/mine.py", "my_tasks/losses.py", "own_family.py")
    for count, changed in enumerate(names, 2):
        sweep_with(changed)
        assert len(formula()) == count, "other code trains anew"
    assert sweep_with() == first
    assert len(formula()) == 4, "the same code takes what it trained before"


@pytest.mark.process
def test_a_torn_answer_is_none(tmp_path, formula, caplog):
    folder, files = tmp_path / "sweep", benches.job_files(tmp_path)

    def loss(study):
        [row] = run_sweep(settings(folder, grid={RATE: [0.1]}, study=study), files)
        return row["validation_loss"]

    first = loss("first")
    [file] = folder.glob("*/answer.json")
    torn = ["", '{"status": "o', "[]", '{"status": "ok"}']
    for count, text in enumerate(torn, 2):
        file.write_text(text)
        assert loss(f"again {count}") == first
        assert len(formula()) == count
    told = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(told) == len(torn)
    assert told[0].startswith(f"{file} is incomplete")
    assert loss("kept") == first
    assert len(formula()) == 5, "the new answer is whole"


@pytest.mark.process
def test_other_versions_train_anew(tmp_path, formula, monkeypatch):
    folder, files = tmp_path / "sweep", benches.job_files(tmp_path)
    first = run_sweep(settings(folder, grid={RATE: [0.1]}), files)
    monkeypatch.setattr(study, "versions", lambda: {"torch": "1.0"})
    second = run_sweep(settings(folder, grid={RATE: [0.1]}), files)
    assert first[0]["key"] != second[0]["key"]
    assert len(formula()) == 2


@pytest.mark.process
def test_optuna_goes_on_with_what_it_knew(tmp_path, formula):
    sweep = {
        "sampler": "optuna",  # its earlier name
        "grid": {BATCH: [8, 16]},
        "ranges": {RATE: {"low": 1e-4, "high": 1e-1, "log": True}},
    }
    files, folder = benches.job_files(tmp_path), tmp_path / "sweep"
    first = run_sweep(settings(folder, n_trials=2, **sweep), files)
    rows = run_sweep(settings(folder, n_trials=4, **sweep), files)
    assert rows[:2] == first
    assert len({row[RATE] for row in rows}) == 4
    assert all(1e-4 <= row[RATE] <= 1e-1 for row in rows)
    assert {row[BATCH] for row in rows} <= {8, 16}
    assert len(formula()) == 4


ROW = {
    "trial_id": "001",
    RATE: 0.1,
    BATCH: 8,
    "validation_loss": 2.0,
    "validation_accuracy": 0.5,
    "samples_per_s": 9.0,
    "status": "ok",
    "note": "",
    "log": "log.txt",
}


def test_the_best_by_loss_or_by_accuracy():
    second = {**ROW, "trial_id": "002", RATE: 0.2, "validation_loss": 1.0}
    second |= {"validation_accuracy": 0.4}
    failed = {**ROW, "trial_id": "003", "status": "oom", "validation_loss": None}
    rows = [ROW, second, failed]
    assert choose_best(rows, settings()) == {
        "trial_id": "002",
        "settings": {RATE: 0.2, BATCH: 8},
        "chosen_by": "validation_loss",
        "validation_loss": 1.0,
        "validation_accuracy": 0.4,
        "samples_per_s": 9.0,
        "is_winner": False,
        "trials": {"ok": 2, "oom": 1},
        "command": "kedro run --pipelines=train --env=best",
        "environment": None,
    }
    elsewhere = choose_best(rows, settings(), "images")
    assert elsewhere["environment"] == "images"
    options = settings(choose_by="validation_accuracy")
    assert choose_best(rows, options)["trial_id"] == "001"


def test_a_sweep_without_any_result_says_why():
    failed = {**ROW, "status": "error", "note": "too large", "validation_loss": None}
    with pytest.raises(SweepError, match=r"001 error: too large \(log.txt\)"):
        choose_best([failed], settings())


@pytest.mark.parametrize(
    ("visible", "count", "sets"),
    [
        ("0,1,2", 1, ["0", "1", "2"]),
        ("4,GPU-7,6,5", 2, ["4,GPU-7", "6,5"]),
        ("0,1,2", 2, ["0,1"]),
        ("0,1,2", 3, ["0,1,2"]),
    ],
)
def test_gpus_are_dealt_in_sets(visible, count, sets, monkeypatch, caplog):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = sets_of(count)
    assert found == [{"CUDA_VISIBLE_DEVICES": names} for names in sets]
    assert ("GPU 2 stays idle" in caplog.text) == (visible == "0,1,2" and count == 2)


def test_more_devices_than_there_are_is_refused(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(SettingsError, match="has 2 GPUs to use: set it to at most 2"):
        sets_of(3)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert sets_of(1) == [{}]
    with pytest.raises(SettingsError, match="CPU core"):
        sets_of(10_000)
