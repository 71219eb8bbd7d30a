"""Ranks that die, hang, fail, or are asked to stop."""

import logging
import re
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from flatout.engine.checkpoints.checkpoint_folder import read_manifest, step_folders
from flatout.engine.launch.launch import run_job
from flatout.engine.launch.supervisor import HangError
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import set_up
from flatout.engine.machine.signals import Interrupted
from flatout.engine.machine.watchdog import Beat, overdue, read_beats
from flatout.engine.train.keeping.oom import OutOfMemory, is_out_of_memory, shrink
from flatout.engine.train.recording.health import NonFiniteError
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.job import TrainJob
from flatout.engine.train.step import Stepper
from tests.engine.runs import curve, make_job
from tests.tools.drill import Drill
from tests.tools.victim import Victim

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.usefixtures("forked_ranks"),
]


def two_ranks(folder, steps: int = 30, **train) -> TrainJob:
    distributed = {"num_processes": 2, **train.pop("distributed", {})}
    return make_job(
        folder,
        epochs=1000,
        max_steps=steps,
        evaluate_every=10,
        checkpoint={"every_steps": 4, "keep": 2},
        distributed=distributed,
        **train,
    )


def rank_processes() -> dict[int, psutil.Process]:
    """Return the ranks that this process has started, by rank."""
    places = Path(tempfile.gettempdir()).glob("flatout-*/beats")
    beats = [beat for place in places for beat in read_beats(place)]
    return {beat.rank: psutil.Process(beat.pid) for beat in beats}


def newest_step(job: TrainJob) -> int:
    steps = [int(path.name.partition("-")[2]) for path in step_folders(job.work_folder)]
    return max(steps, default=0)


class AtStep(threading.Thread):
    """Calls `action(ranks)` once there is a checkpoint of `step` or a later step."""

    def __init__(self, job, step, action):
        super().__init__(daemon=True)
        self._job, self._step, self._action = job, step, action
        self.ranks: dict[int, psutil.Process] = {}
        self.acted_s = 0.0

    def run(self):
        while newest_step(self._job) < self._step:
            time.sleep(0.01)
        self.ranks = rank_processes()
        SEEN.extend(self.ranks.values())
        self._action(self.ranks)
        self.acted_s = time.time()


SEEN: list[psutil.Process] = []


