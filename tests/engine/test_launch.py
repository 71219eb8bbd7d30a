"""Where training runs: in this process, in ranks, on machines, in a launcher."""

import itertools
import json
import multiprocessing
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from flatout.engine.checkpoints.checkpoint_folder import CheckpointError
from flatout.engine.launch import launch, supervisor
from flatout.engine.launch.launch import check_endpoint, resolve_processes, run_job
from flatout.engine.launch.rank import SMALLER, check_world_size, leave_error
from flatout.engine.launch.supervisor import Attempt, RankError, is_worth_another
from flatout.engine.machine import environment
from flatout.engine.machine.watchdog import Heartbeat, read_beats
from flatout.engine.parameters import DistributedSettings, SettingsError
from flatout.engine.rows.rows import open_rows
from flatout.engine.train.keeping.oom import OutOfMemory
from flatout.engine.train.loop import train
from flatout.engine.train.recording.health import NonFiniteError
from tests.engine.runs import NO_DROPOUT, make_job
from tests.forks import fork_two
from tests.projects import runs_of
from tests.servers import free_port
from tests.warm import not_activated


def test_auto_is_a_process_a_gpu_and_one_without(monkeypatch):
    settings = DistributedSettings()
    monkeypatch.setattr(environment, "nvidia_gpu_count", lambda: 0)
    assert resolve_processes(settings) == 1
    monkeypatch.setattr(environment, "nvidia_gpu_count", lambda: 4)
    assert resolve_processes(settings) == 4


@pytest.mark.parametrize(
    ("gpus", "wanted", "text"),
    [
        (2, 3, "this machine has 2 GPUs to use: set it to at most 2"),
        (0, 9, "this machine has 2 CPU cores to use: set it to at most 2"),
    ],
)
def test_more_processes_than_devices_are_refused(monkeypatch, gpus, wanted, text):
    monkeypatch.setattr(environment, "nvidia_gpu_count", lambda: gpus)
    monkeypatch.setattr(environment, "usable_cores", lambda: 2)
    with pytest.raises(SettingsError, match=text):
        resolve_processes(DistributedSettings(num_processes=wanted))


def test_an_endpoint_that_cannot_be_is_refused_with_what_to_do():
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        meeting = {"num_machines": 2, "rendezvous_endpoint": f"localhost:{port}"}
        with pytest.raises(SettingsError, match=rf"port {port} .* choose another one"):
            check_endpoint(DistributedSettings(**meeting))
    check_endpoint(DistributedSettings(**meeting))  # free again
    meeting["rendezvous_endpoint"] = "machine0"
    with pytest.raises(SettingsError, match="'machine0' is not host:port"):
        check_endpoint(DistributedSettings(**meeting))


def test_the_ranks_start_from_a_file_of_this_users_alone(tmp_path):
    job = make_job(tmp_path, distributed={"num_processes": 2})
    launch.write_spec(job, 2, tmp_path)
    path = tmp_path / "spec.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    spec = json.loads(path.read_text())
    assert spec["world_size"] == 2
    assert spec["job"]["data_key"] == job.data_key
    rows = open_rows(Path(spec["job"]["splits"]["train"]))
    assert rows.table.to_pydict() == job.train.table.to_pydict()


def test_the_number_of_ranks_that_was_asked_for_is_asserted():
    check_world_size(2, 2)
    with pytest.raises(SettingsError, match=r"started 1 ranks, .* expects 2"):
        check_world_size(1, 2)


def test_a_launcher_with_another_number_of_ranks_is_refused(tmp_path, monkeypatch):
    for name, value in {"RANK": 0, "WORLD_SIZE": 4, "LOCAL_WORLD_SIZE": 4}.items():
        monkeypatch.setenv(name, str(value))
    job = make_job(tmp_path, distributed={"num_processes": 2})
    with pytest.raises(SettingsError, match="started 4 ranks on this machine"):
        run_job(job)


def failure(rank=0, exit_code=1, message="", traceback="", time_s=0):
    return locals()


