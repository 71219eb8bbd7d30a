"""Trials in separate processes: what they measure, and how they may fail."""

import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import pytest

from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials import processes as trials
from flatout.engine.benchmark.trials.processes import run_isolated
from flatout.engine.benchmark.trials.trial_spec import with_changes
from flatout.engine.machine.container import total_memory_bytes
from tests.conftest import PROJECT
from tests.engine.benches import job_files, settings, spec, trial

PYTHONPATH = os.pathsep.join([str(PROJECT), str(PROJECT / "src")])
COLUMNS = (
    "trial_id mode strategy global_batch_size token_budget num_workers prefetch_factor "
    "pin_memory precision attention compile cuda_graphs gradient_checkpointing io_ms "
    "forward_ms backward_ms optimizer_ms total_ms total_ms_p90 samples_per_s "
    "tokens_per_s padding_pct mfu_pct gpu_util_pct peak_memory_gib "
    "reserved_memory_gib compile_s recompiles status note"
).split()


@pytest.fixture
def bad_commands(monkeypatch):
    """Make trials run `python -m tests.engine.bad_trial`."""
    monkeypatch.setattr(trials, "MODULE", "tests.engine.bad_trial")
    monkeypatch.setenv("PYTHONPATH", PYTHONPATH)


@pytest.fixture
def bad_trials(bad_commands, warm_trials):
    """The same in forks of a process that has imported the module."""


def answer(tmp_path, behaviour, timeout_s=30.0, limit=None, ranks=1):
    asked = replace(spec("loader", behaviour=behaviour), world_size=ranks)
    files = job_files(tmp_path)
    stored = {"spec": asked.as_json(), "job": asdict(files)}
    (tmp_path / "spec.json").write_text(json.dumps(stored))
    return run_isolated(asked, tmp_path, timeout_s, limit)


def test_a_line_has_the_columns_that_scripts_rely_on_in_order():
    names = list(trial().as_row())
    assert names[: len(COLUMNS)] == COLUMNS


def test_memory_is_that_of_the_device_of_a_trial(tmp_path):
    bench = Bench(settings(), None, tmp_path)
    assert bench.memory_gib is None
    bench.results += [trial(), trial(device_memory_gib=9.75)]
    assert bench.memory_gib == 9.75


@pytest.mark.slow
@pytest.mark.process
def test_two_configurations_by_turns_on_real_rows(tmp_path, warm_trials):
    bench = Bench(settings(repeats=2), job_files(tmp_path), tmp_path / "sweep")
    bench.start()
    below = with_changes(bench.settings, {"train.batching": "fixed"})
    options = {"below": below.model_dump(mode="json", exclude={"benchmark", "sweep"})}
    trial = bench.run("end_to_end", {"train.batching": "grouped"}, options=options)
    assert (trial.status, trial.strategy, trial.attention) == ("ok", "grouped", "sdpa")
    assert (trial.precision, trial.num_workers) == ("fp32", 0)
    assert (trial.compile_s, trial.recompiles) == (0.0, 0)
    assert trial.samples_per_s == pytest.approx(8000 / trial.total_ms)
    assert min(trial.io_ms, trial.forward_ms, trial.backward_ms) > 0
    assert trial.optimizer_ms > 0
    assert trial.reserved_memory_gib > 0.05
    assert bench.memory_gib == pytest.approx(total_memory_bytes() / 2**30)
    figures = trial.figures
    times = figures["turns_times_below"]
    assert 2 <= len(times) <= 5
    assert trial.times_below == statistics.median(times)
    assert len(figures["window_samples_per_s"]) == len(times)
    below_rates = figures["below_window_samples_per_s"]
    pairs = zip(figures["window_samples_per_s"], below_rates, strict=True)
    assert times == pytest.approx([rate / other for rate, other in pairs])
    folder = tmp_path / "sweep" / trial.key
    assert trial.log == str(folder / "log.txt")
    assert json.loads((folder / "result.json").read_text())["status"] == "ok"
    stored = json.loads((folder / "below" / "spec.json").read_text())
    assert stored["spec"]["settings"]["train"]["batching"] == "fixed"
    assert not processes_that_name(folder / "below")


@pytest.mark.process
@pytest.mark.slow
def test_what_stands_below_and_ends_costs_its_trial_alone(tmp_path, warm_trials):
    bench = Bench(settings(), job_files(tmp_path), tmp_path / "sweep")
    bench.start()
    below = bench.settings.model_dump(mode="json", exclude={"benchmark", "sweep"})
    below["model"]["name_or_path"] = "no/such-folder"
    trial = bench.run("end_to_end", options={"below": below})
    assert (trial.status, trial.note) == (
        "unpaired",
        "BaselineError: the reference ended with exit code 0: see this trial's log",
    )
    assert "no/such-folder" in Path(trial.log).read_text()
    assert bench.run("compute").ok


