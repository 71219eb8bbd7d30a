"""Steps that begin uncompiled and are compiled from a recorded step on."""

from __future__ import annotations

import json
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch._dynamo.utils import counters

from flatout.engine.checkpoints.checkpoint_folder import read_manifest, step_folders
from flatout.engine.checkpoints.unfinished import Unfinished
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.environment import Ranks
from flatout.engine.machine.runtime import set_up
from flatout.engine.models.carried_cache import export_cache, import_cache
from flatout.engine.models.compilation import compiled
from flatout.engine.train import loop
from flatout.engine.train.keeping import compile_process, late_compile
from flatout.engine.train.keeping.oom import OutOfMemory, shrink
from flatout.engine.train.setup.acceleration import Planned
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.identity import identity
from flatout.engine.train.step import Stepper
from tests.engine.runs import curve, make_job, points, run_beside_compiler
from tests.engine.test_resume import crashed, weights
from tests.engine.test_standby import gone

pytestmark = [pytest.mark.slow, pytest.mark.process]

SWITCH = 3
"""Steps of the first run that are not compiled."""


def late_job(folder, **train):
    """Padded rows of one layer: few graphs."""
    settings = {
        "compile": "late",
        "batching": "grouped",
        "evaluate_every": 3,
        "checkpoint": {"every_steps": 2, "keep": 2},
    }
    config = {"num_hidden_layers": 1}
    return make_job(folder, config=config, **{**settings, **train})


def knows(job, step: int) -> None:
    """As a run before it would have left it, killed behind its decision."""
    job.work_folder.mkdir(parents=True, exist_ok=True)
    noted = Unfinished(job.work_folder, identity(job))
    noted.begin(0)
    noted.note_compiled_from(step)


@pytest.fixture(autouse=True)
def _as_in_a_new_process():
    yield
    torch._dynamo.reset()
    counters.clear()


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A run whose steps wait, at the log point before the switch, until the process
    beside them has compiled; and what that process left for this one."""
    folder = tmp_path_factory.mktemp("late")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder / "graphs"))
        job = late_job(folder)
        result, told = run_beside_compiler(run_job, job, f"step {SWITCH}/12  loss")
        graphs = counters["inductor"]
        found = graphs["fxgraph_cache_hit"], graphs["fxgraph_cache_miss"]
        torch._dynamo.reset()
        counters.clear()
        yield job, result, found, told


def test_another_process_compiles_while_steps_are_taken(first, tmp_path):
    _, result, (hits, misses), told = first
    assert result.report.compiled_from_step == SWITCH
    assert (result.report.compile, misses) == (True, 0)
    assert hits > 0
    assert any("steps are compiled from step 4 on: another" in line for line in told)
    rates = [point.samples_per_s for point in result.history]
    assert [rate > 0 for rate in rates] == [False, False, True, True]
    plain = run_job(late_job(tmp_path, compile=False))
    assert plain.report.compiled_from_step is None
    assert curve(result)[0] == curve(plain)[0]  # three steps
    assert result.history[1].loss == pytest.approx(plain.history[1].loss, rel=0.01)
    assert curve(result)[1:] != curve(plain)[1:]  # dropout draws in another order


@pytest.mark.parametrize(
    "moments",
    [
        [],
        ["step 6/12  loss"],
        ["step 6/12  loss", "step 9/12  loss", "step 12/12  validation"],
    ],
    ids=["before the switch", "behind it", "three times"],
)
def test_a_run_that_is_killed_is_compiled_from_the_same_step(first, tmp_path, moments):
    job, undisturbed, *_ = first
    again = late_job(tmp_path)
    crashed(again, f"step {SWITCH}/12  loss")
    kept = read_manifest(step_folders(again.work_folder)[0])
    assert (kept.step, kept.accelerated["compiled_from_step"]) == (2, None)
    knows(again, SWITCH)
    for moment in moments:
        crashed(again, moment)
    result = run_job(again)
    assert result.report.resumed_from_step in range(2, 13)
    assert result.report.compiled_from_step == SWITCH
    assert curve(result) == curve(undisturbed)
    assert weights(result) == weights(undisturbed)
    assert sorted(points(again)) == sorted(points(job))
    assert result.report.test_loss == undisturbed.report.test_loss


CARRIED = """
import json, sys
from pathlib import Path
from torch._dynamo.utils import counters
from flatout.engine.launch.launch import run_job
from tests.engine.runs import curve
from tests.engine.test_late_compile import SWITCH, knows, late_job
job = late_job(Path(sys.argv[1]))
knows(job, SWITCH)
result = run_job(job)
found = [curve(result), counters["inductor"]["fxgraph_cache_miss"]]
Path(sys.argv[1], "found.json").write_text(json.dumps(found))
"""


def test_what_is_compiled_is_carried_to_another_folder(first, tmp_path, monkeypatch):
    """Into an empty one, for a process of its own: nothing is compiled there, and the
    training is the same bit for bit."""
    _, undisturbed, *_ = first
    export_cache(tmp_path / "compiled.zip")
    graphs = tmp_path / "graphs"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(graphs))
    import_cache(tmp_path / "compiled.zip")
    before = sorted(graphs.rglob("*.so"))
    subprocess.run([sys.executable, "-c", CARRIED, tmp_path], check=True, timeout=280)
    found, misses = json.loads((tmp_path / "found.json").read_text())
    assert (misses, sorted(graphs.rglob("*.so"))) == (0, before)
    assert before
    assert [tuple(point) for point in found] == curve(undisturbed)


def test_ranks_switch_together(first, tmp_path):
    _, alone, *_ = first
    job = late_job(tmp_path, distributed={"num_processes": 2})
    knows(job, SWITCH)
    result = run_job(job)
    assert result.report.world_size == 2
    assert (result.report.compile, result.report.compiled_from_step) == (True, SWITCH)
    for mine, other in zip(result.history, alone.history, strict=True):
        assert mine.loss == pytest.approx(other.loss, rel=0.01)


def test_where_the_other_process_fails_this_one_compiles(tmp_path, monkeypatch, caplog):
    """Without PyTorch, say; here its module is none."""
    monkeypatch.setattr(compile_process, "__name__", "flatout.engine.nothing")
    eager = partial(compiled, backend="aot_eager")
    monkeypatch.setattr(late_compile, "compiled", eager)
    job = late_job(tmp_path, max_steps=400, epochs=200, log_every=1)
    result = run_job(job)
    assert "ended with status 1" in caplog.text
    assert "No module named flatout.engine.nothing" in caplog.text
    assert result.report.compile and 0 < result.report.compiled_from_step < 400


def test_what_cannot_be_told_to_another_process_costs_no_run(
    tmp_path, monkeypatch, caplog
):
    """A task of a notebook's own, say, or a full disk."""
    monkeypatch.setattr(compile_process, "_order", lambda _: lambda: None)
    eager = partial(compiled, backend="aot_eager")
    monkeypatch.setattr(late_compile, "compiled", eager)
    result = run_job(late_job(tmp_path))
    assert "no process compiles beside the training" in caplog.text
    assert (result.report.compile, result.report.compiled_from_step) == (True, 1)


