"""The queue of a sweep: machines that die, storages that go away, what is kept."""

from __future__ import annotations

import json
import math
import os
import signal
import tempfile
import threading
import time
from pathlib import Path

import optuna
import pytest
from optuna.trial import TrialState

from flatout.engine.machine.signals import Interrupted
from flatout.engine.parameters import SettingsError, SweepSettings, parse_settings
from flatout.engine.parameters.secrets import without_password
from flatout.engine.sweep import queue
from flatout.engine.sweep import storage as storages
from flatout.engine.sweep import study as studies
from flatout.engine.sweep.database import PlainRows
from flatout.engine.sweep.journal import Backend, MendingLock, drop_torn_line
from flatout.engine.sweep.queue import Queue, this_machine
from flatout.engine.sweep.space import check_sweep
from flatout.engine.sweep.storage import Patience, StorageError, open_storage
from flatout.engine.sweep.sweep import run_sweep
from flatout.engine.sweep.watch import Watch
from tests.engine import benches
from tests.engine.test_sweep import BATCH, RATE, formula, settings
from tests.tools import queue_drill

__all__ = ["formula"]

OK = {"status": "ok", "note": ""}


def queues(folder: Path, names: str = "ab", **sweep) -> list[Queue]:
    """Of machines that do not know each other's processes."""
    place = str(folder / "sweep.journal")
    given = {"grid": {RATE: [0.1, 0.2, 0.3]}, "heartbeat_s": 0.1, **sweep}
    options = SweepSettings(storage=place, **given)
    found = []
    for name in names:
        study = optuna.create_study(
            storage=open_storage(place), study_name="s", load_if_exists=True
        )
        machine = {"host": name, "boot": name, "pid": 1, "begin_s": 0.0}
        found.append(Queue(study, options, threading.Event(), machine))
    return found


def looked_until_taken(queue: Queue):
    for _ in range(100):
        queue.look()
        if trial := queue.take():
            return trial
        time.sleep(0.05)
    raise AssertionError("nothing was given back")


def test_a_dead_machines_trial_is_taken_once(tmp_path):
    a, b = queues(tmp_path)
    lost = a.take()
    others = [b.take(), b.take()]
    assert b.take() is None
    assert not b.done(), "a may die"
    for trial in others:
        assert b.finish(trial, OK, 1.0)
    again = looked_until_taken(b)
    assert again.params == lost.params == {RATE: 0.1}
    assert not a.beat(lost), "a learns that it was taken for dead"
    assert b.finish(again, OK, 1.0)
    assert not a.finish(lost, OK, 2.0)
    assert b.done()
    done = [t for t in b.trials() if t.state == TrialState.COMPLETE]
    assert sorted(t.params[RATE] for t in done) == [0.1, 0.2, 0.3]


def test_a_machine_that_beats_keeps_its_trial(tmp_path):
    a, b = queues(tmp_path, grid={RATE: [0.1]})
    kept = a.take()
    for _ in range(10):
        assert a.beat(kept)
        b.look()
        time.sleep(0.05)
    assert b.take() is None
    assert a.finish(kept, OK, 1.0)


def test_what_two_took_at_once_the_later_gives_up(tmp_path):
    a, b = queues(tmp_path)
    first = a.take()
    b._queue(first.params)  # b had not seen it yet
    assert b.take().params == {RATE: 0.2}
    assert [t.params for t in b.live()] == [{RATE: 0.1}, {RATE: 0.2}]


def test_what_optuna_draws_beside_the_grid_is_given_back(tmp_path):
    """It draws where another machine takes what was queued a moment before."""
    a, b = queues(tmp_path)
    queue, others = a._queue, []

    def queue_too_late(changes) -> None:
        queue(changes)
        if not others:
            others.append(b.take())

    a._queue = queue_too_late
    mine = a.take()
    assert (others[0].params, mine.params) == ({RATE: 0.1}, {RATE: 0.2})
    drawn = [t.params[RATE] for t in a.trials() if t.state == TrialState.FAIL]
    assert len(drawn) == 1
    assert drawn[0] not in (0.1, 0.2, 0.3)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ([0.3, 1e-5, 0.1 + 0.2], optuna.distributions.FloatDistribution),
        ([512, 16, 1], optuna.distributions.IntDistribution),
        ([1, 2.5], optuna.distributions.CategoricalDistribution),
        ([2**60 + 1, 3], optuna.distributions.CategoricalDistribution),
        ([True, False], optuna.distributions.CategoricalDistribution),
        (["adamw", "lion"], optuna.distributions.CategoricalDistribution),
    ],
)
def test_values_of_a_grid_come_back_as_they_were(values, kind, tmp_path):
    name = "train.anything"
    [a] = queues(tmp_path, "a", grid={name: values})
    assert isinstance(a._space[name], kind)
    taken = [a.take().params[name] for _ in values]
    assert taken == values
    assert [type(value) for value in taken] == [type(value) for value in values]
    assert a.take() is None


