# ruff: noqa: T201
"""Does `kedro run --env=tuned` come to what mode tune has promised?

    python -m tests.tools.tuned_promises --tunes=10  # two cores each
    python -m tests.tools.tuned_promises --device=gpu --tunes=3  # a GPU each
    python -m tests.tools.tuned_promises --tunes=1 --tiny  # a rehearsal

Every tune has its own cores or GPU, data folder and copy of conf/, and is followed by
its training there. As many go on at once as there are pairs of cores, or GPUs. Token
rows are made once. A line is printed as soon as it is known; no tune begins after
`--minutes`. Trials, logs and reports stay in `--folder`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import Queue
from statistics import median
from typing import Any

import yaml

from flatout.engine.machine.environment import gpu_names
from tests.tools.gpu_check import PROJECT, TAIL, FailedError, device_name

CORES_EACH = 2
TRAINED_IN = {"cpu": "base", "gpu": "bert_base"}
TRAINED = [
    "train.epochs=1000",
    "train.resume=never",
    "train.evaluate_every=null",
    "tracking.log_model=false",
]
"""Rates are of steps alone: what comes between and behind them would only take time."""
TINY = ["benchmark.tune_minutes=0.2", "benchmark.repeats=3"]
HEAD = (
    "tune  seconds  promised  90 % interval       ±      came  inside  with its speed"
)
Row = dict[str, Any]


@dataclass
class Place:
    """Where a tune and its training run, one after the other."""

    asked: argparse.Namespace
    cores: Sequence[int] = ()
    gpu: str = ""

    def run(
        self, folder: Path, *options: str, params: Iterable[str] = ()
    ) -> tuple[float, str]:
        """Seconds of `kedro run` with the conf and data of `folder`, and what it said.
        Raises FailedError."""
        given = [f"data_dir={folder / 'data'}", *self.asked.params, *params]
        if self.cores:
            given.append(f"runtime.threads={len(self.cores)}")
        words = [f"--conf-source={folder / 'conf'}", f"--params={','.join(given)}"]
        return self._timed([*options, *words], folder)

    def _timed(self, words: Sequence[str], folder: Path) -> tuple[float, str]:
        pinned = ["taskset", "-c", ",".join(map(str, self.cores))]
        path = f"{PROJECT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        command = [sys.executable, "-m", "kedro", "run", *words]
        begin = time.perf_counter()
        done = subprocess.run(
            [*pinned, *command] if self.cores else command,
            cwd=PROJECT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": self.gpu, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        with (folder / "log.txt").open("a") as log:
            log.write(done.stdout)
        if done.returncode:
            raise FailedError(f"{' '.join(words)}:\n{done.stdout[-TAIL:]}")
        return time.perf_counter() - begin, done.stdout


def places(asked: argparse.Namespace) -> list[Place]:
    if asked.device == "gpu":
        return [Place(asked, gpu=name) for name in gpu_names()]
    cores = sorted(os.sched_getaffinity(0))
    pairs = range(0, len(cores) - CORES_EACH + 1, CORES_EACH)
    return [Place(asked, cores=cores[n : n + CORES_EACH]) for n in pairs]


def with_tokens(place: Place) -> Path:
    """A folder with conf and token rows, which every tune copies."""
    asked, folder = place.asked, place.asked.folder / "tokens"
    _own_conf(folder, "test" if asked.tiny else TRAINED_IN[asked.device])
    place.run(folder, "--pipelines=split,tokenize")
    return folder


def measured(number: int, tokens: Path, place: Place) -> Row:
    """One tune and the training with what it found. Raises FailedError."""
    folder = tokens.with_name(f"tune_{number}")
    shutil.copytree(tokens, folder)
    took_s, _ = place.run(folder, "--pipelines=benchmark")
    trained = [f"train.max_steps={place.asked.steps}", *TRAINED]
    _, text = place.run(folder, "--env=tuned", "--pipelines=train", params=trained)
    return {"tune": number, "seconds": took_s, **_came(folder, text)}


def _own_conf(folder: Path, local: str) -> None:
    """The project's, with the settings of the environment `local` as its own."""
    conf = folder / "conf"
    leave = shutil.ignore_patterns("local", "tuned")
    shutil.copytree(PROJECT / "conf", conf, ignore=leave)
    (conf / "local").mkdir()
    for file in conf.joinpath(local).glob("*.yml") if local != "base" else ():
        if not file.name.startswith("catalog"):
            shutil.copy(file, conf / "local")


def _came(folder: Path, text: str) -> Row:
    written = (folder / "conf" / "tuned" / "parameters.yml").read_text()
    tuned = yaml.safe_load(written)["tuned"]
    reports = folder / "data" / "08_reporting"
    report = json.loads((reports / "train_report.json").read_text())
    low, high = tuned["samples_per_s_low"], tuned["samples_per_s_high"]
    came = report["samples_per_s"]
    return {
        "promised": tuned["samples_per_s"],
        "low": low,
        "high": high,
        "half_pct": 50 * (high - low) / tuned["samples_per_s"],
        "came": came,
        "inside": low <= came <= high,
        "with_speed": low <= came <= high or "but the machine itself runs at" in text,
    }


def shown(row: Row) -> str:
    interval = f"{row['low']:,.0f} to {row['high']:,.0f}"
    return (
        f"{row['tune']:4}  {row['seconds']:7.0f}  {row['promised']:8,.0f}  "
        f"{interval:>15}  {row['half_pct']:4.1f} %  {row['came']:8,.0f}  "
        f"{'yes' if row['inside'] else 'no':6}  {'yes' if row['with_speed'] else 'no'}"
    )


def summary(rows: Sequence[Row]) -> str:
    halves = [row["half_pct"] for row in rows]
    return (
        f"{sum(row['inside'] for row in rows)} of {len(rows)} inside, "
        f"{sum(row['with_speed'] for row in rows)} with the machine's own speed. "
        f"Half of the interval: {median(halves):.1f} % (median), {max(halves):.1f} % "
        f"(most). A tune: {median(row['seconds'] for row in rows):.0f} s (median)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tunes", type=int, default=10)
    parser.add_argument("--device", choices=["cpu", "gpu"], default="cpu")
    parser.add_argument("--steps", type=int, default=400, help="of each training")
    parser.add_argument("--params", type=lambda t: t.split(","), default=[])
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    asked.params += TINY if asked.tiny else []
    asked.folder = (asked.folder or Path(tempfile.mkdtemp())).absolute()
    begin, rows = time.monotonic(), []
    found = places(asked)
    print(f"{device_name()}, {asked.folder}\n{HEAD}", flush=True)
    tokens = with_tokens(found[0])
    free: Queue[Place] = Queue()
    for place in found:
        free.put(place)

    def one(number: int) -> None:
        place = free.get()
        try:
            if time.monotonic() - begin < 60 * asked.minutes:
                rows.append(measured(number, tokens, place))
                print(shown(rows[-1]), flush=True)
                written = json.dumps(rows, indent=1)
                (asked.folder / "rows.json").write_text(written)
        except FailedError as error:
            print(f"{number:4}  {error}", flush=True)
        finally:
            free.put(place)

    with ThreadPoolExecutor(len(found)) as pool:
        list(pool.map(one, range(1, asked.tunes + 1)))
    print(summary(rows) if rows else "no tune was done")


if __name__ == "__main__":
    main()
