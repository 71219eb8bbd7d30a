"""Rates of long rows, and of short ones, beside the strongest Trainers, by turns.

    python -m tests.tools.long_rows --shapes modernbert-1200 qwen3-8192 --rounds 2
    python -m tests.tools.long_rows --only flatout --profile modernbert-1200
    python -m tests.tools.long_rows --tiny --shapes modernbert-1200 qwen3-96

Rows are random tokens of real lengths; each side trains with its own loader. All
sides of a shape are warm before the first turn, one works at a time, and each gives its
memory back between two turns. `--profile` names the kernels of a step of flatout's. A
side like `trainer-best@64` has a batch of its own; `flatout-flash4` and
`trainer-flattened-flash4` attend by the package flash-attn-4, `flatout-unmarked` and
others leave out what WITHOUT says, `flatout-graphless` records no CUDA graphs and
`flatout-recorded` does.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import torch

from flatout.engine.benchmark.measuring import measure as measuring
from flatout.engine.benchmark.measuring.windows import Warm, block_steps
from flatout.engine.benchmark.peers import trainer as peers
from flatout.engine.benchmark.trials.trial_spec import Measure
from flatout.engine.machine.environment import apply
from flatout.engine.machine.runtime import Runtime, memory, set_up
from flatout.engine.models.flops import measured_tflops
from flatout.engine.parameters import parse_settings
from flatout.engine.rows.tokens import TokenRows
from flatout.engine.rows.vocabulary import Vocabulary
from flatout.engine.train.recording.summary import efficiency
from flatout.engine.train.recording.timing import Window, compile_clock
from flatout.engine.train.setup.assemble import assemble
from flatout.engine.train.setup.job import TrainJob

WITHOUT: dict[str, tuple[str, Any]] = {
    "unmarked": ("train.setup.step_data._marks_full", False),
    "unturned": ("families.modernbert.fuse_encoder", None),
    "whole": ("families.modernbert.ModernBert.narrow", False),
}
"""Parts of a side's name, what they replace in the engine, and what it gives then: full
rows by the flash kernel; ModernBERT's rotation by Inductor; all of its last layer."""
ENCODER_SIDES = ("flatout", "trainer-best", "trainer-unsorted", "trainer-best-compiled")
DECODER_SIDES = (
    *("flatout", "trainer-best", "trainer-liger", "trainer-flattened"),
    *("trainer-flattened-liger", "trainer-flattened-compiled"),
    "trainer-best-compiled",
)
MODERNBERT = {"model_type": "modernbert"}
"""transformers' defaults are the base model's sizes."""
BERT = {"model_type": "bert"}
QWEN3 = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "tie_word_embeddings": True,
}
SMALL = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"intermediate_size": 64, "num_key_value_heads": 1, "head_dim": 16}
WINDOW_S = 2.5


@dataclass(frozen=True)
class Shape:
    """A model and its rows."""

    config: dict[str, Any]
    mean: float
    """Tokens of a row, cut ones included."""
    longest: int
    batch: int
    pieces: int = 32_000
    token_budget: int | str = "auto"
    window: int = 8
    """Steps of a Trainer's window: the rows that it sorts at a time."""

    @property
    def causal(self) -> bool:
        return bool(self.config["model_type"] == "qwen3")

    @property
    def sides(self) -> tuple[str, ...]:
        return DECODER_SIDES if self.causal else ENCODER_SIDES

    def tiny(self) -> Shape:
        config = {**self.config, **SMALL}
        return replace(
            self, config=config, mean=self.mean / 32, longest=self.longest // 32,
            batch=4, pieces=200, token_budget="auto",
        )  # fmt: skip


SHAPES = {
    "modernbert-1200": Shape(MODERNBERT, 1_197, 2_048, 32, 50_368, 65_536),
    "qwen3-96": Shape(QWEN3, 97, 320, 256, token_budget=32_768),
    "qwen3-1200": Shape(QWEN3, 1_197, 2_048, 16, token_budget=32_768),
    "qwen3-8192": Shape(QWEN3, 8_192, 8_192, 4, token_budget=32_768, window=4),
    "bert-97": Shape(BERT, 97, 320, 704, 30_522, 131_072),
}


