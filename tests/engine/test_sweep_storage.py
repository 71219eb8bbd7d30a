"""The stored state of a sweep if commands, machines or storages fail."""

import json
import os
import shutil
import signal
import sqlite3
import subprocess
import tempfile
import threading
import time
import traceback
from collections import Counter
from contextlib import closing, contextmanager
from importlib.util import find_spec
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from flatout.engine.benchmark.trials import processes as trials
from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import SettingsError, parse_settings
from flatout.engine.parameters.secrets import without_password
from flatout.engine.sweep import study as studies
from flatout.engine.sweep.pruning import Pruning
from flatout.engine.sweep.queued import (
    ANSWER,
    PLACE,
    has_remaining_trials,
    is_wanted,
    place_of,
    requeue,
)
from flatout.engine.sweep.space import check_sweep, suggested
from flatout.engine.sweep.storage import ServerStorage, StorageError, opened
from flatout.engine.sweep.study import open_study
from flatout.engine.sweep.sweep import run_sweep
from tests.conftest import PROJECT
from tests.engine import benches
from tests.engine.test_sweep import BATCH, RATE, formula, settings

__all__ = ["formula"]

THREE = {RATE: [0.1, 0.2, 0.3]}
DRAWN = {"sampler": "tpe", "grid": {}, "ranges": {RATE: {"low": 1e-4, "high": 0.1}}}


@contextmanager
def begun(folder: Path, **sweep):
    """Return a study of one command and its options."""
    folder.mkdir(exist_ok=True)
    asked = settings(folder, **sweep)
    job = benches.job_files(folder).open(asked, folder)
    with opened(asked.sweep, requeue) as storage:
        yield open_study(job, storage), asked.sweep


def trained(study, options, statuses=(), jobs=1) -> None:
    """Run all queued trials with Optuna. `statuses` are given by place and default to
    ok."""
    statuses = dict(statuses)

    def objective(trial):
        if not is_wanted(study, options, trial):
            study.stop()
            raise ZeroDivisionError
        suggested(trial, options)
        status = statuses.get(place_of(trial), "ok")
        if status == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        trial.set_user_attr(ANSWER, {"status": status})
        if status != "ok":
            raise ZeroDivisionError
        return 1.0

    study.optimize(objective, n_jobs=jobs, catch=(ZeroDivisionError,))


def places(study, *states) -> list[int]:
    return sorted(t.user_attrs[PLACE] for t in study.get_trials(states=states or None))


def test_a_grid_is_queued_once_by_who_creates_the_study(tmp_path):
    with begun(tmp_path, grid=THREE) as (study, options):
        assert places(study) == [1, 2, 3]
    with begun(tmp_path, grid=THREE) as (study, options):
        assert places(study, TrialState.WAITING) == [1, 2, 3]
        trained(study, options, jobs=3)
        done = study.get_trials(states=(TrialState.COMPLETE,))
        assert sorted(t.params[RATE] for t in done) == [0.1, 0.2, 0.3]
        assert not has_remaining_trials(study, options)
    with begun(tmp_path, grid=THREE) as (study, options):
        assert places(study, TrialState.WAITING) == []


def test_a_creator_that_was_killed_halfway_left_the_rest(tmp_path, monkeypatch):
    def first(study, _):
        study.enqueue_trial({RATE: 0.1}, user_attrs={PLACE: 1})

    monkeypatch.setattr(studies, "queue_again", first)
    with begun(tmp_path, grid=THREE) as (study, _):
        assert places(study) == [1]
    monkeypatch.undo()
    with begun(tmp_path, grid=THREE) as (study, _):
        assert places(study, TrialState.WAITING) == [1, 2, 3]


def the_study(storage):
    [name] = optuna.get_all_study_names(storage)
    return optuna.load_study(storage=storage, study_name=name)


@pytest.mark.parametrize("sweep", [{"grid": THREE}, {**DRAWN, "n_trials": 3}])
def test_what_a_killed_command_had_taken_is_queued_again(tmp_path, sweep):
    with begun(tmp_path, **sweep):
        pass
    pid = os.fork()
    if not pid:
        with begun(tmp_path, **sweep) as (study, options):
            trained(study, options, {2: "killed"})
    assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    with begun(tmp_path, **sweep) as (study, options):
        [killed] = study.get_trials(states=(TrialState.FAIL,))
        assert places(study, TrialState.COMPLETE) == [1]
        assert 2 in places(study, TrialState.WAITING)
        trained(study, options, jobs=2)
        done = study.get_trials(states=(TrialState.COMPLETE,))
        assert sorted(t.user_attrs[PLACE] for t in done)[:2] == [1, 2]
        assert len(done) == 3
        assert killed.params in [t.params for t in done]