@pytest.mark.process
def test_what_stands_below_ends_with_a_trial_that_is_killed(tmp_path):
    """The trial may be killed before the reference is warm, which may compile for
    minutes."""
    files = job_files(tmp_path)
    asked = settings()
    below = asked.model_dump(mode="json", exclude={"benchmark", "sweep"})
    pair = replace(spec("end_to_end", below=below), settings=asked)
    stored = {"spec": pair.as_json(), "job": asdict(files)}
    (tmp_path / "spec.json").write_text(json.dumps(stored))
    trial = subprocess.Popen(
        trials.command(pair, tmp_path),
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        start_new_session=True,
    )
    own = tmp_path / "below"
    wait_for(lambda: processes_that_name(own))
    trial.kill()
    trial.wait()
    wait_for(lambda: not processes_that_name(own))


def processes_that_name(folder):
    return [
        process.pid
        for process in psutil.process_iter(["cmdline"])
        if str(folder) in (process.info["cmdline"] or [])
    ]


@pytest.mark.process
@pytest.mark.parametrize(
    ("behaviour", "status", "note"),
    [
        ("fine", "ok", "fine"),
        ("signal", "error", "killed by SIGSEGV: see its log"),
        ("leave", "error", "ended with exit code 3 and no result: see its log"),
        (
            "memory",
            "oom",
            "RuntimeError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        ("fault", "error", "KeyError: 'nobody'"),
    ],
)
def test_how_a_trial_ends(bad_trials, tmp_path, behaviour, status, note):
    found = answer(tmp_path, behaviour)
    assert (found.status, found.note) == (status, note)
    if behaviour == "fault":
        assert "Traceback" in (tmp_path / "log.txt").read_text()


@pytest.mark.process
def test_a_trial_that_hangs_is_ended(bad_trials, tmp_path):
    found = answer(tmp_path, "hang", timeout_s=4.0)
    assert (found.status, found.note) == ("timeout", "stopped after 4 s")
    assert not psutil.pid_exists(json.loads((tmp_path / "0.pid").read_text()))


@pytest.mark.process
def test_a_trial_that_fills_the_memory_is_ended(bad_commands, tmp_path):
    found = answer(tmp_path, "grow", limit=600 * 2**20)
    assert (found.status, found.note) == ("oom", "stopped at 0.6 GiB resident")


def by_hand(folder):
    """Run the command at the beginning of the log, as a user would."""
    line = (folder / "log.txt").read_text().splitlines()[0]
    return subprocess.run(
        shlex.split(line.removeprefix("$ ")),
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
    )


@pytest.mark.process
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_trial_again_by_hand_is_the_same(bad_trials, tmp_path, ranks):
    assert answer(tmp_path, "fine", ranks=ranks).status == "ok"
    result = tmp_path / "result.json"
    first = json.loads(result.read_text())
    result.unlink()
    again = by_hand(tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads(result.read_text()) == first


def test_the_key_of_a_trial_is_all_that_decides_its_answer():
    context = {"data": "a", "device": "b", "versions": {"torch": "2.13"}}
    asked = spec("end_to_end")
    key = asked.key(context)
    assert replace(asked, label="another", mode="tune").key(context) == key
    changed = with_changes(asked.settings, {"train.token_budget": 512})
    others = [
        replace(asked, settings=changed).key(context),
        replace(asked, kind="compute").key(context),
        replace(asked, world_size=2).key(context),
        asked.key({**context, "device": "c"}),
        asked.key({**context, "versions": {"torch": "2.14"}}),
        asked.key({**context, "data": "d"}),
    ]
    assert len({key, *others}) == 7


SWEEP = """
import sys
from pathlib import Path
from flatout.engine.benchmark.trials import processes as trials
from flatout.engine.benchmark.runner import Bench
from tests.engine.benches import job_files, settings
trials.MODULE = "tests.engine.bad_trial"
folder = Path(sys.argv[1])
bench = Bench(settings(), job_files(folder), folder / "sweep")
bench.start()
print(bench.run("loader", options={"behaviour": "fine"}).status, flush=True)
bench.run("loader", options={"behaviour": "hang"}, world_size=2)
"""


def wait_for(condition, seconds=30.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)


@pytest.mark.process
@pytest.mark.slow
def test_a_killed_sweep_goes_on_and_leaves_no_process(bad_commands, tmp_path):
    sweep = subprocess.Popen(
        [sys.executable, "-c", SWEEP, str(tmp_path)],
        cwd=PROJECT,
        env={**os.environ, "PYTHONPATH": PYTHONPATH},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert sweep.stdout.readline() == "ok\n"
    wait_for(lambda: len(list(tmp_path.glob("sweep/*/*.pid"))) == 3)
    pids = [json.loads(f.read_text()) for f in tmp_path.glob("sweep/*/*.pid")]
    ranks = [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]
    assert len(ranks) == 2
    pids = [rank.pid for rank in ranks] + [ranks[0].ppid()]  # and their launcher
    sweep.send_signal(signal.SIGKILL)
    sweep.wait()
    wait_for(lambda: not any(map(psutil.pid_exists, pids)))
    bench = Bench(settings(), job_files(tmp_path), tmp_path / "sweep")
    bench.start()
    tried = [
        (bench.run("loader", options={"behaviour": name}).status, bench.reused)
        for name in ("fine", "fault")
    ]
    assert tried == [("ok", 1), ("error", 1)]
    bench.finish()
    # The benchmark was completed, so the next one measures everything again.
    running = bench.folder / "running"
    assert not running.exists()
    bench.start()
    assert [file.name for file in bench.folder.iterdir()] == [running.name]
