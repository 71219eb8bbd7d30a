"""Measure throughput on 1, 2, ... devices with the same number of rows per device.

    python -m benchmarks.scaling --devices 1 2 4
    python -m benchmarks.scaling --small --turns 1

Several devices are measured with DDP and with FSDP. Without a GPU, the devices are
processes that share the cores, so the results do not apply to machines with one device
per process.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import encoders, language_models, training
from benchmarks.encoders import BERT
from benchmarks.harness import Figures, Script, Side, main, parser_of
from benchmarks.language_models import QWEN3
from benchmarks.training import Shape

SHAPES = {
    "BERT-base, 1,408 rows": Shape(BERT, 1_408, token_budget=65_536, steps=10),
    "BERT-base, 64 rows": Shape(BERT, 64, token_budget=65_536, steps=60),
    "Qwen3-0.6B's shape, 128 rows": Shape(QWEN3, 128, token_budget=32_768, steps=8),
}
"""The shape of each case. The batch size is the number of rows per device."""
SMALL = {"bert": encoders.SMALL, "qwen3": language_models.SMALL}
"""The config of each model type with `--small`."""

SHOWN = ("samples_per_s", "loader_wait_pct", "step_ms_p50", "peak_allocated_gib")
SHOWN += ("peak_reserved_gib", "compile_s")
"""Values of the report that are shown."""


def flatout(devices: int, strategy: str, given: argparse.Namespace) -> Figures:
    """Train on `devices` devices. Return the samples/s per device, and the values in
    SHOWN from the train report."""
    from flatout.engine.launch.launch import run_job

    each = SHAPES[given.case]
    causal = each.config["model_type"] == "qwen3"
    if given.small:
        config = SMALL[each.config["model_type"]]
        each = replace(each, config=config, batch=16, token_budget="auto", steps=8)
    shape = replace(each, batch=each.batch * devices)
    table = training.token_table(each)
    train = {
        "max_steps": 6 * each.steps,
        "log_every": each.steps,
        "evaluate_every": None,
        "resume": "never",
        "distributed": {"num_processes": devices, "strategy": strategy},
    }
    task = "causal-lm" if causal else "sequence-classification"
    with tempfile.TemporaryDirectory(prefix="flatout-") as name:
        job = training.flatout_job(shape, task, table, Path(name), train)
        report = run_job(job).report
    each_s = report.samples_per_s / devices
    return {"samples_per_s_each": each_s, **{n: getattr(report, n) for n in SHOWN}}


def _sides(counts: list[int]) -> dict[str, Side]:
    strategies = {count: ("ddp", "fsdp") if count > 1 else ("ddp",) for count in counts}
    return {
        f"{count} devices, {strategy}": partial(flatout, count, strategy)
        for count in counts
        for strategy in strategies[count]
    }


def _script(counts: list[int]) -> Script:
    cases = dict.fromkeys(SHAPES, _sides(counts))
    return Script(
        "benchmarks.scaling", "rate per device", cases, figure="samples_per_s_each"
    )


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
