"""What tracking takes from a training: processor time, which does not depend on luck.

    python -m tests.tools.tracking_cost --seconds=120

A SQLite store on the disk, the metrics file, the outbox and the thread that sends, as
`kedro run` has them, with points as often as training writes them. The main thread
does nothing else, so what the process uses is tracking's. Opening the store is apart:
it is over before training begins. Training on all cores may wait for the whole of it,
so the share of one core is the most that it can lose.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
from pathlib import Path

from mlflow import MlflowClient

from flatout.engine.train.recording.metrics_file import MetricsFile
from flatout.tracking import Forwarder, Outbox
from flatout.tracking.outbox import RunRecord

logger = logging.getLogger(__name__)

METRICS = (
    "train_loss",
    "learning_rate",
    "grad_norm",
    "train_samples_per_second",
    "train_tokens_per_second",
    "train_padded_tokens_per_second",
    "padding_pct",
    "loader_wait_pct",
    "step_ms_p50",
    "step_ms_p90",
    "peak_reserved_gib",
    "epoch",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--points-per-s", type=float, default=1.0)
    options = parser.parse_args()
    logging.basicConfig(level="WARNING", format="%(message)s")
    logger.setLevel("INFO")
    with tempfile.TemporaryDirectory() as folder:
        measure(Path(folder), options.seconds, options.points_per_s)


def measure(folder: Path, seconds: float, points_per_s: float) -> float:
    """Print and return the share of one core, in %."""
    uri = f"sqlite:///{folder}/mlflow.db"
    file = MetricsFile(folder / "train_metrics.jsonl")
    outbox = Outbox(file.path, RunRecord(uri, "flatout", "cost", str(folder)))
    forwarder = Forwarder(outbox, lambda: MlflowClient(uri), system_metrics=True)
    opening_s = _processor_s()
    file.start(0)
    forwarder.start()
    forwarder.wait_until_tried(60.0)
    opening_s = _processor_s() - opening_s
    used_s, wall_s = _processor_s(), time.perf_counter()
    points = _write_points(file, seconds, points_per_s)
    used_s, wall_s = _processor_s() - used_s, time.perf_counter() - wall_s
    forwarder.finish("FINISHED", int(time.time() * 1000))
    share_pct = 100 * used_s / wall_s
    logger.info(
        "%d points of %d metrics in %.0f s: %.3f s of processor time, %.2f %% of one "
        "core; opening the store before that: %.1f s",
        points,
        len(METRICS),
        wall_s,
        used_s,
        share_pct,
        opening_s,
    )
    return share_pct


def _write_points(file: MetricsFile, seconds: float, points_per_s: float) -> int:
    end, step = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        step += 1
        file.write(step, {name: float(step) for name in METRICS})
        time.sleep(1 / points_per_s)
    return step


def _processor_s() -> float:
    """User and system time of all threads of this process."""
    return time.process_time()


if __name__ == "__main__":
    main()