def test_tpe_draws_as_many_as_asked_on_all_devices_together(tmp_path):
    for total in (3, 5):
        with begun(tmp_path, **DRAWN, n_trials=total) as (study, options):
            trained(study, options, jobs=3)
            assert len(study.get_trials(states=(TrialState.COMPLETE,))) == total


def test_a_failed_training_is_tried_again_by_the_next_command_alone(tmp_path):
    with begun(tmp_path, grid=THREE) as (study, options):
        trained(study, options, {1: "error", 2: "oom"})
        assert not has_remaining_trials(study, options)
    with begun(tmp_path, grid=THREE) as (study, _):
        assert places(study, TrialState.WAITING) == [1]


def test_values_of_a_grid_come_back_as_they_were(tmp_path):
    lists = ([0.3, 1e-5, 0.1 + 0.2], [512, 1], [1, 2.5], [2**60 + 1, 3], ["lion", True])
    with opened(settings(tmp_path).sweep, requeue) as storage:
        for values in lists:
            options = settings(tmp_path, grid={"train.anything": values}).sweep
            study, found = optuna.create_study(storage=storage), []
            for value in values:
                study.enqueue_trial({"train.anything": value})
            study.optimize(
                lambda t, o=options, f=found: f.append(suggested(t, o)) or 0.0,
                len(values),
            )
            found += [trial.params for trial in study.trials]
            given = [changes["train.anything"] for changes in found]
            assert given == values * 2
            assert [*map(type, given)] == [*map(type, values * 2)]


def test_a_pruner_ends_a_training_at_its_evaluation(tmp_path):
    points = [{"step": s, "metrics": {"validation_loss": 0.6 * s}} for s in (1, 2, 3)]
    lines = [json.dumps(point) + "\n" for point in points]
    study = optuna.create_study(pruner=optuna.pruners.ThresholdPruner(upper=1.0))
    trial = study.ask()
    pruning = Pruning(trial, tmp_path, "validation_loss")
    assert not pruning.look()
    file = tmp_path / "metrics.jsonl"
    file.write_text(lines[0] + lines[1][:9])
    assert not pruning.look(), "a line that is being written is read later"
    file.write_text("".join(lines))
    assert pruning.look()
    assert (pruning.evaluations, pruning.value) == (2, 1.2)
    [told] = study.trials
    assert told.intermediate_values == {1: 0.6, 2: 1.2}


@pytest.mark.parametrize(
    "content",
    [b'{"model": "mine"}', b"SQLite format 3\x00\x10\xff\xfe", b"\x00" * 64],
)
def test_a_file_of_something_else_is_refused_and_left_alone(content, tmp_path):
    file = tmp_path / "thesis.json"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match=r"thesis.json cannot be opened: name a"):
        with opened(settings(storage=str(file)).sweep, requeue):
            pass
    assert file.read_bytes() == content


@pytest.mark.parametrize("form", ["{}", "sqlite:///{}"])
def test_the_database_of_another_program_is_refused_and_left_alone(form, tmp_path):
    file = tmp_path / "mlflow.db"
    with closing(sqlite3.connect(file)) as database:
        database.execute("create table experiments (id integer)")
        database.execute("create table runs (id integer)")
    content = file.read_bytes()
    place = form.format(file)
    with pytest.raises(SettingsError) as refused:
        with opened(settings(storage=place).sweep, requeue):
            pass
    assert str(refused.value) == (
        f"sweep.storage: {place} cannot be opened: name a database of Optuna, or a new "
        "file in a folder that is writable (another program's tables: 'experiments', "
        "'runs')"
    )
    assert file.read_bytes() == content


def test_a_second_command_on_the_same_file_is_refused(tmp_path):
    options = settings(tmp_path).sweep
    with opened(options, requeue):
        with pytest.raises(StorageError, match=r"another command works with .* server"):
            with opened(options, requeue):
                pass
    with opened(options, requeue):
        pass


