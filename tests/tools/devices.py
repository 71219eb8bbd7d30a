"""Training rate by number of GPUs, and what checkpoints cost.

    python -m tests.tools.devices --devices 1 2 4

BERT-base's shape on random token rows (lengths as of docstrings: median 44, mean 92,
cut at 320), trained through the same launch, loop and report as any training. `linear`
compares with the first number of devices at the same rows a device; the small global
batch is the same for all, so that each device has less and less to do.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from flatout.engine.launch.launch import run_job
from flatout.engine.parameters import parse_settings
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.train.loop import TrainResult
from flatout.engine.train.setup.job import TrainJob

logger = logging.getLogger(__name__)

VOCABULARY_SIZE, LABELS, MAX_LENGTH = 30_522, 24, 320
SHAPES: dict[str, dict[str, Any]] = {
    "bert-base": {"model_type": "bert", "vocab_size": VOCABULARY_SIZE},
    "tiny": {
        "model_type": "bert",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 128,
    },
}


@dataclass(frozen=True)
class Measured:
    """One training; rates are global, over all devices."""

    label: str
    devices: int
    global_batch_size: int
    samples_per_s: float
    tokens_per_s: float
    wall_samples_per_s: float
    """Over the wall time between the first and the last log point behind the warm-up:
    checkpoints, pauses and all."""
    step_ms_p50: float
    step_ms_p90: float
    loader_wait_pct: float
    checkpoint_s: float
    mfu_pct: float | None


def token_rows(count: int, seed: int) -> TokenRows:
    """Rows of 8 to MAX_LENGTH random tokens."""
    rng = np.random.default_rng(seed)
    lengths = np.exp(rng.normal(np.log(44), 1.2, count)).astype(np.int64)
    lengths = lengths.clip(8, MAX_LENGTH)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = rng.integers(5, VOCABULARY_SIZE, offsets[-1]).astype(np.int32)
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, ids),
        "labels": rng.integers(0, LABELS, count),
    }
    return TokenRows(pa.table(columns))


def make_job(
    options: argparse.Namespace,
    devices: int,
    batch: int,
    every: int | None,
    folder: Path,
) -> TrainJob:
    settings = parse_settings(
        {
            "model": {"config": SHAPES[options.shape]},
            "tokenize": {"max_length": MAX_LENGTH},
            "train": {
                "global_batch_size": batch,
                "token_budget": options.token_budget,
                "epochs": 10_000,
                "max_steps": options.steps,
                "log_every": options.log_every,
                "compile": torch.cuda.device_count() > 0,  # few steps are not, on auto
                "evaluate_every": None,
                "error_analysis_every": None,
                "resume": "never",
                "checkpoint": {"every_steps": every, "every_minutes": None},
                "distributed": {
                    "num_processes": devices,
                    "strategy": options.strategy,
                    "bucket_mib": options.bucket_mib,
                },
            },
        }
    )
    return TrainJob(
        settings=settings,
        train=token_rows(options.rows, 0),
        validation=token_rows(256, 1),
        test=token_rows(256, 2),
        vocabulary=Vocabulary(VOCABULARY_SIZE, 0, None, (0, 1, 2)),
        label_names=tuple(f"label {index}" for index in range(LABELS)),
        work_folder=folder / "run",
        metrics_file=folder / "metrics.jsonl",
    )


def measure(
    options: argparse.Namespace, label: str, devices: int, batch: int, every: int | None
) -> Measured:
    with tempfile.TemporaryDirectory(prefix="flatout-devices-") as name:
        begin_s = time.monotonic()
        result = run_job(make_job(options, devices, batch, every, Path(name)))
        logger.info(
            "%s on %d: %.0f s in all", label, devices, time.monotonic() - begin_s
        )
    report = result.report
    return Measured(
        label=label,
        devices=devices,
        global_batch_size=batch,
        samples_per_s=report.samples_per_s,
        tokens_per_s=report.tokens_per_s,
        wall_samples_per_s=_wall_rate(result, batch),
        step_ms_p50=report.step_ms_p50,
        step_ms_p90=report.step_ms_p90,
        loader_wait_pct=report.loader_wait_pct,
        checkpoint_s=report.checkpoint_s,
        mfu_pct=report.mfu_pct,
    )


def _wall_rate(result: TrainResult, batch: int) -> float:
    """The first half is warm-up and compilation."""
    points = result.history[len(result.history) // 2 :]
    steps = points[-1].step - points[0].step
    seconds = points[-1].elapsed_s - points[0].elapsed_s
    return steps * batch / seconds if seconds else float("nan")


def measure_all(options: argparse.Namespace) -> list[Measured]:
    found = []
    for devices in options.devices:
        rows = options.rows_per_device * devices
        found.append(measure(options, "same rows a device", devices, rows, None))
    for devices in options.devices if options.small_batch else ():
        batch = options.small_batch
        found.append(measure(options, "small global batch", devices, batch, None))
    if every := options.checkpoint_every:
        devices = options.devices[0]
        rows = options.rows_per_device * devices
        label = f"checkpoint every {every}"
        found.append(measure(options, label, devices, rows, every))
    return found


def table(found: Sequence[Measured]) -> str:
    lines = [
        "| measured | devices | global batch | samples/s | wall samples/s | linear | "
        "step ms p50 / p90 | loader wait | checkpoint s | MFU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in found:
        first = next(m for m in found if m.label == row.label)
        if row.label.startswith("checkpoint"):
            first = found[0]
        ideal = first.samples_per_s * row.devices / first.devices
        mfu = "" if row.mfu_pct is None else f"{row.mfu_pct:.1f} %"
        lines.append(
            f"| {row.label} | {row.devices} | {row.global_batch_size} "
            f"| {row.samples_per_s:,.0f} | {row.wall_samples_per_s:,.0f} "
            f"| {100 * row.samples_per_s / ideal:.1f} % "
            f"| {row.step_ms_p50:.1f} / {row.step_ms_p90:.1f} "
            f"| {row.loader_wait_pct:.1f} % | {row.checkpoint_s:.2f} | {mfu} |"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="bert-base")
    parser.add_argument("--strategy", choices=["ddp", "fsdp"], default="ddp")
    parser.add_argument("--bucket-mib", default="25", help="of gradients; or `all`")
    parser.add_argument("--rows", type=int, default=200_000, help="of the data")
    parser.add_argument("--rows-per-device", type=int, default=640, help="a step")
    parser.add_argument(
        "--small-batch", type=int, default=256, help="samples; 0: not measured"
    )
    parser.add_argument("--token-budget", default="auto", help="of a micro-batch")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--log-every", type=int, default=50, help="steps of a window")
    parser.add_argument(
        "--checkpoint-every", type=int, default=100, help="steps; 0: not measured"
    )
    parser.add_argument("--out", type=Path, help="JSON file for all figures")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    found = measure_all(options)
    logger.info(table(found))
    if options.out:
        figures = json.dumps([asdict(row) for row in found], indent=1)
        options.out.write_text(figures, encoding="utf-8")


if __name__ == "__main__":
    main()
