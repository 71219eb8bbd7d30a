"""Small batches a second of the loader alone, in this checkout and in another by turns.

    python -m tests.tools.loader_rates --batch 13 64 --against ../another/checkout

Rows are drawn by a seed: log keys, 15 to 44 tokens, laid out as for an LSTM on a GPU.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa

from flatout.engine.batches.collation import Collator, StepRows
from flatout.engine.batches.global_batches import GlobalBatches, Planner
from flatout.engine.batches.loader import StepLoader
from flatout.engine.machine.runtime import set_up
from flatout.engine.parameters import LoaderSettings, parse_settings
from flatout.engine.rows.layout import Layout
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.tasks import make_task

PROJECT = Path(__file__).parents[2]
LENGTHS = (15, 15, 19, 21, 21, 21, 21, 24, 27, 33, 44)
BUDGET = 65_536
MODEL = {"task": "next-key", "config": {"model_type": "log_key_lstm"}}


def data_of(batch: int, num_rows: int = 3_105) -> StepRows:
    """Steps of `batch` rows."""
    generator = np.random.default_rng(0)
    lengths = generator.choice(LENGTHS, num_rows)
    ids = [generator.integers(4, 18, length).astype(np.int32) for length in lengths]
    rows = TokenRows(pa.table({"input_ids": pa.array(ids, pa.list_(pa.int32()))}))
    task = make_task(parse_settings({"model": MODEL}).model, ())
    layout = Layout(pad_multiple=8, every_place=True, max_length=1_024)
    planner = Planner("grouped", BUDGET, 1_024, overhead_tokens=BUDGET)
    collator = Collator(task, layout, pools_last=True)
    return StepRows(rows, GlobalBatches(num_rows, batch, 0), planner, collator)


def rate(batch: int, workers: int, steps: int) -> float:
    """Batches a second behind the first 100."""
    runtime = set_up(parse_settings({"model": MODEL}).runtime)
    settings = LoaderSettings(num_workers=workers)
    batches = iter(StepLoader(data_of(batch), settings, runtime, 0, 100 + steps))
    for _ in range(100):
        next(batches)
    begin = time.perf_counter()
    made = sum(1 for _ in batches)
    return made / (time.perf_counter() - begin)


def rate_in(checkout: Path, batch: int, workers: int, steps: int) -> float:
    """The same by the sources of `checkout`, in a process of its own."""
    wanted = ["--batch", str(batch), "--workers", str(workers), "--steps", str(steps)]
    command = [sys.executable, str(Path(__file__).resolve()), *wanted, "--alone"]
    environment = os.environ | {"PYTHONPATH": str(checkout / "src")}
    done = subprocess.run(
        command, env=environment, check=True, capture_output=True, text=True
    )
    return float(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batch", type=int, nargs="+", default=[13])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--steps", type=int, default=2_000)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--against", type=Path)
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.alone:
        sys.stdout.write(f"{rate(asked.batch[0], asked.workers[0], asked.steps)}\n")
        return
    places = [PROJECT, *([asked.against.resolve()] if asked.against else [])]
    for batch in asked.batch:
        for workers in asked.workers:
            one = (batch, workers, asked.steps)
            turns = [[rate_in(p, *one) for p in places] for _ in range(asked.turns)]
            found = [statistics.median(side) for side in zip(*turns, strict=True)]
            told = " and ".join(f"{value:,.0f}" for value in found)
            sys.stdout.write(f"{batch} rows, {workers} workers: {told} batches/s\n")


if __name__ == "__main__":
    main()
