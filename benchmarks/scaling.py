"""BERT-base on 1, 2, 4, ... devices, with as many rows a device.

    python -m benchmarks.scaling --devices 1 2 4
    python -m benchmarks.scaling --small --turns 1

Without a GPU, devices are processes that share the cores: their rates say nothing of
machines with a device for each process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import training
from benchmarks.encoders import BERT, SMALL
from benchmarks.harness import Figures, Script, Side, main, parser_of
from benchmarks.training import Shape

EACH = Shape(BERT, 704, token_budget=65_536, steps=20)
"""Rows of one device."""
SMALL_EACH = replace(EACH, config=SMALL, batch=16, token_budget="auto", steps=8)


def flatout(devices: int, given: argparse.Namespace) -> Figures:
    """Samples/s over all devices, by the report of a training."""
    from flatout.engine.launch.launch import run_job

    each = SMALL_EACH if given.small else EACH
    shape = replace(each, batch=each.batch * devices)
    table = training.token_table(each, labels=True)
    train = {
        "max_steps": 6 * each.steps,
        "log_every": each.steps,
        "evaluate_every": None,
        "resume": "never",
        "distributed": {"num_processes": devices},
    }
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        task = "sequence-classification"
        job = training.flatout_job(shape, task, table, Path(name), train)
        report = run_job(job).report
    return {
        "samples_per_s": report.samples_per_s,
        "samples_per_s_each": report.samples_per_s / devices,
        "loader_wait_pct": report.loader_wait_pct,
        "step_ms_p50": report.step_ms_p50,
    }


def _sides(counts: list[int]) -> dict[str, Side]:
    return {f"{count} devices": partial(flatout, count) for count in counts}


def _script(counts: list[int]) -> Script:
    cases = {"same rows a device": _sides(counts)}
    return Script("benchmarks.scaling", "rates by number of devices", cases)


def run() -> int:
    first = argparse.ArgumentParser(add_help=False)
    first.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    asked, _ = first.parse_known_args(sys.argv[1:])
    script = _script(asked.devices)
    parser = parser_of(script)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2])
    return main(script, parser)


if __name__ == "__main__":
    raise SystemExit(run())