def test_a_dead_machines_trial_is_taken_over_once(tmp_path, monkeypatch):
    """Two machines use one server, from which the first is disconnected."""
    place = f"sqlite:///{tmp_path}/server.db"
    beats = {"heartbeat_interval": 1, "grace_period": 1}
    beats |= {"heartbeat_stale_trial_callback": requeue}
    storages = [ServerStorage(place, **beats) for _ in range(2)]
    first, second = (
        optuna.create_study(storage=storage, study_name="s", load_if_exists=True)
        for storage in storages
    )
    first.enqueue_trial({"x": 0.5}, user_attrs={PLACE: 1})
    begins, seen = threading.Event(), threading.Event()

    def away(*_):
        raise optuna.exceptions.StorageInternalError("no route")

    def cut_off(trial):
        trial.suggest_float("x", 0, 1)
        monkeypatch.setattr(optuna.storages.RDBStorage, "record_heartbeat", away)
        begins.set()
        assert seen.wait(60)
        return 1.0

    def work() -> None:
        with pytest.raises((ValueError, AssertionError)):  # another machine has it now
            first.optimize(cut_off, n_trials=1)

    thread = threading.Thread(target=work)
    thread.start()
    assert begins.wait(60)
    try:
        for _ in range(600):
            optuna.storages.fail_stale_trials(second)
            if waiting := second.get_trials(states=(TrialState.WAITING,)):
                break
            time.sleep(0.05)
    finally:
        seen.set()
        thread.join()
    assert [trial.user_attrs for trial in waiting] == [{PLACE: 1}]
    monkeypatch.undo()
    second.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=1)
    assert [t.state.name for t in second.trials] == ["FAIL", "COMPLETE"]
    assert second.best_params == {"x": 0.5}


@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize("gpus", ["", "0,1"])
def test_what_is_trained_while_the_storage_is_gone_is_kept_and_told_later(
    gpus, tmp_path, formula, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    folder, count = tmp_path / "sweep", len(gpus.split(","))
    asked = settings(folder, grid={RATE: [0.1, 0.2][:count]})
    files = benches.job_files(tmp_path)
    folder.mkdir()
    (folder / "hold").write_text("0")
    database = Path(asked.sweep.storage)

    def lose_the_storage() -> None:
        while len(formula()) < count:
            time.sleep(0.02)
        shutil.move(database, tmp_path / "away")
        database.mkdir()
        (folder / "hold").unlink()

    threading.Thread(target=lose_the_storage, daemon=True).start()
    with pytest.raises(StorageError, match=r"(?s)is gone .* the same command resumes"):
        run_sweep(asked, files)
    answers = [json.loads(file.read_text()) for file in folder.glob("*/answer.json")]
    assert [answer["status"] for answer in answers] == ["ok"] * count
    database.rmdir()
    shutil.move(tmp_path / "away", database)
    rows = run_sweep(asked, files)
    assert [row["status"] for row in rows] == ["ok"] * count
    assert len(formula()) == count, "nothing is trained again"


@pytest.mark.process
@pytest.mark.timeout(90)
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_gives_the_trial_back(tmp_path, formula, signum):
    asked = settings(tmp_path / "sweep", grid={RATE: [0.1], BATCH: [19]})
    files = benches.job_files(tmp_path)

    def interrupt() -> None:
        while not formula():
            time.sleep(0.05)
        os.kill(os.getpid(), signum)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted) as stopped:
        run_sweep(asked, files)
    assert stopped.value.code == 128 + signum
    with opened(asked.sweep, requeue) as storage:
        study = the_study(storage)
        assert [t.state.name for t in study.trials] == ["FAIL", "WAITING"]
        assert places(study) == [1, 1]


def machine(settings, files) -> int:
    """A process that runs trials of the sweep."""
    pid = os.fork()
    if pid:
        return pid
    trials.MODULE = "tests.engine.sweep_trial"
    os.environ |= {"PYTHONPATH": f"{PROJECT}:{PROJECT}/src", "CUDA_VISIBLE_DEVICES": ""}
    try:
        run_sweep(settings, files)
    except BaseException as error:
        traceback.print_exception(error)
        os._exit(1)
    os._exit(0)