@pytest.mark.parametrize(
    ("failures", "kind", "text"),
    [
        # Rank 0 reports first that its peer is gone, but rank 1 was killed.
        (
            [
                failure(0, 1, "RuntimeError: Connection closed by peer", "t", 5),
                failure(1, -signal.SIGKILL, "<NONE>", "", 6),
            ],
            RankError,
            r"rank 1 was killed by SIGKILL \(is the machine out of memory\?\)",
        ),
        (
            [
                failure(0, 1, "DistBackendError: NCCL timeout", "t", 5.25),
                failure(1, 1, "ValueError: bad batch 17", "File train.py\nbad", 5.0),
            ],
            RankError,
            "rank 1 failed: ValueError: bad batch 17\nFile train.py\nbad",
        ),
        (
            [failure(1, 1, "NonFiniteError: step 3: not finite", "t", 5)],
            NonFiniteError,
            "^step 3: not finite",
        ),
        (
            [failure(0, 1, "CheckpointError: no folder", "t", 5)],
            CheckpointError,
            "^no folder",
        ),
        ([], RankError, "could not be started"),
    ],
)
def test_the_cause_is_told_and_not_its_effects(tmp_path, failures, kind, text):
    job = make_job(tmp_path)
    (tmp_path / "failures.json").write_text(json.dumps(failures))
    error = Attempt(job, 2, tmp_path)._failure()
    assert type(error) is kind
    with pytest.raises(kind, match=text):
        raise error
    assert is_worth_another(error) == (kind is RankError)


def test_ranks_out_of_memory_start_again_with_half_the_budget(tmp_path):
    text = "OutOfMemory: out of memory at step 3 with token budget 120"
    (tmp_path / "failures.json").write_text(json.dumps([failure(1, 1, text, "t")]))
    (tmp_path / SMALLER).write_text(json.dumps({"token_budget": 60}))
    job = make_job(tmp_path, on_oom="shrink", resume="never")
    error = Attempt(job, 2, tmp_path)._failure()
    assert isinstance(error, OutOfMemory)
    smaller = launch._smaller(job, error).settings.train
    assert (smaller.token_budget, smaller.resume) == (60, "auto")
    several = {"num_machines": 2, "rendezvous_endpoint": "node0:29500"}
    machines = make_job(tmp_path, on_oom="shrink", distributed=several)
    assert launch._smaller(machines, error) is None  # others would not know
    error.to_try = {"cuda_graphs": False}
    smaller = launch._smaller(job, error).settings.train
    assert (smaller.token_budget, smaller.cuda_graphs) == (120, False)
    assert launch._smaller(make_job(tmp_path, on_oom="stop"), error) is None


def test_a_heartbeat_says_where_a_rank_is(tmp_path):
    beat = Heartbeat()
    path = tmp_path / "beats"
    beat.start(path, 3)
    beat.enter("train")
    beat.beat(17)
    with beat.phase("evaluate"):
        (seen,) = read_beats(path)
        assert (seen.rank, seen.pid, seen.step) == (3, os.getpid(), 17)
        assert seen.phase == "evaluate"
    assert read_beats(path)[0].phase == "train"


def test_a_heartbeat_is_never_read_half_written(tmp_path):
    """A partial file contains no progress and would look like a hang."""
    begun_s = time.monotonic()
    writer = multiprocessing.get_context("fork").Process(
        target=_beat_for_ever, args=(tmp_path,), daemon=True
    )
    writer.start()
    try:
        while not read_beats(tmp_path):
            time.sleep(0.01)
        seen = [beat for _ in range(5_000) for beat in read_beats(tmp_path)]
    finally:
        writer.kill()
    assert len(seen) == 5_000
    assert {(beat.pid, beat.phase) for beat in seen} == {
        (writer.pid, "start"),
        (writer.pid, "evaluate"),
    }
    assert all(begun_s <= beat.progress_s <= beat.alive_s for beat in seen)
    assert all(a.step <= b.step for a, b in pairwise(seen))


