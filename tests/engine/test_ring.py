"""Batches of equally shaped samples are written to buffers from which the device
copies."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

from flatout.engine.batches.collation import Collator, StepRows
from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.batches.ring import SPARE, Ring, RingDataset
from flatout.engine.parameters import ModelSettings
from flatout.engine.rows.arrays import ArrayRows
from flatout.engine.rows.layout import Layout
from flatout.engine.rows.rows import array_of
from flatout.engine.tasks import make_task

ROWS, BATCH, STEPS = 50, 8, 30


def pixels(size):
    values = np.random.default_rng(0).integers(0, 256, (ROWS, size, size, 3))
    return values.astype(np.uint8)


def step_rows(values):
    """Return rows in two chunks, as larger splits are stored."""
    labels = np.arange(ROWS) % 3
    whole = pa.table({"inputs": array_of(values), "labels": labels})
    rows = ArrayRows(pa.concat_tables([whole.slice(0, 20), whole.slice(20)]))
    model = ModelSettings(task="image-classification", config={"model_type": "vit"})
    task = make_task(model, ("a", "b", "c"))
    planner = Planner("fixed", 5, 1)
    return StepRows(
        rows, GlobalBatches(ROWS, BATCH, 0), planner, Collator(task, Layout())
    )


@pytest.mark.process
@pytest.mark.parametrize("size", [4, 64])  # the 48 bytes of a row are copied together
@pytest.mark.parametrize("workers", [0, 2])
def test_places_hold_each_step_in_turn(workers, size):
    values = pixels(size)
    data = step_rows(values)
    ring = Ring.of(data, ahead=4)
    assert len(ring) == 4 + SPARE < STEPS
    loader = DataLoader(
        RingDataset(data, ring),
        batch_size=None,
        sampler=ring.numbered(range(STEPS)),
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
    )
    seen = []
    for step, batch in enumerate(ring.batches(iter(loader))):
        place = ring.place(step % len(ring))
        assert batch.buffer.data_ptr() == place.data_ptr()
        found = torch.cat([micro["inputs"] for micro in batch.micro_batches])
        assert np.array_equal(found.numpy(), values[batch.row_ids])
        labels = torch.cat([micro["labels"] for micro in batch.micro_batches])
        assert labels.tolist() == (batch.row_ids % 3).tolist()
        seen.append(batch.step)
    assert seen == list(range(STEPS))


class Copy:
    """Simulates a CUDA event, which is done once it is waited for."""

    def __init__(self, log, number):
        self.log, self.number = log, number

    def synchronize(self):
        self.log.append(f"waited for {self.number}")


class Copies:
    """Simulates a stream, which still copies a batch when the next one is requested."""

    def __init__(self, log):
        self.log, self.count = log, 0

    def record_event(self):
        self.count += 1
        return Copy(self.log, self.count - 1)


def test_a_place_is_written_again_when_its_copy_is_done():
    log = []
    data = step_rows(pixels(4))
    ring = Ring.of(data, ahead=1)
    rows, size = RingDataset(data, ring), len(ring)

    def made():
        for step, place in ring.numbered(range(size + 2)):
            log.append(f"writes {step}")
            yield rows[step, place]

    for _ in ring.batches(made(), Copies(log)):
        pass
    first = [f"writes {step}" for step in range(size)]
    again = ["waited for 0", f"writes {size}", "waited for 1", f"writes {size + 1}"]
    assert log == first + again


def test_a_step_that_no_place_holds_has_memory_of_its_own():
    data = step_rows(pixels(64))
    rows = RingDataset(data, Ring(2, 1_000))
    micros = zip(rows[0, 1].micro_batches, data[0].micro_batches, strict=True)
    for own, other in micros:
        assert torch.equal(own["inputs"], other["inputs"])


def test_a_rank_without_rows_has_one_of_zeros():
    data = step_rows(pixels(64))
    nothing = data.collator.collate(data.rows, np.zeros(0, np.int64), 0)
    assert nothing["inputs"].shape == (1, 64, 64, 3)
    assert not nothing["inputs"].any()