@pytest.mark.process
@pytest.mark.timeout(300)
def test_two_of_three_machines_die_and_each_combination_is_finished_once(formula):
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not programs or not find_spec("psycopg") or os.getuid():
        pytest.skip("no PostgreSQL that root may start for another, or no driver")
    # The server's user may not enter pytest's own folder.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        postgresql(Path(name), programs[-1]) as place,
    ):
        folder = Path(name, "sweep")
        grid = {RATE: [0.001 * number for number in range(1, 9)]}
        asked = settings(folder, storage=place, grid=grid, heartbeat_s=1)
        files, ran = benches.job_files(Path(name)), folder / "ran"
        folder.mkdir()
        (folder / "hold").write_text("5")  # the last runs wait for the deaths
        pids = [machine(asked, files) for _ in range(3)]
        for pid, count in zip(pids, (3, 5), strict=False):
            while not ran.exists() or len(ran.read_text().splitlines()) < count:
                time.sleep(0.05)
            os.kill(pid, signal.SIGKILL)
        (folder / "hold").unlink()
        statuses = [os.waitpid(pid, 0)[1] for pid in pids]
        study = the_study(place)
        done = study.get_trials(states=(TrialState.COMPLETE,))
    assert statuses == [signal.SIGKILL, signal.SIGKILL, 0]
    assert Counter(t.params[RATE] for t in done) == dict.fromkeys(grid[RATE], 1)


def quietly(command: list[str]) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd="/")


@contextmanager
def postgresql(folder: Path, initdb: Path):
    """Yield the URL of a server that runs while the block is executed."""
    data, port = folder / "server", 20000 + os.getpid() % 20000
    data.mkdir()
    shutil.chown(data, "postgres")
    folder.chmod(0o755)
    as_user = ["runuser", "-u", "postgres", "--"]
    control = [*as_user, str(initdb.with_name("pg_ctl")), "-D", str(data), "-w"]
    quietly([*as_user, str(initdb), "-D", str(data), "-A", "trust"])
    options = f"-F -p {port} -k /tmp -c listen_addresses=localhost"
    log = str(data / "log")
    quietly([*control, "-o", options, "-l", log, "start"])
    try:
        yield f"postgresql+psycopg://postgres:secret@localhost:{port}/postgres"
    finally:
        quietly([*control, "-m", "immediate", "stop"])


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("/proc/none/q.db", "name a database of Optuna, or a new file"),
        ("oracle://ann@host/x", "name a file, or a database of PostgreSQL, MySQL or"),
        ("postgresql+psycopg://ann:secret@localhost:1/x", ""),
    ],
)
def test_a_storage_that_cannot_be_is_told_with_what_can(place, remedy, tmp_path):
    with pytest.raises(SettingsError, match=f"cannot be opened: {remedy}") as refused:
        with opened(settings(tmp_path, storage=place).sweep, requeue):
            pass
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "place",
    [
        "localhost:25999/sweeps",
        "ann@host/sweeps",
        "ann:secret@host:5432/sweeps",
        "ann:sec/ret@host",
        "postgresql:/ann:secret@host/sweeps",
        "postgres://ann:secret@host/x",
        "postgres+psycopg://ann:secret@host/x",
    ],
)
def test_an_address_without_its_kind_is_no_file(place):
    with pytest.raises(SettingsError, match=r"must be a file that ends in \.db") as no:
        check_sweep(settings(storage=place))
    assert "sec" not in str(no.value)


@pytest.mark.parametrize(
    "place",
    [
        "data/08_reporting/sweep.db",
        "/home/ann@example.org/sweep:1/sweep.db",
        "./ann@host/sweep.db",
        "C:/Users/ann@host/sweep.db",
        "best@night.db",
        "postgresql://ann@host:5432/sweeps",
        "mysql+pymysql://ann@host/sweeps?read_default_file=~/.my.cnf",
        "sqlite:///data/sweep.db",
    ],
)
def test_files_and_databases_may_be_named(place):
    asked = settings(storage=place)
    check_sweep(asked)
    assert asked.sweep.storage == place, "as it was named"


def test_a_grid_of_too_many_combinations_is_refused():
    grid = {RATE: [1.0 + i for i in range(101)], BATCH: list(range(1, 101))}
    with pytest.raises(SettingsError, match=r"10,100 combinations, .* sampler tpe"):
        parse_settings({"sweep": {"grid": grid}})


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://ann:pa/ss@host/db", "postgresql://ann:***@host/db"),
        ("a=mysql+x://ann:se:c@r@host:1/x, b", "a=mysql+x://ann:***@host:1/x, b"),
        (
            "mysql://host/db?user=ann&password=a b",
            "mysql://host/db?user=ann&password=*** b",
        ),
        ("x://host/db?pwd=geheim&ssl=1", "x://host/db?pwd=***&ssl=1"),
        ("sqlite:///data/mlflow.db", "sqlite:///data/mlflow.db"),
        ("http://127.0.0.1:5000/x", "http://127.0.0.1:5000/x"),
    ],
)
def test_no_form_of_a_password_is_shown(address, shown):
    assert without_password(address) == shown