def _beat_for_ever(folder):
    beat = Heartbeat()
    beat.start(folder, 0)
    for step in itertools.count():
        with beat.phase("evaluate"):
            beat.beat(step)


def run_machines(folders):
    """Run two machines with one rank each, and return how each of them ended."""
    endpoint = f"127.0.0.1:{free_port()}"
    ends = [None, None]

    def run(rank):
        distributed = {
            "num_processes": 1,
            "num_machines": 2,
            "machine_rank": rank,
            "rendezvous_endpoint": endpoint,
            "bucket_mib": "all",  # the others exchange gradients in buckets
        }
        options = {"token_budget": 60, "distributed": distributed}
        job = make_job(folders[rank], config=NO_DROPOUT, **options)
        try:
            ends[rank] = run_job(job)
        except BaseException as error:
            ends[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(150)
    return ends


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(170)
def test_two_machines_train_one_model_and_the_first_has_it(tmp_path):
    """Each machine has its own disk, and only machine 0 writes."""
    first, second = run_machines([tmp_path / "0", tmp_path / "1"])
    assert isinstance(second, SystemExit) and second.code == 0
    alone = run_job(make_job(tmp_path / "alone", config=NO_DROPOUT))
    assert first.report.world_size == 2
    for point, other in zip(first.history, alone.history, strict=True):
        assert point.step == other.step
        assert point.loss == pytest.approx(other.loss, rel=1e-5)
        assert point.grad_norm == pytest.approx(other.grad_norm, rel=1e-4)
    assert first.report.test_loss == pytest.approx(alone.report.test_loss, rel=1e-5)
    assert not (tmp_path / "1" / "run").exists()
    assert not (tmp_path / "1" / "metrics.jsonl").exists()


def train_another(runtime, group, folder):
    """Train with different parameters on rank 1."""
    own = {"learning_rate": 0.5, "token_budget": 40} if runtime.ranks.rank else {}
    job = make_job(folder / str(runtime.ranks.rank), **{"token_budget": 60, **own})
    with pytest.raises(SettingsError) as refused:
        train(job, runtime, group)
    text = str(refused.value)
    assert "train.learning_rate: 0.001 -> 0.5" in text
    assert "train.token_budget: 60 -> 40" in text
    assert "rank 1 would train something else than rank 0" in text


@pytest.mark.process
def test_ranks_with_other_parameters_are_refused_by_name(tmp_path):
    """This includes parameters that divide a step, because rows would be lost."""
    fork_two(train_another, tmp_path)


@pytest.mark.process
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_inside_torchrun_only_rank_0_runs_the_project(data, project):
    """Every node runs once under torchrun, and one MLflow run is recorded."""
    command = [
        *(str(Path(sys.executable).with_name("torchrun")), "--standalone"),
        *("--nproc-per-node=2", "-m", "kedro", "run", "--env=test"),
        f"--params=data_dir={data}",
    ]
    process = subprocess.Popen(
        command,
        cwd=project,
        env=not_activated(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=180)
    finally:
        supervisor._kill_group(process.pid)
    assert process.returncode == 0, output
    assert output.count("\ntrained ") == 1
    report = json.loads((data / "08_reporting" / "train_report.json").read_text())
    assert report["world_size"] == 2
    assert [run.info.status for run in runs_of(data)] == ["FINISHED"]


def test_the_launcher_reads_a_rank_s_error_whole_or_not_at_all(tmp_path, monkeypatch):
    """The launcher may read while the rank writes. PyTorch's reader would fail."""
    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    text = "connection closed " * 200_000  # megabytes, so that a reader meets a writer
    writer = threading.Thread(
        target=lambda: [leave_error(RuntimeError(text)) for _ in range(20)]
    )
    writer.start()
    read = []
    while writer.is_alive():
        message = ProcessFailure(0, 1, 1, str(path)).error_file_data["message"]
        if isinstance(message, dict):  # otherwise there is no file yet
            read.append(message["message"])
    writer.join()
    assert set(read) == {f"RuntimeError: {text}"}