def lengths_of(shape: Shape, count: int) -> Any:
    """Lognormal ones, cut at the longest, (count,): their mean is the shape's. Blocks
    are full."""
    if shape.mean >= shape.longest:
        return np.full(count, shape.longest)
    draws = np.exp(0.7 * np.random.default_rng(1).standard_normal(count))
    low, high = 0.0, 10.0 * shape.longest
    for _ in range(60):
        middle = (low + high) / 2
        lengths = np.clip(middle * draws, 4, shape.longest).astype(int)
        low, high = (middle, high) if lengths.mean() < shape.mean else (low, middle)
    return lengths


def rows_of(shape: Shape, count: int) -> TokenRows:
    generator, lengths = np.random.default_rng(2), lengths_of(shape, count)
    ids = generator.integers(5, shape.pieces, lengths.sum()).astype(np.int32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns = {"input_ids": pa.ListArray.from_arrays(offsets, ids)}
    if not shape.causal:
        columns["labels"] = pa.array(generator.integers(0, 12, count))
    return TokenRows(pa.table(columns))


def job_of(shape: Shape, side: str, folder: Path, runtime: dict[str, Any]) -> TrainJob:
    task = "causal-lm" if shape.causal else "sequence-classification"
    settings = parse_settings(
        {
            "runtime": runtime,
            "model": {"task": task, "config": {**shape.config}},
            "tokenize": {"max_length": shape.longest},
            "train": {
                "global_batch_size": shape.batch,
                "token_budget": shape.token_budget,
                "learning_rate": 1e-4,
                "epochs": 10_000,
                "max_steps": 100_000,
                "error_analysis_every": None,
                "distributed": {"num_processes": 1},
                **_graphs_of(side),
            },
        }
    )
    few = rows_of(shape, 8)
    names = () if shape.causal else tuple("abcdefghijkl")
    vocabulary = Vocabulary(shape.pieces, 0, 4, (0, 1, 2, 3, 4))
    rows = rows_of(shape, 4 * shape.window * shape.batch)
    return TrainJob(
        settings, rows, few, few, vocabulary, names, folder / side, folder / "points"
    )


@dataclass
class Turns:
    """What a side and the one that starts them tell each other, by files."""

    folder: Path
    side: str
    taken: int = 0

    def tell(self, what: str, value: Any = None) -> None:
        file = self.folder / f"{self.side}.{what}"
        file.with_suffix(".part").write_text(json.dumps(value))
        file.with_suffix(".part").rename(file)

    def heard(self, what: str) -> bool:
        return (self.folder / f"{self.side}.{what}").exists()

    def wait(self, *names: str) -> str:
        while True:
            for name in names:
                if self.heard(name):
                    return name
            time.sleep(0.01)

    def rest(self, runtime: Runtime) -> bool:
        """Memory back, then until the next turn; False where there is none."""
        gc.collect()
        if runtime.is_cuda:
            torch.cuda.empty_cache()
        self.tell(f"rests{self.taken}")
        self.taken += 1
        return self.wait(f"turn{self.taken}", "end") != "end"


class TurnClock:
    """In place of the peers' own clock: windows come by turns."""

    turns: Turns
    window: int

    def __init__(self, runtime: Runtime, *_: Any, **__: Any) -> None:
        self.runtime = runtime
        self.steps = self.samples = 0
        self.begin = self.first_step_s = 0.0
        self.rates: list[float] = []

    def start(self) -> None:
        self.begin = time.perf_counter()

    def step_done(self, samples: int) -> bool:
        """The first window warms up; of a turn's two the last one counts."""
        self.steps, self.samples = self.steps + 1, self.samples + samples
        if self.steps == 1:
            self.runtime.synchronize()
            self.first_step_s = time.perf_counter() - self.begin
        if self.steps % self.window:
            return False
        self.runtime.synchronize()
        if self.steps // self.window % 2 == 0:
            self._begin_window()
            return False
        if self.steps > self.window:
            self._end_window()
        return not self.turns.rest(self.runtime)

    def _begin_window(self) -> None:
        self.samples, self.begin = 0, time.perf_counter()

    def _end_window(self) -> None:
        rate = self.samples / (time.perf_counter() - self.begin)
        peak = memory(self.runtime)["peak_reserved_gib"]
        found = {"samples_per_s": rate, "peak_gib": peak}
        self.turns.tell("found", found | {"first_step_s": self.first_step_s})
        self.turns.tell(f"rate{self.turns.taken}", rate)

    def figures(self) -> dict[str, Any]:
        return {}


def _graphs_of(side: str) -> dict[str, bool]:
    """As a part of its name says; empty where none does."""
    parts = side.split("-")
    if "recorded" in parts:
        return {"cuda_graphs": True}
    return {"cuda_graphs": False} if "graphless" in parts else {}


def run_trainer(
    job: TrainJob, side: str, turns: Turns, runtime: Runtime, window: int
) -> None:
    def no_judge(*_: Any) -> None:
        turns.tell("built")
        turns.wait("warm")

    TurnClock.turns, TurnClock.window = turns, window
    replaced: Any = peers
    replaced.PeerClock, replaced._judge = TurnClock, no_judge
    peers.train_with_trainer(job, runtime, side, turns.folder / side, {})


def run_flatout(job: TrainJob, turns: Turns, runtime: Runtime, profile: bool) -> None:
    measure = Measure(
        steps=8, warmup_steps=3, repeats=1,
        min_window_s=WINDOW_S if runtime.is_cuda else 0.1, max_window_s=2 * WINDOW_S,
    )  # fmt: skip
    turns.tell("built")
    turns.wait("warm")
    compile_clock.listen()
    begin = time.perf_counter()
    trainer = assemble(job, runtime)
    trainer.model.train()
    few = trainer.data.cut(np.arange(3), 0, 0)  # graphs serve all sizes
    trainer.stepper.run_eagerly(few.to(runtime.device))
    runtime.synchronize()
    first_step_s, warm = time.perf_counter() - begin, None
    while turns.rest(runtime):
        if warm is None:
            feed_of = partial(measuring.loaded_feed, trainer)
            warm = Warm.up(trainer, feed_of, measure)
            warm.shorten(block_steps(measure, warm.time_step()))
        window = clean_window(warm)
        found = {
            "samples_per_s": window.samples / window.wall_s,
            "tokens_per_s": window.tokens / window.wall_s,
            "tflops_per_s": efficiency(trainer, [window])["tflops_per_s"],
            "peak_tflops": measured_tflops(runtime, 0.1),
            "peak_gib": memory(runtime)["peak_reserved_gib"],
            "first_step_s": first_step_s,
            "compile_s": compile_clock.seconds,
            "clean": window.clean,
            "attention": trainer.resolved.attention,
            "cuda_graphs": trainer.resolved.cuda_graphs,
        }
        turns.tell("found", found)
        turns.tell(f"rate{turns.taken}", found["samples_per_s"])
    if profile and warm:
        turns.tell("profile", profiled(warm, runtime))


def clean_window(warm: Warm) -> Window:
    """Into which no compilation and no capture of a graph fell: each shape is captured
    when it comes for the second time, which would count as steps."""
    window = warm.rested_window()
    for _ in range(3):
        if window.clean:
            break
        window = warm.window()
    return window


def profiled(warm: Warm, runtime: Runtime) -> dict[str, Any]:
    """Kernels of two steps by their time."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiling

    trainer, batches = warm.driver.trainer, warm.feed.batches
    trainer.stepper.run_eagerly(next(batches))
    runtime.synchronize()
    begin = time.perf_counter()
    kinds = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * runtime.is_cuda
    with profiling(activities=kinds) as found:
        for _ in range(2):
            trainer.stepper.run_eagerly(next(batches))
        runtime.synchronize()
    wall_ms = 1e3 * (time.perf_counter() - begin) / 2
    times = {
        event.key: (event.self_device_time_total, event.count)
        for event in found.key_averages()
        if event.self_device_time_total and event.device_type.name == "CUDA"
    }
    total = sum(us for us, _ in times.values()) or 1
    ranked = sorted(times.items(), key=lambda entry: -entry[1][0])
    return {
        "wall_ms": wall_ms,
        "kernel_ms": total / 2e3,
        "kernels": [
            (key[:110], us / 2e3, count / 2, 100 * us / total)
            for key, (us, count) in ranked[:28]
        ],
    }


def run_side(asked: argparse.Namespace) -> int:
    shape, turns = shape_of(asked), Turns(Path(asked.folder), asked.side)
    settings = {"precision": "fp32", "threads": 1} if asked.tiny else {}
    if "flash4" in asked.side.split("-"):
        settings["attention"] = "flash4"
    try:
        job = job_of(shape, asked.side, turns.folder, settings)
        apply(job.settings.runtime)
        runtime = set_up(job.settings.runtime)
        leave_out(asked.side)
        if asked.side.startswith("flatout"):
            run_flatout(job, turns, runtime, bool(asked.profile))
        else:
            run_trainer(job, asked.side, turns, runtime, shape.window)
    except Exception as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}".split("\n")[0][:200]
        turns.tell("failed", text)
        return 1
    return 0


def leave_out(side: str) -> None:
    for part in set(side.split("-")) & WITHOUT.keys():
        name, result = WITHOUT[part]
        replaced = patch(f"flatout.engine.{name}", lambda *_, given=result: given)
        replaced.start()


def shape_of(asked: argparse.Namespace) -> Shape:
    (name,) = asked.shapes
    shape = SHAPES[name]
    if asked.batch:
        shape = replace(shape, batch=asked.batch)
    return shape.tiny() if asked.tiny else shape


class Side:
    """A process of one side, seen from outside."""

    def __init__(self, asked: argparse.Namespace, shape: str, side: str) -> None:
        name, _, batch = side.partition("@")
        self.shape, self.label = shape, side
        self.folder = Path(asked.folder) / f"{shape}-{side}"
        self.folder.mkdir(parents=True)
        self.turns = Turns(self.folder, name)
        command = [sys.executable, "-m", "tests.tools.long_rows", "--side", name]
        command += ["--shapes", shape, "--folder", str(self.folder)]
        command += ["--batch", batch or "0"]
        command += ["--profile", shape] * (shape in asked.profile) + [
            "--tiny"
        ] * asked.tiny
        self.log = (self.folder / "log").open("w")
        self.process = subprocess.Popen(command, stdout=self.log, stderr=self.log)
        self.rates: list[float] = []
        self.profiles = side.startswith("flatout") and shape in asked.profile

    @property
    def name(self) -> str:
        return self.turns.side

    @property
    def compiles(self) -> bool:
        return self.name.startswith("flatout") or "compiled" in self.name

    def alive(self) -> bool:
        return self.process.poll() is None and not self.turns.heard("failed")

    def until(self, what: str, limit_s: float) -> bool:
        """Whether it told it in time."""
        end = time.monotonic() + limit_s
        while self.alive() and time.monotonic() < end:
            if self.turns.heard(what):
                return True
            time.sleep(0.02)
        return self.turns.heard(what)

    def take_turn(self, number: int) -> None:
        self.turns.tell(f"turn{number}")
        if self.until(f"rests{number}", 60):
            self.rates.append(self._read(f"rate{number}"))
        report = self.report()
        rate, fault = self.rates[-1:], report["failed"] or ""
        say(f"{self.shape} {self.label} turn {number}: {rate} {of_peak(report)}{fault}")

    def _read(self, what: str) -> Any:
        file = self.folder / f"{self.name}.{what}"
        return json.loads(file.read_text()) if file.exists() else None

    def end(self, wait_s: float = 20) -> None:
        self.turns.tell("end")
        self.until("profile" if self.profiles else "gone", wait_s)
        self.process.kill()

    def report(self) -> dict[str, Any]:
        found = self._read("found") or {}
        return {
            **found,
            "shape": self.shape,
            "side": self.label,
            "rates": self.rates,
            "failed": self._read("failed"),
            "profile": self._read("profile"),
        }


BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:.0f} s] {text}", flush=True)  # noqa: T201


def warm_up(sides: list[Side], asked: argparse.Namespace) -> None:
    """Those that compile, side by side, on few rows or with few of them."""
    for side in sides:
        side.until("built", 90)
    compiling = [side for side in sides if side.compiles]
    for side in compiling:
        side.turns.tell("warm")
    end = time.monotonic() + asked.warm
    for side in compiling:
        is_warm = side.until("rests0", max(0.0, end - time.monotonic()))
        say(f"{side.shape} {side.label}: {'warm' if is_warm else 'not warm in time'}")


def meet(sides: list[Side], rounds: int) -> None:
    """The sides of one shape: the others warm too, then all by turns."""
    for side in sides:
        if not side.compiles:
            side.turns.tell("warm")
            side.until("rests0", 60)
    ready = [side for side in sides if side.alive() and side.turns.heard("rests0")]
    for number in range(1, rounds + 1):
        for side in ready:
            side.take_turn(number)
    resting = [side for side in sides if not side.profiles]
    for side in resting:
        side.turns.tell("end")
    for side in resting:
        side.end(0.5)
    reports = [side.report() for side in sides]
    trainers = [r for r in reports if r["side"].startswith("trainer")]
    best = max((x for r in trainers for x in r["rates"] if x), default=None)
    for report in reports:
        print(shown(report, best), flush=True)  # noqa: T201


def of_peak(report: dict[str, Any]) -> str:
    """TFLOP/s of the model, and of a plain product; of flatout alone."""
    flops, peak = report.get("tflops_per_s"), report.get("peak_tflops")
    return f"{flops:.0f} of {peak:.0f}: {flops / peak:.1%}" if flops and peak else ""


def shown(report: dict[str, Any], best: float | None) -> str:
    rates = [rate for rate in report["rates"] if rate]
    if not rates:
        return f"| {report['shape']} | {report['side']} | {report['failed']} |"
    middle = sorted(rates)[(len(rates) - 1) // 2]
    parts = [report["shape"], report["side"], ", ".join(f"{r:,.1f}" for r in rates)]
    parts.append(f"{middle / best:.2f}" if best else "")
    parts.append(of_peak(report))
    parts.append(f"{report['peak_gib']:.0f} GiB, first {report['first_step_s']:.0f} s")
    chosen = "attention", "cuda_graphs", "clean"
    parts += [f"{name} {report[name]}" for name in chosen if name in report]
    return f"| {' | '.join(parts)} |"


def profile_text(report: dict[str, Any]) -> str:
    found = report["profile"]
    head = f"{report['shape']} {report['side']}: {found['wall_ms']:.1f} ms a step, "
    lines = [head + f"kernels {found['kernel_ms']:.1f}"]
    for name, ms, count, share in found["kernels"]:
        lines.append(f"  {share:5.1f} % {ms:8.2f} ms {count:6.0f} x {name}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=[*SHAPES])
    parser.add_argument("--only", nargs="+", help="sides, as trainer-best@64")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--profile", nargs="*", default=[], help="of these shapes")
    parser.add_argument("--warm", type=float, default=100, help="seconds at most")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--folder", help="for logs; else a temporary one")
    asked = parser.parse_args()
    if asked.side:
        return run_side(asked)
    asked.folder = asked.folder or tempfile.mkdtemp(prefix="flatout-long-rows-")
    sides = {name: sides_of(asked, name) for name in asked.shapes}
    every = [side for own in sides.values() for side in own]
    try:
        warm_up(every, asked)
        for own in sides.values():
            meet(own, asked.rounds)
        for side in (side for side in every if side.profiles):
            side.end()
            if side.report()["profile"]:
                print(profile_text(side.report()), flush=True)  # noqa: T201
    finally:
        for side in every:
            side.process.kill()
    return 0


def sides_of(asked: argparse.Namespace, shape: str) -> list[Side]:
    """`--only flatout qwen3-96:trainer-liger`: sides of all shapes, and of one."""
    wanted = asked.only or SHAPES[shape].sides
    named = [side.rpartition(":") for side in wanted]
    return [Side(asked, shape, side) for own, _, side in named if own in ("", shape)]


if __name__ == "__main__":
    raise SystemExit(main())