class Sleeps:
    """Stands for a process that compiles for long: it reads this as what to train."""

    def __reduce__(self):
        return time.sleep, (600,)


@pytest.fixture
def sleeping(monkeypatch):
    """Another process that never ends by itself, and this one without a compiler."""
    monkeypatch.setattr(compile_process, "_order", lambda _: Sleeps())
    eager = partial(compiled, backend="aot_eager")
    monkeypatch.setattr(late_compile, "compiled", eager)


@pytest.mark.parametrize("full", ["Stepper", "an evaluation"])
def test_memory_that_runs_out_ends_the_other_process_first(
    sleeping, tmp_path, monkeypatch, caplog, full
):
    """The budget stays: it fits once the other one is gone."""
    left = ["once"]

    def limited(real):
        def call(*arguments):
            if left:
                left.pop()
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return real(*arguments)

        return call

    if full == "Stepper":
        monkeypatch.setattr(Stepper, "__call__", limited(Stepper.__call__))
    else:
        monkeypatch.setattr(loop, "evaluate", limited(loop.evaluate))
    job = late_job(tmp_path)
    result = run_job(job)
    where = "at step 0" if full == "Stepper" else "in an evaluation"
    assert f"out of memory {where}: the process that compiles" in caplog.text
    assert "ended with status -9" in caplog.text
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert not any("token budget" in line for line in warned)
    assert result.report.token_budget == 120
    assert result.report.compile and result.report.samples == 180
    assert result.report.compiled_from_step in range(1, 12)


def test_several_ranks_start_again_without_the_other_process(tmp_path, sleeping):
    job = late_job(tmp_path)
    runtime = set_up(job.settings.runtime)
    trainer = assemble(job, runtime, None, lambda _: Planned(12, 2))
    assert trainer.resolved.late
    several = Ranks(world_size=2, local_world_size=2)
    trainer.runtime = replace(trainer.runtime, ranks=several)
    text = r"at step 7 beside the process that compiles: set train\.compile: true"
    with pytest.raises(OutOfMemory, match=text) as full:
        shrink(trainer, RuntimeError("CUDA out of memory"), step=7)
    assert full.value.to_try == {"compile": True}


STARTER = """
import os, signal, sys
from pathlib import Path
from flatout.engine.train.keeping import compile_process
from tests.engine.test_late_compile import Sleeps
compile_process._order = lambda _: Sleeps()
found = compile_process.CompileProcess.start(None)
Path(sys.argv[1]).write_text(str(found.process.pid))
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_other_process_ends_with_a_training_that_was_killed(tmp_path):
    file = tmp_path / "pid"
    killed = subprocess.run([sys.executable, "-c", STARTER, file], check=False)
    assert killed.returncode == -signal.SIGKILL
    gone(int(file.read_text()))


def test_a_full_disk_leaves_what_an_earlier_run_knew(tmp_path):
    noted = Unfinished(tmp_path, {"seed": 1})
    noted.begin(0)
    noted.note_compiled_from(3)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))  # no file grows
    try:
        again = Unfinished(tmp_path, {"seed": 1})
        again.begin(2, again.compiled_from())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    after = Unfinished(tmp_path, {"seed": 1})
    assert (after.earlier_step(), after.compiled_from()) == (2, 3)
