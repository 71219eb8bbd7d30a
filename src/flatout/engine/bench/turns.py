"""Two configurations by turns: a window of the one, a window of the other.

A host's speed moves by a third within minutes; windows side by side move together, and
their ratio stays. Each has a process of its own, because TF32, cuDNN's choice and
SDPA's kernels are switches of a process.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from flatout.engine.bench.trial_spec import TrialSpec
from flatout.engine.bench.trials import environment
from flatout.engine.bench.utilisation import GpuSampler
from flatout.engine.bench.windows import (
    SPREAD_LIMIT_PCT,
    Warm,
    block_steps,
    rate,
    spread_of,
)
from flatout.engine.settings import parse_settings
from flatout.engine.timing import Window

MODULE = "flatout.engine.bench.neighbour"
ENDS_WITHIN_S = 10.0


class NeighbourError(RuntimeError):
    """What stands below gave no window."""


@dataclass(frozen=True)
class Turn:
    """A window, and the rate of what stands below, one after the other."""

    window: Window
    below_samples_per_s: float
    clean: bool
    """No compilation fell into either."""

    @property
    def times(self) -> float:
        return rate(self.window) / self.below_samples_per_s


@dataclass
class Neighbour:
    """What stands below, in a process of its own: it takes a window when told to."""

    process: subprocess.Popen[str]

    @property
    def asks(self) -> IO[str]:
        return cast("IO[str]", self.process.stdin)

    @property
    def answers(self) -> IO[str]:
        return cast("IO[str]", self.process.stdout)

    @classmethod
    @contextmanager
    def of(cls, spec: TrialSpec, folder: Path) -> Iterator[Neighbour | None]:
        """Started at once, so that it loads while this process does; it has ended when
        the block ends. None where the spec names nothing below."""
        if "below" not in spec.options:
            yield None
            return
        neighbour = cls(_start(spec, folder))
        try:
            yield neighbour
        finally:
            neighbour.end()

    def ask(self, what: str, **more: Any) -> Mapping[str, Any]:
        """Its answer to `warm`, `time`, `shorten` or `window`, as in `neighbour.py`.
        Raises NeighbourError."""
        with suppress(BrokenPipeError):  # it has ended: no answer says so
            self.asks.write(json.dumps({"ask": what, **more}) + "\n")
            self.asks.flush()
        try:
            answer: Mapping[str, Any] = json.loads(self.answers.readline())
        except ValueError:  # nothing, or half a line
            status = self._status()
            text = f"what stands below ended with status {status}: see this trial's log"
            raise NeighbourError(text) from None
        return answer

    def end(self) -> None:
        """It ends where there is nothing more to read; its workers end with it."""
        with suppress(BrokenPipeError):
            self.asks.close()
        self._status()
        self.answers.close()

    def _status(self) -> int:
        """Of its end, which is due."""
        try:
            return self.process.wait(ENDS_WITHIN_S)
        except subprocess.TimeoutExpired:  # it loads, or hangs
            self.process.kill()
            return self.process.wait()


def _start(spec: TrialSpec, folder: Path) -> subprocess.Popen[str]:
    """With the data of the trial in `folder`, and a folder of its own in that one."""
    below = replace(spec, settings=parse_settings(spec.options["below"]), options={})
    stored = json.loads((folder / "spec.json").read_text())
    own = folder / "below"
    own.mkdir(exist_ok=True)
    asked = {**stored, "spec": below.as_json()}
    (own / "spec.json").write_text(json.dumps(asked, indent=1))
    return subprocess.Popen(
        [sys.executable, "-m", MODULE, str(own), str(os.getpid())],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(below, {}),
    )


def in_turn(warm: Warm, neighbour: Neighbour, sampler: GpuSampler) -> list[Turn]:
    """At least `repeats` turns; where their ratios are not together, up to twice as
    many and one more. Who begins alternates, so that a host that slows favours none."""
    _same_blocks(warm, neighbour)
    turns: list[Turn] = []
    for number in range(2 * warm.measure.repeats + 1):
        turns.append(_turn(warm, neighbour, sampler, first=number % 2 == 0))
        clean = [turn for turn in turns if turn.clean]
        if len(clean) < warm.measure.repeats:
            continue
        if spread_of([turn.times for turn in clean]) <= SPREAD_LIMIT_PCT:
            break
    return clean or turns


def middle_half_pct(times: list[float]) -> float:
    """How far the middle half of the ratios lies apart, over their median: a host that
    stands still for a moment spoils a turn, not the median."""
    low, middle, high = np.percentile(times, [25, 50, 75])
    return float(100 * (high - low) / middle)


def _same_blocks(warm: Warm, neighbour: Neighbour) -> None:
    """The same rows on both sides: what fits the slower one's windows. Each is timed
    while the other rests."""
    neighbour.ask("warm")
    slower_s = max(warm.time_step(), neighbour.ask("time")["step_s"])
    steps = block_steps(warm.measure, slower_s)
    warm.shorten(steps)
    neighbour.ask("shorten", steps=steps)


def _turn(
    warm: Warm, neighbour: Neighbour, sampler: GpuSampler, *, first: bool
) -> Turn:
    below = None if first else neighbour.ask("window")
    warm.lead_in()
    sampler.counts = True
    window = warm.window()
    sampler.counts = False
    below = below or neighbour.ask("window")
    clean = window.clean and below["clean"]
    return Turn(window, below["samples_per_s"], clean)
