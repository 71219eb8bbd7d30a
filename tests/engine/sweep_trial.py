"""A training run simulated by a formula: `python -m tests.engine.sweep_trial
FOLDER`."""

import os
import sys
import time
from pathlib import Path

from flatout.engine.benchmark.trials.trial import serve


def run(spec, open_job, folder):
    train = spec.settings.train
    with (folder.parent / "ran").open("a") as file:
        file.write(f"{train.learning_rate} {os.environ.get('CUDA_VISIBLE_DEVICES')}\n")
    held = folder.parent / "hold"
    most = int(held.read_text()) if held.exists() else 0
    while held.exists() and _begun(folder) > most:
        time.sleep(0.02)
    if train.global_batch_size == 19:
        time.sleep(600)
    if train.global_batch_size == 13:
        raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")
    if train.global_batch_size == 17:
        raise ValueError("seventeen")
    return {
        "validation_loss": abs(train.learning_rate - 0.01),
        "validation_accuracy": train.learning_rate,
        "test_loss": 0.5,
        "samples_per_s": float(train.global_batch_size),
    }


def _begun(folder: Path) -> int:
    return len((folder.parent / "ran").read_text().splitlines())


if __name__ == "__main__":
    raise SystemExit(serve(Path(sys.argv[1]), run))
