"""What `reproducible` gives and costs, and what bf16 saves, on one GPU.

    python -m tests.tools.reproducible_cost
    python -m tests.tools.reproducible_cost --compile yes
    python -m tests.tools.reproducible_cost --rehearse           # tiny, on CPU cores

Trainings of one job, each in a process of its own, by turns: with the defaults, with
conf/reproducible twice, with the defaults again, and in fp32. A digest is of the bytes
of the last model's weights. `--compile yes` gives each run a compile cache of its own,
so that nothing is the same because it was kept.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml

from flatout.engine.families import families
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.environment import apply
from tests.tools.card_memory import Shape, encoder, in_small, job_of

logger = logging.getLogger(__name__)

SHAPE = Shape(encoder(768, 12), max_length=192, batch=128)
ORDER = ("default", "reproducible", "reproducible", "default", "fp32")
RUNTIMES: dict[str, dict[str, Any]] = {
    "default": {},
    "reproducible": yaml.safe_load(
        Path("conf/reproducible/parameters.yml").read_text()
    )["runtime"],
    "fp32": {"precision": "fp32"},
}


def work(kind: str, folder: Path, given: argparse.Namespace) -> None:
    """One training; its figures as a file."""
    logging.disable(logging.WARNING)
    if given.compile == "yes":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    shape = in_small(SHAPE) if given.rehearse else SHAPE
    train = {
        "max_steps": 6 if given.rehearse else given.steps,
        "epochs": 1000,
        "log_every": 2 if given.rehearse else 10,
        "learning_rate": 1e-4,
        "evaluate_every": None,
        "error_analysis_every": None,
        "resume": "never",
        "compile": given.compile == "yes",
        "cuda_graphs": False,
    }
    job = job_of(shape, folder, RUNTIMES[kind], train)
    apply(job.settings.runtime)
    result = run_job(job)
    digest = hashlib.blake2s(digest_size=6)
    for file in sorted(result.last_model_folder.glob("*.safetensors")):
        digest.update(file.read_bytes())
    report = result.report
    figures = {
        "samples_per_s": report.samples_per_s,
        "allocated": report.peak_allocated_gib,
        "reserved": report.peak_reserved_gib,
        "loss": report.final_loss,
        "digest": digest.hexdigest(),
        "precision": report.precision,
    }
    (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


def run(kind: str, given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="reproducible-") as name:
        folder = Path(name)
        context = multiprocessing.get_context(given.start)
        process = context.Process(target=work, args=(kind, folder, given))
        process.start()
        process.join(given.timeout_s)
        if process.is_alive():
            process.kill()
            process.join()
        file = folder / "figures.json"
        return json.loads(file.read_text()) if file.exists() else {}


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", choices=["yes", "no"], default="no")
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--timeout-s", type=float, default=60)
    parser.add_argument("--order", nargs="*", default=ORDER, choices=RUNTIMES)
    parser.add_argument("--start", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args()


def main() -> int:
    given = parsed()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    families()
    logger.info(
        "| run | precision | samples/s | allocated GiB | reserved GiB | last loss "
        "| weights |"
    )
    logger.info("|---|---|---|---|---|---|---|")
    for kind in given.order:
        found = run(kind, given)
        if not found:
            logger.info(f"| {kind} | failed | | | | | |")
            continue
        logger.info(
            f"| {kind} | {found['precision']} | {found['samples_per_s']:,.0f} "
            f"| {found['allocated']:.2f} | {found['reserved']:.2f} "
            f"| {found['loss']:.6f} | {found['digest']} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