def test_tpe_gives_back_and_counts_trials_of_all_machines(tmp_path):
    ranges = {RATE: {"low": 1e-4, "high": 1e-1, "log": True}}
    a, b = queues(tmp_path, sampler="tpe", grid={}, ranges=ranges, n_trials=3)
    first, second = a.take(), b.take()
    a.give_back(first)
    again = b.take()
    assert again.params == first.params
    for trial in (second, again, a.take()):
        assert a.finish(trial, OK, trial.params[RATE])
    assert a.take() is b.take() is None
    assert a.done()


def test_a_failed_training_is_tried_again_by_the_next_command_alone(tmp_path):
    [a] = queues(tmp_path, "a", grid={RATE: [0.1, 0.2]})
    a.finish(a.take(), {"status": "error", "note": ""}, None)
    a.finish(a.take(), {"status": "oom", "note": ""}, None)
    assert a.take() is None
    assert a.done()
    [b] = queues(tmp_path, "b", grid={RATE: [0.1, 0.2]})
    assert b.take().params == {RATE: 0.1}
    assert b.take() is None


def test_a_pruner_ends_a_training_at_its_evaluation(tmp_path):
    [a] = queues(tmp_path, "a", pruner="median")
    a.study.pruner = optuna.pruners.ThresholdPruner(upper=1.0)
    trial = a.take()
    points = [{"step": s, "metrics": {"validation_loss": 0.6 * s}} for s in (1, 2, 3)]
    lines = "".join(json.dumps(point) + "\n" for point in points)
    (tmp_path / "metrics.jsonl").write_text(lines)
    with Watch(a, trial, tmp_path, "validation_loss") as watch:
        assert watch.over.wait(20)
    stopped = storages_answer("stopped")
    answer = watch.judged(stopped)
    assert (answer.status, answer.note) == ("pruned", "after 2 evaluations")
    assert a.finish(trial, {"status": "pruned", "note": answer.note}, None)
    [told] = [t for t in a.trials() if t.state == TrialState.PRUNED]
    assert told.intermediate_values == {1: 0.6, 2: 1.2}
    assert told.value == 1.2


def storages_answer(status: str):
    from flatout.engine.benchmark.trials.processes import Answer

    return Answer(status, "", 1.0, {})


def test_a_line_that_was_cut_short_is_dropped_before_the_next(tmp_path):
    file = tmp_path / "journal"
    file.write_bytes(b"")
    drop_torn_line(file)
    study = optuna.create_study(storage=open_storage(str(file)), study_name="s")
    study.enqueue_trial({"x": 1.0})
    whole = file.read_bytes()
    file.write_bytes(whole + b'{"op_code":4,"wor')
    study.enqueue_trial({"x": 2.0})
    again = optuna.load_study(storage=open_storage(str(file)), study_name="s")
    waiting = [t.system_attrs["fixed_params"]["x"] for t in again.trials]
    assert waiting == [1.0, 2.0]


@pytest.mark.parametrize(
    "content",
    [
        b'{"model": "mine"}',
        b"notes\nof mine, without an end",
        b'{"texts": 1}\n{"texts": 2}',
        b"[3]\n",
        b"7\n",
        b"\x00" * 64 + b"\n",
        b"\x00" * 64,
        b"SQLite format 3\x00\x10\xff\xfe",
        b"\x89PNG\r\n\x1a\n\x00",
        b"\n",
        b'{"op_code":0}\n',
        b'{"op_code":99}\n',
        b'{"op_code":10}\n' + b"\x00" * 9 + b"\n",
    ],
)
def test_a_file_that_is_no_journal_is_refused_and_left_alone(content, tmp_path):
    file = tmp_path / "thesis.json"
    file.write_bytes(content)
    with pytest.raises(SettingsError, match="is not a journal of a sweep: name anoth"):
        open_storage(str(file))
    assert file.read_bytes() == content
    assert [one.name for one in tmp_path.iterdir()] == [file.name]


