"""Batches from workers: how many workers there are, and what they need and cost."""

from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch._dynamo.callback import callback_handler

from flatout.engine.batches import loader
from flatout.engine.batches.collation import StepRows
from flatout.engine.batches.loader import StepLoader, resolve_workers
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import LoaderSettings, RuntimeSettings
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.rows import TokenRowsError, array_of
from flatout.engine.train.recording.timing import CompileClock
from tests.engine.families import step_rows


def step_loader(stop, start=0, **options):
    data = step_rows("bert", "sequence-classification", "grouped")
    runtime = set_up(RuntimeSettings())
    return StepLoader(data, LoaderSettings(**options), runtime, start, stop)


@pytest.mark.parametrize(
    ("cores", "is_cuda", "ranks", "decodes", "workers"),
    [
        (16, False, 1, False, 0),
        (16, False, 1, True, 0),
        (16, True, 1, False, 4),
        (6, True, 1, False, 3),
        (12, True, 2, False, 3),
        (1, True, 1, False, 1),
        (17, True, 2, True, 8),
        (1, True, 2, True, 1),
    ],
)
def test_workers_by_cores_and_ranks(
    monkeypatch, cores, is_cuda, ranks, decodes, workers
):
    monkeypatch.setattr(loader, "usable_cores", lambda: cores)
    settings = LoaderSettings(num_workers="auto")
    assert resolve_workers(settings, is_cuda, ranks, decodes=decodes) == workers
    seven = LoaderSettings(num_workers=7)
    assert resolve_workers(seven, is_cuda, ranks, decodes=decodes) == 7


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_of_rows_has_the_same_message_in_a_worker(monkeypatch, workers):
    def fail(*_):
        raise TokenRowsError("row 3 is broken")

    monkeypatch.setattr(StepRows, "__getitem__", fail)
    with pytest.raises(TokenRowsError, match=r"^row 3 is broken$"):
        next(iter(step_loader(4, num_workers=workers)))


@pytest.fixture
def now(monkeypatch):
    """A simulated clock, on which each batch takes 5 s."""
    now, make = [0.0], StepRows.__getitem__

    def slow_make(data, step):
        now[0] += 5.0
        return make(data, step)

    monkeypatch.setattr(StepRows, "__getitem__", slow_make)
    monkeypatch.setattr(loader.time, "perf_counter", lambda: now[0])
    return now


def test_waiting_for_a_batch_is_what_the_host_was_blocked(now):
    """The 100 s for which the user processes the batch are not waiting time."""
    steps = step_loader(3)
    for _ in steps:
        assert steps.wait_s == 5.0
        now[0] += 100.0


@pytest.mark.process
def test_what_a_batch_costs_its_worker_is_known(now):
    steps = step_loader(5, num_workers=1)
    assert [batch.step for batch in steps] == [0, 1, 2, 3, 4]
    assert steps.times.batch_s() == 5.0


@pytest.mark.process
@pytest.mark.parametrize("persistent", [True, False])
def test_each_step_comes_once_with_a_loader_an_epoch_or_one_for_all(persistent):
    size = len(step_loader(1).data)
    start, stop = 1, 2 * size + 1
    steps = step_loader(stop, start, num_workers=1, persistent_workers=persistent)
    ranges = [range(1, stop)]
    if not persistent:
        ranges = [range(1, size), range(size, 2 * size), range(2 * size, stop)]
    assert list(steps._step_ranges()) == ranges
    assert [batch.step for batch in steps] == list(range(start, stop))


@pytest.mark.process
@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("start", [0, 33])
def test_steps_that_come_together_are_those_that_are_made_alone(workers, start):
    data = step_rows("bert", "sequence-classification", "packed")
    assert loader.run_steps(data) == 32
    settings = LoaderSettings(num_workers=workers)
    steps = StepLoader(data, settings, set_up(RuntimeSettings()), start, 71)
    found = list(steps)
    assert [batch.step for batch in found] == list(range(start, 71))
    for batch in found:
        alone = data[batch.step]
        assert batch.row_ids.tolist() == alone.row_ids.tolist()
        for name, value in vars(alone).items():
            if name not in ("buffer", "row_ids"):
                assert getattr(batch, name) == value
        pairs = zip(batch.micro_batches, alone.micro_batches, strict=True)
        for micro, own in pairs:
            assert list(micro) == list(own)
            for name, tensor in own.items():
                assert torch.equal(micro[name], tensor)


def test_only_small_batches_come_together():
    """The rows have at most 24 tokens, with 40 bytes per token."""
    data = step_rows("bert", "sequence-classification", "packed")
    rows = -(-(2**20) // (3 * 40 * 24))
    for size, steps in ((rows, 2), (rows - 1, 3), (2**20, 1)):
        batches = replace(data.batches, batch_size=size)
        assert loader.run_steps(replace(data, batches=batches)) == steps


def test_batches_of_large_samples_come_together_less_often():
    """A sample has 100 x 100 bytes, with 40 more for its only position."""
    pixels = array_of(np.zeros((4, 100, 100), np.uint8))
    rows = ArrayRows(pa.table({"inputs": pixels, "labels": [0, 1, 0, 1]}))
    data = step_rows("bert", "sequence-classification", "packed")
    size = 2**20 // (3 * 10_040)
    for more, steps in ((0, 3), (1, 2)):
        batches = replace(data.batches, batch_size=size + more)
        assert loader.run_steps(replace(data, rows=rows, batches=batches)) == steps


def test_memory_for_batches_that_are_ready_suffices():
    step = step_rows("bert", "sequence-classification", "packed")[0]
    sizes = 3, step.num_samples, 24
    needed = loader.shared_memory_bytes(LoaderSettings(prefetch_factor=2), *sizes)
    assert 3 * 2 * step.buffer.nbytes <= needed <= 2**20


def test_a_clock_that_listens_twice_is_told_once():
    clock = CompileClock()
    clock.listen()
    clock.listen()
    try:
        assert callback_handler.start_callbacks.count(clock._started) == 1
        assert callback_handler.end_callbacks.count(clock._ended) == 1
    finally:
        callback_handler.remove_start_callback(clock._started)
        callback_handler.remove_end_callback(clock._ended)
