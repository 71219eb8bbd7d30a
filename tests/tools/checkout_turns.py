# ruff: noqa: T201
"""Training rates of this checkout and of another by turns, in warm processes.

    python -m tests.tools.checkout_turns --against ../before
    python -m tests.tools.checkout_turns --shapes small-16 --pairs 10 \\
        --against ../before
    python -m tests.tools.checkout_turns --against ../before --shapes tiny --pairs 2

A process of each checkout trains the same rows; both are warm before the first window.
Windows alternate (A B B A), so that a machine that slows favours neither. Shapes named
together with a comma compile at the same time: `bert-16,bert-256`. Rows are random
tokens of real lengths; budgets are given, as what is free depends on the others. The
interval is of the pairs' mean ratio (Student's t, 90 %).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import sqrt
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import numpy as np

HERE = Path(__file__).parents[2]
DEFAULT = ("bert-16,bert-256,bert-704", "qwen3-256")
BERT = {"model_type": "bert"}
"""transformers' defaults are the base model's sizes."""
SMALL = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
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


@dataclass(frozen=True)
class Shape:
    """A model and a global batch of its rows."""

    config: dict[str, Any]
    batch: int
    token_budget: int = 65_536
    causal: bool = False
    steps: int = 20
    """Of a block: every window goes over the same rows."""
    compiled: bool = True


SHAPES = {
    "bert-16": Shape(BERT, 16, steps=200),
    "bert-256": Shape(BERT, 256, steps=40),
    "bert-704": Shape(BERT, 704),
    # Both sides have to fit: with 32,768 tokens each takes over half of an H200.
    "qwen3-256": Shape(QWEN3, 256, 24_576, causal=True, steps=10),
    "small-16": Shape(
        {**BERT, **SMALL, "intermediate_size": 512}, 16, 8_192, compiled=False
    ),
    "tiny": Shape(
        {**BERT, **SMALL, "intermediate_size": 64}, 4, 2_048, steps=4, compiled=False
    ),
}


def rows_of(shape: Shape) -> Any:
    """Lengths as docstrings have them: 97 tokens on average, at most 320."""
    from pyarrow import ListArray, array, table

    from flatout.engine.rows.tokens import TokenRows

    chance, count = np.random.default_rng(2), 4 * shape.steps * shape.batch
    lengths = np.clip(85 * np.exp(0.7 * chance.standard_normal(count)), 4, 320)
    offsets = np.concatenate([[0], np.cumsum(lengths.astype(int))]).astype(np.int32)
    ids = chance.integers(5, 30_000, offsets[-1]).astype(np.int32)
    columns = {"input_ids": ListArray.from_arrays(offsets, ids)}
    if not shape.causal:
        columns["labels"] = array(chance.integers(0, 12, count))
    return TokenRows(table(columns))


def settings_of(shape: Shape) -> Any:
    """Whole settings; imports no torch."""
    from flatout.engine.parameters import parse_settings

    task = "causal-lm" if shape.causal else "sequence-classification"
    train = {
        "global_batch_size": shape.batch,
        "token_budget": shape.token_budget,
        "learning_rate": 1e-4,
        "epochs": 10_000,
        "max_steps": 100_000,
        "error_analysis_every": None,
        "compile": shape.compiled,
        "distributed": {"num_processes": 1},
    }
    model = {"task": task, "config": dict(shape.config)}
    return parse_settings(
        {"model": model, "tokenize": {"max_length": 320}, "train": train}
    )


def job_of(shape: Shape, settings: Any, folder: Path) -> Any:
    from flatout.engine.rows.vocabulary import Vocabulary
    from flatout.engine.train.setup.job import TrainJob

    rows, vocabulary = rows_of(shape), Vocabulary(30_522, 0, 4, (0, 1, 2, 3, 4))
    names = () if shape.causal else tuple("abcdefghijkl")
    places = folder / "run", folder / "points"
    return TrainJob(settings, rows, rows, rows, vocabulary, names, *places, "k")


def side(name: str, window_s: float, connection: Connection) -> None:
    """Of the checkout that PYTHONPATH names: takes windows until none is asked for."""
    from flatout.engine.machine.environment import apply

    settings = settings_of(SHAPES[name])
    apply(settings.runtime)  # before torch is imported
    from flatout.engine.benchmark.measuring import measure
    from flatout.engine.benchmark.measuring.windows import block_steps
    from flatout.engine.benchmark.trials.trial_spec import Measure
    from flatout.engine.machine.runtime import set_up

    asked = Measure(SHAPES[name].steps, 3, 1, window_s, 2 * window_s)
    with tempfile.TemporaryDirectory() as folder:
        job = job_of(SHAPES[name], settings, Path(folder))
        runtime = set_up(settings.runtime)
        warm = measure.warm_training(job, asked, measure.loaded_feed, runtime, None)
        resolved = warm.driver.trainer.resolved
        connection.send((warm.first_step_s, f"{resolved}"))
        connection.recv()
        connection.send(block_steps(asked, warm.time_step()))
        warm.shorten(connection.recv())
        while connection.recv():
            window = warm.rested_window()
            connection.send((window.samples / window.wall_s, window.clean))


@dataclass
class Side:
    """A process of one checkout, seen from outside."""

    connection: Connection
    process: subprocess.Popen[bytes]

    @classmethod
    def start(cls, checkout: Path, name: str, window_s: float) -> Side:
        ours, theirs = Pipe()
        places = [f"{checkout / 'src'}", os.environ.get("PYTHONPATH", "")]
        command = [sys.executable, __file__, "--side", name, f"{theirs.fileno()}"]
        process = subprocess.Popen(
            [*command, "--window-s", f"{window_s}"],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
            pass_fds=[theirs.fileno()],
        )
        theirs.close()
        return cls(ours, process)

    def ask(self, value: Any) -> Any:
        self.connection.send(value)
        return self.connection.recv()

    def end(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.wait()


BEGAN = time.monotonic()


def say(text: str) -> None:
    print(f"[{time.monotonic() - BEGAN:.0f} s] {text}", flush=True)


def by_turns(name: str, sides: Sequence[Side], pairs: int) -> None:
    """Both are warm. Prints a line a pair, and what they come to."""
    steps = min(one.ask(True) for one in sides)
    for one in sides:
        one.connection.send(steps)
    found: list[tuple[float, float]] = []
    for number in range(pairs):
        turn = sides if number % 2 == 0 else sides[::-1]
        rates = [one.ask(True) for one in turn]
        (mine, clean), (other, also) = rates if number % 2 == 0 else rates[::-1]
        found.append((mine, other))
        note = "" if clean and also else ", compiled within"
        say(f"{name} {number + 1}: {mine:,.1f} {other:,.1f} {mine / other:.3f}{note}")
    say(f"{name}: {summary(found)}")


def summary(found: Sequence[tuple[float, float]]) -> str:
    from scipy.stats import t

    ratios = [mine / other for mine, other in found]
    medians = [median(rates) for rates in zip(*found, strict=True)]
    text = f"medians {medians[0]:,.1f} {medians[1]:,.1f} samples/s"
    text += f", ratios' median {median(ratios):.3f}, mean {mean(ratios):.3f}"
    if len(ratios) < 3:
        return text
    half = t.ppf(0.95, len(ratios) - 1) * stdev(ratios) / sqrt(len(ratios))
    return f"{text} ({mean(ratios) - half:.3f} to {mean(ratios) + half:.3f})"


def measured(names: Sequence[str], given: argparse.Namespace) -> bool:
    """Of shapes that compile at the same time; windows are taken one at a time. Whether
    all came to their end."""
    checkouts = (HERE, given.against.resolve())
    started = {
        name: [Side.start(place, name, given.window_s) for place in checkouts]
        for name in names
    }
    try:
        warm = [name for name in started if _tried(name, tell_when_warm, started)]
        done = [name for name in warm if _tried(name, by_turns, started, given.pairs)]
        return len(done) == len(names)
    finally:
        for sides in started.values():
            for one in sides:
                one.end()


def tell_when_warm(name: str, sides: Sequence[Side]) -> None:
    for one, which in zip(sides, ("this", "other"), strict=True):
        first_step_s, resolved = one.connection.recv()
        say(f"{name}, {which}: warm, first step {first_step_s:.0f} s, {resolved}")


def _tried(
    name: str, work: Callable[..., None], started: dict[str, list[Side]], *more: Any
) -> bool:
    """A shape that fails, as for want of memory, leaves the others be."""
    try:
        work(name, started[name], *more)
    except (EOFError, OSError) as error:
        say(f"{name}: a side ended before its time ({type(error).__name__})")
        for one in started[name]:
            one.end()
        return False
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--against", type=Path, help="another checkout")
    parser.add_argument("--shapes", nargs="+", default=DEFAULT)
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--window-s", type=float, default=1.5)
    parser.add_argument("--side", nargs=2, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        side(given.side[0], given.window_s, Connection(int(given.side[1])))
        return 0
    done = [measured(names.split(","), given) for names in given.shapes]
    return 0 if all(done) else 1


if __name__ == "__main__":
    raise SystemExit(main())