def test_a_journal_beside_which_no_lock_can_be_made_is_refused_at_opening(tmp_path):
    file = tmp_path / "journal"
    optuna.create_study(storage=open_storage(str(file)), study_name="s")
    # Root may write everywhere: here the lock's name is too long for the disk.
    bound = file.rename(tmp_path / ("j" * 253))
    with pytest.raises(SettingsError, match="name a file in a folder that this user"):
        open_storage(str(bound))


def test_a_lock_that_is_gone_with_its_folder_is_released(tmp_path):
    file = tmp_path / "shared" / "journal"
    open_storage(str(file))
    lock = MendingLock(file)
    assert lock.acquire()
    file.parent.rename(tmp_path / "away")
    lock.release()
    file.parent.mkdir()
    with pytest.raises(FileNotFoundError):
        lock.acquire()
    assert not list(file.parent.iterdir()), "nobody would release it"


def test_a_journal_torn_in_its_first_line_is_begun_again(tmp_path):
    file = tmp_path / "journal"
    file.write_bytes(b'{"op_code":0,"worker_id":"a')
    optuna.create_study(storage=open_storage(str(file)), study_name="s")
    assert json.loads(file.read_bytes().splitlines()[0])["op_code"] == 0


def test_a_storage_that_is_away_is_asked_again_and_its_end_told(monkeypatch, caplog):
    monkeypatch.setattr(storages, "RETRY_S", 0.01)
    place, asked = "postgresql://ann:secret@host/name", []

    def call():
        asked.append(1)
        if len(asked) < 3:
            raise OSError(f"no route to {place}")
        return "there"

    patience = Patience(place, threading.Event())
    assert patience.ask(call) == "there"
    assert not patience.is_away
    assert "trainings go on" in caplog.text
    monkeypatch.setattr(storages, "PATIENCE_S", 0.0)
    asked.clear()
    with pytest.raises(StorageError, match=r"is gone .* the same command") as gone:
        patience.ask(call)
    assert patience.is_away
    assert "secret" not in f"{gone.value} {caplog.text}"


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(storages, "RETRY_S", 0.02)
    monkeypatch.setattr(storages, "PATIENCE_S", 0.2)


