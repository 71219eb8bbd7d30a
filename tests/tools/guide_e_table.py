# ruff: noqa: T201
"""A table as guide E's tool reads it: numbers and classes in one HDF5 file.

    python -m tests.tools.guide_e_table data/01_raw/guide_e.h5
    python -m tests.tools.guide_e_table --rates small middle large

Classes are those of a random layer of tanh, so that a model can learn them. `--rates`
trains on such a table in this process, a second or so a batch size, and prints samples
a second: the sweep in short, uncompiled, recorded as CUDA graphs or not.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

BATCHES = [2**power for power in range(14)]


def table(rows: int, columns: int, classes: int) -> tuple[Any, Any]:
    """(rows, columns) and (rows,)."""
    generator = np.random.default_rng(0)
    values = generator.normal(size=(rows, columns)).astype(np.float32)
    mixed = np.tanh(values @ generator.normal(size=(columns, 32)) / 4)
    return values, (mixed @ generator.normal(size=(32, classes))).argmax(1)


def write(file: Path, rows: int, columns: int, classes: int) -> None:
    """`inputs` (rows, columns) and `label` (rows,)."""
    import h5py

    values, labels = table(rows, columns, classes)
    file.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(file, "w") as opened:
        opened["inputs"], opened["label"] = values, labels


def job_of(preset: str, batch: int, recorded: bool, asked: argparse.Namespace) -> Any:
    from flatout.engine.parameters import parse_settings
    from flatout.engine.rows.arrays import ArrayRows
    from flatout.engine.rows.fixed_lists import array_of
    from flatout.engine.train.setup.job import TrainJob

    settings = parse_settings(
        {
            "model": {
                "task": "sequence-classification",
                "config": {"model_type": "residual_mlp", "preset": preset},
            },
            "train": {
                "rows": "arrays",
                "global_batch_size": batch,
                "token_budget": batch,
                "epochs": 1_000_000,
                "learning_rate": 1e-3,
                "compile": False,
                "cuda_graphs": recorded,
                "distributed": {"num_processes": 1},
            },
        }
    )
    whole = max(1, asked.rows // batch) * batch  # no smaller last batches
    values, labels = table(whole, asked.columns, asked.classes)
    rows = ArrayRows(pa.table({"inputs": array_of(values), "labels": labels}))
    names = tuple(map(str, range(asked.classes)))
    places = asked.folder / "run", asked.folder / "metrics.jsonl"
    return TrainJob(settings, rows, rows, rows, None, names, *places, "k")


def rate(preset: str, batch: int, recorded: bool, asked: argparse.Namespace) -> str:
    """Samples a second, the loader's share of waiting, and GPU memory."""
    import torch

    from flatout.engine.batches.loader import StepLoader
    from flatout.engine.benchmark.measuring.driver import Driver
    from flatout.engine.machine.runtime import memory, set_up
    from flatout.engine.train.setup.assemble import assemble

    job = job_of(preset, batch, recorded, asked)
    runtime = set_up(job.settings.runtime)
    trainer = assemble(job, runtime)
    trainer.model.train()
    options = job.settings.train.loader
    loader = StepLoader(trainer.data, options, runtime, 0, trainer.total_steps)
    driver, samples, wait_s = Driver(trainer), 0, 0.0
    if runtime.is_cuda:
        torch.cuda.reset_peak_memory_stats()
    began, warm = time.perf_counter(), False
    for batch_now in loader:
        driver.step(batch_now, loader.wait_s)
        samples, wait_s = samples + batch_now.num_samples, wait_s + loader.wait_s
        if driver._done % 8:
            continue
        if time.perf_counter() - began > asked.seconds:
            driver.synchronize()
            if warm:
                break
            warm, samples, wait_s, began = True, 0, 0.0, time.perf_counter()
    took = time.perf_counter() - began
    peak = memory(runtime)["peak_reserved_gib"]
    wait = 100 * wait_s / took
    return f"{samples / took:,.0f} samples/s, wait {wait:.0f} %, {peak:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?")
    parser.add_argument("--rates", nargs="*", default=[], metavar="PRESET")
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parser.add_argument("--recorded", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.5)
    parser.add_argument("--rows", type=int, default=40_000)
    parser.add_argument("--columns", type=int, default=64)
    parser.add_argument("--classes", type=int, default=10)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        asked.folder = Path(folder)
        for preset, batch in product(asked.rates, asked.batches):
            found = rate(preset, batch, asked.recorded, asked)
            print(f"{preset} {batch} recorded {asked.recorded}: {found}", flush=True)
    if asked.file:
        write(asked.file, asked.rows, asked.columns, asked.classes)


if __name__ == "__main__":
    main()
