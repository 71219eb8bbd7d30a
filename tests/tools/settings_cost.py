"""What settings that have no rung of the ladder give and cost, by turns.

    python -m tests.tools.settings_cost                      # on one GPU
    python -m tests.tools.settings_cost --compile yes --order default reproducible
    python -m tests.tools.settings_cost --shape small --windows 9 \\
        --order checkpointing third                          # on CPU cores
    python -m tests.tools.settings_cost --shape tiny         # a rehearsal

Trainings of one job, each in a process of its own, in rounds that go back and forth:
conf/reproducible, fp32, gradient checkpointing, a third of the token budget, the
allocator without growing segments, one thread, and the variables that libraries have by
themselves. A digest is of the bytes of the last model's weights. `--compile yes` gives
each run a compile cache of its own, so that nothing is the same because it was kept.
`--windows N` takes N windows of each setting and of the defaults by turns instead, both
in warm processes: for a machine whose speed wanders.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import math
import multiprocessing
import os
import sys
import tempfile
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from flatout.engine.benchmark.pairs import Pairs
from flatout.engine.benchmark.runner import Bench
from flatout.engine.benchmark.trials.trial_spec import with_changes
from flatout.engine.families import families
from flatout.engine.launch.job_files import JobFiles
from flatout.engine.launch.launch import run_job
from flatout.engine.machine.environment import apply
from flatout.engine.parameters.common import by_path
from flatout.engine.train.setup.job import TrainJob
from tests.tools.card_memory import Shape, encoder, in_small, job_of

logger = logging.getLogger(__name__)

SHAPES = {
    "base": Shape(encoder(768, 12), max_length=192, batch=128),
    "small": Shape(encoder(128, 2), max_length=192, batch=64),
}
SHAPES["tiny"] = in_small(SHAPES["base"])
STEPS = {"base": (80, 10), "small": (60, 10), "tiny": (6, 2)}
"""Of a training, and between two log points."""


@dataclass(frozen=True)
class Setting:
    """What differs from the defaults."""

    runtime: dict[str, Any] = field(default_factory=dict)
    train: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)
    budget_share: float | None = None
    """Of a global batch of longest rows."""


LIBRARIES_OWN = {
    "MKL_SERVICE_FORCE_INTEL": "0",
    "MKL_THREADING_LAYER": "INTEL",
    "TOKENIZERS_PARALLELISM": "true",
    "GOMP_SPINCOUNT": "300000",
}
"""What MKL, tokenizers and OpenMP do where `runtime.environment` sets nothing."""
SETTINGS = {
    "default": Setting(),
    "reproducible": Setting(
        yaml.safe_load(Path("conf/reproducible/parameters.yml").read_text())["runtime"]
    ),
    "fp32": Setting({"precision": "fp32"}),
    "checkpointing": Setting(train={"gradient_checkpointing": True}),
    "third": Setting(budget_share=1 / 3),
    "segments": Setting(
        environment={"PYTORCH_ALLOC_CONF": "expandable_segments:False"}
    ),
    "thread": Setting({"threads": 1}),
    "variables": Setting({"environment": LIBRARIES_OWN}),
}


def job(kind: str, folder: Path, given: argparse.Namespace) -> TrainJob:
    """Of one setting."""
    shape, setting = SHAPES[given.shape], SETTINGS[kind]
    steps, log_every = STEPS[given.shape]
    train = {
        "max_steps": given.steps or steps,
        "epochs": 1000,
        "log_every": log_every,
        "learning_rate": 1e-4,
        "evaluate_every": None,
        "error_analysis_every": None,
        "resume": "never",
        "compile": given.compile == "yes",
        "cuda_graphs": False,
        **setting.train,
    }
    if setting.budget_share:
        whole = shape.batch * shape.max_length
        train["token_budget"] = round(setting.budget_share * whole)
    runtime = {
        **setting.runtime,
        **({"threads": given.threads} if given.threads else {}),
    }
    return job_of(shape, folder, runtime, train)


def by_turns(given: argparse.Namespace, folder: Path) -> None:
    """A line a setting: its rate over that of the defaults."""
    base = job("default", folder, given)
    splits = {"train": base.train, "validation": base.validation, "test": base.test}
    names, rows = list(base.label_names), folder / "rows"
    files = JobFiles.of(splits, base.vocabulary, names, rows)
    settings = with_changes(base.settings, {"benchmark.repeats": given.windows})
    bench = Bench(settings, files, folder / "trials")
    bench.start()
    pairs = Pairs(bench)
    for number, kind in enumerate(given.order):
        asked = job(kind, folder, given).settings.model_dump(mode="json")
        changes = {
            path: value
            for path, value in by_path({n: asked[n] for n in ("runtime", "train")})
            if value != dict(by_path(base.settings.model_dump(mode="json")))[path]
        }
        trial, ratio = pairs.beside(number, kind, changes, {})
        told = f"{kind}: {ratio or math.nan:.3f} of the default's rate"
        logger.info(f"{told}, {trial.reserved_memory_gib} GiB; {trial.note}")


def work(kind: str, folder: Path, given: argparse.Namespace) -> None:
    """One training; its figures as a file."""
    logging.disable(logging.WARNING)
    if given.compile == "yes":
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    asked = job(kind, folder, given)
    os.environ |= SETTINGS[kind].environment
    apply(asked.settings.runtime)
    result = run_job(asked)
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
        "device": report.device,
    }
    (folder / "figures.json").write_text(json.dumps(figures), encoding="utf-8")


def run(kind: str, given: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="settings-") as name:
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
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--compile", choices=["yes", "no"], default="no")
    parser.add_argument("--shape", choices=SHAPES, default="base")
    parser.add_argument("--steps", type=int, help="of a training")
    parser.add_argument("--timeout-s", type=float, default=60)
    parser.add_argument("--order", nargs="*", default=[*SETTINGS], choices=SETTINGS)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--windows", type=int, default=0)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--start", choices=["fork", "spawn"], default="fork")
    return parser.parse_args()


def main() -> int:
    given = parsed()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    families()
    if given.windows:
        with tempfile.TemporaryDirectory(prefix="settings-") as name:
            by_turns(given, Path(name))
        return 0
    logger.info(
        "| run | precision | samples/s | allocated GiB | reserved GiB | last loss "
        "| weights |"
    )
    logger.info("|---|---|---|---|---|---|---|")
    rates: dict[str, list[float]] = defaultdict(list)
    for number in range(given.rounds):
        for kind in given.order if number % 2 == 0 else reversed(given.order):
            found = run(kind, given)
            if not found:
                logger.info(f"| {kind} | failed | | | | | |")
                continue
            rates[kind].append(found["samples_per_s"])
            logger.info(line(kind, found))
    for kind, found in rates.items():
        share = median(found) / median(rates["default"]) if rates["default"] else 1
        logger.info(f"{kind}: {share:.2f} of the default's rate (medians)")
    return 0


def line(kind: str, found: dict[str, Any]) -> str:
    return (
        f"| {kind} | {found['precision']} | {found['samples_per_s']:,.0f} "
        f"| {found['allocated']:.2f} | {found['reserved']:.2f} "
        f"| {found['loss']:.6f} | {found['digest']} |"
    )


if __name__ == "__main__":
    sys.exit(main())