def until(condition) -> None:
    for _ in range(3000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


def test_a_storage_that_was_waited_for_is_asked_once_more_each_time(impatient):
    patience, asked = Patience("file", threading.Event()), []

    def call():
        asked.append(1)
        raise OSError("away")

    for most in (100, 1, 1):
        asked.clear()
        with pytest.raises(StorageError):
            patience.ask(call)
        assert len(asked) <= most
    assert patience.ask(lambda: "there") == "there"
    asked.clear()
    with pytest.raises(StorageError):
        patience.ask(call)
    assert len(asked) > 1, "it is waited for anew"


def test_a_refusal_is_an_answer_of_a_storage(impatient):
    patience, asked = Patience("file", threading.Event()), []

    def refused():
        asked.append(1)
        raise OSError if len(asked) == 1 else KeyError

    with pytest.raises(KeyError):
        patience.ask(refused)
    assert not patience.is_away


@pytest.mark.parametrize("zeros", [b"\0\0\n{}\n", b"\xff\xff\n"])
def test_lines_that_cannot_be_read_yet_are_waited_for(zeros, tmp_path, impatient):
    [a, b] = queues(tmp_path)
    trial = b.take()
    file = tmp_path / "sweep.journal"
    whole = file.read_bytes()
    file.write_bytes(whole + zeros)
    with pytest.raises(StorageError, match="is gone"):
        a.trials()
    file.write_bytes(whole)
    assert [one.number for one in a.trials()] == [trial.number]
    assert not a.patience.is_away


def test_no_line_is_skipped_where_some_came_as_zeros(tmp_path):
    file = tmp_path / "q.journal"
    lines = [
        json.dumps({"op_code": n, "is": "x" * n}).encode() + b"\n" for n in range(9)
    ]
    file.write_bytes(lines[0] + b"\0\0\0\0\0\n")
    reader = Backend(str(file))
    with pytest.raises(UnicodeDecodeError):
        list(reader.read_logs(0))
    file.write_bytes(b"".join(lines[:3]))
    assert [one["op_code"] for one in reader.read_logs(1)] == [1, 2]
    file.write_bytes(b"".join(lines))
    assert [one["op_code"] for one in reader.read_logs(3)] == [3, 4, 5, 6, 7, 8]


def test_notes_behind_a_line_like_a_journals_stay(tmp_path):
    file, notes = tmp_path / "notes.txt", b'{"op_code":0}\nmy notes without an end'
    file.write_bytes(notes)
    with pytest.raises(SettingsError, match="is not a journal of a sweep"):
        open_storage(str(file))
    assert file.read_bytes() == notes


def test_a_storage_that_comes_back_late_hears_of_the_training(
    tmp_path, impatient, caplog
):
    shared, away = tmp_path / "shared", tmp_path / "away"
    [a] = queues(shared, "a", heartbeat_s=0.05)
    trial = a.take()
    with Watch(a, trial, tmp_path, "validation_loss") as watch:
        shared.rename(away)
        until(lambda: "goes on to its end" in caplog.text)
        away.rename(shared)
        until(lambda: not a.patience.is_away)
        assert not watch.over.is_set()
    assert a.finish(trial, OK, 1.0)
    assert "taken for dead" not in caplog.text


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.parametrize("gpus", ["", "0,1"])
def test_what_is_trained_while_the_storage_is_gone_is_kept_and_told_later(
    gpus, tmp_path, formula, impatient, caplog, monkeypatch
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    names = gpus.split(",")
    folder, shared, away = (tmp_path / n for n in ("sweep", "shared", "away"))
    asked = settings(
        folder,
        grid={RATE: [0.1, 0.2][: len(names)]},
        storage=str(shared / "journal"),
        heartbeat_s=0.05,
    )
    files = benches.job_files(tmp_path)
    folder.mkdir()
    (folder / "hold").write_text("0")

    def lose_the_storage() -> None:
        until(lambda: len(formula()) == len(names))
        shared.rename(away)
        until(lambda: "goes on to its end" in caplog.text)
        (folder / "hold").unlink()

    threading.Thread(target=lose_the_storage, daemon=True).start()
    ended = {**this_machine(), "begin_s": 0.0}  # this command, for the next one
    with (
        monkeypatch.context() as first,
        pytest.raises(StorageError, match=r"is gone .* the same command goes on"),
    ):
        first.setattr(queue, "this_machine", lambda: ended)
        run_sweep(asked, files)
    answers = [json.loads(file.read_text()) for file in folder.glob("*/answer.json")]
    assert [answer["status"] for answer in answers] == ["ok"] * len(names)
    assert "taken for dead" not in caplog.text
    away.rename(shared)
    rows = run_sweep(asked, files)
    assert [row["status"] for row in rows] == ["ok"] * len(names)
    assert len(formula()) == len(names), "nothing is trained again"


def test_passwords_are_not_shown():
    shown = without_password("a=postgresql+psycopg://ann:se:c@r@host:1/x, b")
    assert shown == "a=postgresql+psycopg://ann:***@host:1/x, b"
    with pytest.raises(SettingsError, match="cannot be opened") as refused:
        open_storage("postgresql+psycopg://ann:secret@localhost:1/x")
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    ("place", "remedy"),
    [
        ("/proc/none/q.journal", "name a file in a folder that this user may write"),
        ("oracle://ann@host/x", "name a file, or a database of PostgreSQL, MySQL or"),
    ],
)
def test_a_storage_that_cannot_be_is_told_with_what_can(place, remedy):
    with pytest.raises(SettingsError, match=f"cannot be opened: {remedy}"):
        open_storage(place)


@pytest.mark.parametrize(
    "place",
    [
        "localhost:25999/sweeps",
        "ann@host/sweeps",
        "ann:secret@host:5432/sweeps",
        "ann:sec/ret@host",
        "postgresql:/ann:secret@host/sweeps",
    ],
)
def test_an_address_without_its_kind_is_no_file(place):
    with pytest.raises(SettingsError, match="begins with its kind: write postg") as no:
        check_sweep(settings(storage=place))
    assert "sec" not in str(no.value)


@pytest.mark.parametrize("driver", ["", "+psycopg"])
def test_the_old_name_of_postgresql_is_told(driver):
    with pytest.raises(SettingsError, match="write postgresql:// in place of postgres"):
        check_sweep(settings(storage=f"postgres{driver}://ann:secret@host/x"))


@pytest.mark.parametrize(
    "place",
    [
        "data/08_reporting/sweep.journal",
        "/home/ann@example.org/sweep:1/sweep.journal",
        "./ann@host/sweep.journal",
        "C:/Users/ann@host/sweep.journal",
        "best@night.journal",
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


@pytest.mark.process
@pytest.mark.timeout(90)
def test_ctrl_c_gives_the_trial_back_at_once(tmp_path, formula):
    # As in a terminal: a shell that starts the tests in the background ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asked = settings(tmp_path / "sweep", grid={RATE: [0.1], BATCH: [19]})
    files = benches.job_files(tmp_path)

    def interrupt() -> None:
        while not formula():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted):
        run_sweep(asked, files)
    study = optuna.load_study(
        storage=open_storage(asked.sweep.storage), study_name="sweep"
    )
    assert [trial.state for trial in study.trials] == [TrialState.FAIL]


@pytest.mark.process
@pytest.mark.timeout(60)
@pytest.mark.parametrize("heartbeat_s", [0.05, 30.0])
def test_ctrl_c_while_the_storage_is_away_says_what_is_so(
    heartbeat_s, tmp_path, formula, caplog
):
    signal.signal(signal.SIGINT, signal.default_int_handler)
    shared = tmp_path / "shared"
    asked = settings(
        tmp_path / "sweep",
        grid={RATE: [0.1], BATCH: [19]},
        storage=str(shared / "journal"),
        heartbeat_s=heartbeat_s,
    )
    files = benches.job_files(tmp_path)

    def interrupt() -> None:
        until(formula)
        shared.rename(tmp_path / "away")
        until(lambda: heartbeat_s > 1 or "does not answer" in caplog.text)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    with pytest.raises(Interrupted):
        run_sweep(asked, files)
    assert "take what was being trained when its heartbeat has ended" in caplog.text
    assert ("asked again" in caplog.text) == (heartbeat_s < 1)
    assert "taken for dead" not in caplog.text
    assert "queued again" not in caplog.text


@pytest.mark.process
@pytest.mark.parametrize("kind", ["journal", "postgresql", "mysql"])
def test_two_of_three_machines_die_and_each_combination_is_finished_once(kind):
    if not queue_drill.has_server(kind):
        pytest.skip(f"{kind}: no server that root may start for another, or no driver")
    # Not below pytest's own folder, which the server's user may not enter.
    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name,
        queue_drill.server(kind, Path(name)) as place,
    ):
        found = queue_drill.drill(place, Path(name), combinations=8, seed=3)
    assert found["statuses"] == [signal.SIGKILL, signal.SIGKILL, 0]
    assert found["finished_once"] == found["combinations"] == 8
    assert found["finished_twice"] == 0


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("postgresql://ann:pa/ss@host/db", "postgresql://ann:***@host/db"),
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


def test_a_database_lists_trials_as_optuna_does(tmp_path):
    """Every state and kind of value, whole and what is new since the last look."""
    place = f"sqlite:///{tmp_path}/trials.db"
    study = optuna.create_study(storage=open_storage(place), study_name="s")
    space = {
        "rate": optuna.distributions.FloatDistribution(1e-5, 1, log=True),
        "name": optuna.distributions.CategoricalDistribution(["adamw", None, True]),
    }
    trials = [study.ask(space) for _ in range(5)]
    study.enqueue_trial({"rate": 0.5})
    trials[0].set_user_attr("answer", {"status": "ok", "loss": [1.5, None]})
    for step, value in enumerate([0.1, math.inf, -math.inf, math.nan]):
        trials[1].report(value, step)
    study.tell(trials[0], 1e-300)
    study.tell(trials[1], math.inf)
    study.tell(trials[3], state=TrialState.FAIL)
    plain, theirs = PlainRows(place), optuna.storages.RDBStorage(place)
    ended = {TrialState.COMPLETE}
    for asked in [(None, set(), -1), (ended, set(), -1), (None, {3}, 4)]:
        found = plain._get_trials(study._study_id, *asked)
        assert repr(found) == repr(theirs._get_trials(study._study_id, *asked))
    assert [trial.number for trial in found] == [2, 4, 5]


def test_a_storage_that_goes_away_while_a_study_is_begun_is_asked_again(
    tmp_path, monkeypatch, impatient
):
    """Behind the study's begin, and before it says what it is of."""
    monkeypatch.setattr(storages, "PATIENCE_S", 60.0)
    monkeypatch.setattr(studies, "CREATOR_TAKES_S", 0.0)
    note, failed = optuna.Study.set_user_attr, []

    def away_once(study, *given):
        if not failed:
            failed.append(given)
            raise OSError("the disk is away")
        note(study, *given)

    monkeypatch.setattr(optuna.Study, "set_user_attr", away_once)
    asked, folder = settings(tmp_path / "sweep"), tmp_path / "sweep"
    folder.mkdir()
    job = benches.job_files(tmp_path).open(asked, folder)
    study = studies.open_study(job, threading.Event())
    assert failed
    assert study.user_attrs[studies.IDENTITY] == studies.identity(job)