@pytest.fixture()
def no_orphans(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = psutil.Process().children(recursive=True)
    SEEN.clear()
    yield
    time.sleep(0.2)
    assert {*psutil.Process().children(recursive=True)} <= {*before}
    gone = ("zombie", "terminated")
    assert not [r for r in SEEN if r.is_running() and r.status() not in gone]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return curve(run_job(two_ranks(tmp_path_factory.mktemp("undisturbed"))))


@pytest.mark.slow
def test_a_killed_rank_ends_the_job_and_a_restart_goes_on(
    tmp_path, undisturbed, no_orphans, caplog
):
    """The rank is killed once. With max_restarts: 1, the curve is that of the
    undisturbed run."""
    job = two_ranks(tmp_path, distributed={"max_restarts": 1})
    killer = AtStep(job, 8, lambda ranks: ranks[1].kill())
    killer.start()
    with caplog.at_level(logging.WARNING, "flatout"):
        result = run_job(job)
    told = [r for r in caplog.records if "rank 1 was killed by SIGKILL" in r.message]
    assert len(told) == 1
    assert told[0].created - killer.acted_s < 10  # after seconds, not a timeout
    assert result.report.resumed_from_step >= 8
    assert curve(result) == undisturbed


@pytest.mark.slow
def test_a_hung_rank_is_named_with_its_stacks(tmp_path, no_orphans):
    limits = {"heartbeat_timeout_s": 3}
    job = two_ranks(tmp_path, steps=100_000, distributed=limits)
    stopper = AtStep(job, 4, lambda ranks: ranks[1].suspend())
    stopper.start()
    with pytest.raises(HangError) as hang:
        run_job(job)
    text = str(hang.value)
    assert text.startswith(f"rank 1 (process {stopper.ranks[1].pid}) made no progress")
    assert "The process is stopped (SIGSTOP)" in text
    assert re.search(r"rank 0, \w+, step \d+:\n.*Current thread", text, re.DOTALL)
    assert hang.value.exit_code == 6


@pytest.mark.slow
def test_a_failing_rank_brings_its_own_error(tmp_path, no_orphans):
    job = two_ranks(tmp_path, learning_rate=1e30, warmup_fraction=0.0, log_every=2)
    with pytest.raises(NonFiniteError, match=r"step \d+: loss or gradient is not fin"):
        run_job(job)


@pytest.mark.slow
def test_a_signal_stops_all_ranks_at_one_step_and_one_rank_can_go_on(
    tmp_path, no_orphans
):
    """The signal is sent to all processes, as a scheduler does."""
    job = two_ranks(tmp_path, steps=40, log_every=40)

    def terminate(ranks):
        for process in (ranks[0].parent(), *ranks.values(), psutil.Process()):
            process.terminate()

    stop = AtStep(job, 8, terminate)
    stop.start()
    with pytest.raises(Interrupted) as stopped:
        run_job(job)
    assert stopped.value.code == 143
    manifest = read_manifest(step_folders(job.work_folder)[0])
    assert f"stopped after step {manifest.step} of 40: saved" in str(stopped.value)
    assert manifest.world_size == 2
    alone = two_ranks(
        tmp_path, steps=40, log_every=40, distributed={"num_processes": 1}
    )
    result = run_job(alone)
    assert result.report.resumed_from_step == manifest.step
    assert result.report.world_size == 1
    assert [point.step for point in result.history] == [40]


def test_the_stopped_rank_comes_before_those_that_wait_for_it():
    now = 100.0
    beats = [
        Beat(0, 1, step=7, progress_s=60, alive_s=99.9, phase="train"),
        Beat(1, 2, step=7, progress_s=61, alive_s=61.0, phase="train"),
        Beat(2, 3, step=6, progress_s=59, alive_s=99.9, phase="train"),
        Beat(3, 4, step=6, progress_s=59, alive_s=99.9, phase="compile"),
        Beat(4, 5, step=9, progress_s=20, alive_s=20.0, phase="finished"),
    ]
    assert [beat.rank for beat in overdue(beats, 30, now)] == [1, 2, 0]
    assert overdue(beats, 50, now) == []


def test_memory_that_runs_out_halves_the_token_budget(tmp_path, monkeypatch):
    """A limit of 60 tokens per micro-batch simulates a full device."""
    real, refused = Stepper.__call__, []

    def limited(self, batch):
        largest = max(micro["input_ids"].numel() for micro in batch.micro_batches)
        if largest > 60:
            refused.append(largest)
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
        real(self, batch)

    monkeypatch.setattr(Stepper, "__call__", limited)
    with pytest.raises(OutOfMemory, match=r"set train\.token_budget: 60 ") as full:
        run_job(make_job(tmp_path / "stop", on_oom="stop"))
    assert full.value.exit_code == 4
    job = make_job(tmp_path / "shrink", on_oom="shrink", log_every=1)
    result = run_job(job)
    assert result.report.token_budget == 60
    assert len(refused) == 2
    assert [point.step for point in result.history] == list(range(1, 13))
    assert result.report.samples == 180  # no row is lost or repeated


def test_graphs_are_given_up_before_the_budget(tmp_path, caplog):
    job = make_job(tmp_path, on_oom="stop")
    trainer = assemble(job, set_up(job.settings.runtime))
    budget = trainer.resolved.token_budget
    trainer.resolved = replace(trainer.resolved, cuda_graphs=True)
    full = RuntimeError("CUDA out of memory")
    shrink(trainer, full, step=7)
    assert "out of memory at step 7: continuing without CUDA graphs" in caplog.text
    assert (trainer.resolved.cuda_graphs, trainer.resolved.token_budget) == (
        False,
        budget,
    )
    broken = RuntimeError("operation failed due to a previous error during capture")
    assert not is_out_of_memory(broken)
    broken.__context__ = full
    assert is_out_of_memory(broken)
    with pytest.raises(OutOfMemory, match="out of memory at step 8 with token budget"):
        shrink(trainer, full, step=8)
    several = replace(trainer.runtime, ranks=Ranks(world_size=2, local_world_size=2))
    trainer.runtime = several
    trainer.resolved = replace(trainer.resolved, cuda_graphs=True)
    text = (
        "out of memory at step 9 with CUDA graphs: set train.cuda_graphs: false, or "
        "train.on_oom: shrink"
    )
    with pytest.raises(OutOfMemory, match=f"^{text}$") as stopped:
        shrink(trainer, full, step=9)
    assert stopped.value.to_try == {"cuda_graphs": False}


def test_other_errors_are_no_shortage_of_memory(tmp_path, monkeypatch):
    def broken(self, batch):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(Stepper, "__call__", broken)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        run_job(make_job(tmp_path, on_oom="shrink"))


@pytest.mark.slow
def test_short_drill(tmp_path):
    """This has ten faults at random moments. For 50: python -m tests.tools.drill."""
    drill = Drill(tmp_path, Victim(max_steps=80), seed=3, preloaded=True)
    drill.run(10)
    assert sum(drill.faults.values()) == 10
    assert drill.resumed == drill.resumable > 0
