"""Compare the speed of this run with earlier runs of the same work, and list causes.

Earlier runs are stored in a file in the data folder, one per line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median, quantiles
from typing import Literal

import xxhash

from flatout.engine.guard.differences import Difference, TrackedRun, differences
from flatout.engine.parameters import GuardSettings, Settings

STEP = "step_ms_p50"
WAIT = "cpu_wait_pct"
PROBE = "cpu_probe_ms"
BUSY_WAIT_PCT = 10.0
"""The percentage of time spent waiting for a core above which a slow run is excused."""
MIN_WINDOWS = 3
"""The minimum number of windows after the warm-up for a comparison."""

State = Literal["first", "unknown", "healthy", "busy", "fast", "slow"]


class SlowRunError(RuntimeError):
    """Raised if a run is slower than the healthy range and guard.on_slow is `fail`."""

    exit_code = 7


@dataclass(frozen=True)
class Verdict:
    """The result of a comparison. `rate_pct` and `step_pct` are the throughput and the
    step time in percent of the baseline's."""

    state: State
    text: str
    baseline: str | None = None
    """The run id of the baseline."""
    rate_pct: float | None = None
    step_pct: float | None = None
    differences: list[Difference] = field(default_factory=list)


def work_key(settings: Settings, token_key: str) -> str:
    """Return a hash of the model, the tokens and the global batch size. How they are
    executed (precision, padding, kernels, loader, devices) is what the guard compares,
    so it is not part of the hash."""
    model = settings.model.model_dump(mode="json")
    batch = settings.train.global_batch_size
    text = json.dumps([token_key, model, settings.tokenize.max_length, batch])
    return xxhash.xxh3_64_hexdigest(text.encode())


def read_runs(file: Path) -> list[TrackedRun]:
    """Read the runs in `file`, one JSON object per line. Damaged lines are skipped."""
    if not file.is_file():
        return []
    found = []
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            found.append(TrackedRun(**json.loads(line)))
        except (ValueError, TypeError):
            continue
    return found


def append_run(file: Path, run: TrackedRun) -> None:
    with file.open("a", encoding="utf-8") as lines:
        lines.write(json.dumps(asdict(run)) + "\n")


def of_same_work(runs: Sequence[TrackedRun], now: TrackedRun) -> list[TrackedRun]:
    """Return the runs with the same work and device as `now`."""
    names = ("work_key", "device")
    return [
        run for run in runs if all(run.tags.get(n) == now.tags.get(n) for n in names)
    ]


def choose_baseline(
    earlier: Sequence[TrackedRun], now: TrackedRun
) -> TrackedRun | None:
    """Return the fastest earlier run, preferably one with the same precision and number
    of ranks, because users may choose these. A run that was reported as slow is
    returned only if there is no other run."""
    rated = [run for run in earlier if run.samples_per_s]
    sound = [run for run in rated if run.tags.get("guard") != "slow"] or rated
    alike = [run for run in sound if _chosen(run) == _chosen(now)]
    return max(alike or sound, key=lambda run: run.samples_per_s or 0.0, default=None)


def _chosen(run: TrackedRun) -> tuple[str | None, str | None]:
    return run.tags.get("precision"), run.tags.get("world_size")


def typical_rate(rates: Sequence[float]) -> float | None:
    """Return the median of `rates` (samples/s), or None if there are too few."""
    return median(rates) if len(rates) >= MIN_WINDOWS else None


def judge(
    now: TrackedRun,
    rates: Sequence[float],
    baseline: TrackedRun | None,
    settings: GuardSettings,
) -> Verdict:
    """Compare the run `now` with `baseline`. `rates` contains the throughput of each of
    its windows after the warm-up in samples/s."""
    rate = typical_rate(rates)
    if rate is None:
        return Verdict(
            "unknown",
            f"guard: not compared, {len(rates)} windows after the warm-up are too few "
            f"({MIN_WINDOWS} are needed): train more steps, or lower train.log_every",
        )
    if baseline is None or baseline.samples_per_s is None:
        return Verdict(
            "first",
            "guard: the first run of this work on this device; later ones are compared "
            f"with its {rate:.0f} samples/s",
        )
    return _compared_with(now, rates, baseline, baseline.samples_per_s, settings)


def _compared_with(
    now: TrackedRun,
    rates: Sequence[float],
    baseline: TrackedRun,
    baseline_rate: float,
    settings: GuardSettings,
) -> Verdict:
    rate, found = median(rates), differences(baseline, now)
    rate_pct = 100 * rate / baseline_rate
    text = (
        f"guard: {rate:.0f} samples/s in the median window, {rate_pct:.0f} % of the "
        f"baseline's {baseline_rate:.0f} (run {baseline.name}, "
        f"{baseline.run_id})"
    )
    before, here = baseline.figures.get(STEP), now.figures.get(STEP)
    step_pct = 100 * here / before if before and here else None
    if step_pct is not None:
        text += f"; a step needs {step_pct:.0f} % of its time"
    state: State = "healthy"
    if rate_pct > settings.healthy_high_pct:
        state = "fast"
        if settings.baseline is not None:
            text += ". guard.baseline still names the slower run: set it to this one"
    elif rate_pct < settings.healthy_low_pct:
        upper = quantiles(rates, n=4, method="inclusive")[2]
        excuse = _cause_outside_settings(
            now, rate_pct, 100 * upper / baseline_rate, found, settings
        )
        state = "busy" if excuse else "slow"
        text += f". No alarm: {excuse}" if excuse else _slow_text(found, settings)
    return Verdict(state, text, baseline.run_id, rate_pct, step_pct, found)


def _cause_outside_settings(
    now: TrackedRun,
    rate_pct: float,
    upper_pct: float,
    found: Sequence[Difference],
    settings: GuardSettings,
) -> str | None:
    """Return a cause of the low throughput other than the settings, or None if a
    setting differs or no cause is known. `rate_pct` and `upper_pct` are the median and
    the upper quartile of the windows in percent of the baseline's throughput."""
    if any(d.is_setting and not d.name.startswith("git_") for d in found):
        return None
    wait_pct = now.figures.get(WAIT, 0.0)
    if wait_pct > BUSY_WAIT_PCT:
        return f"other programs had the cores for {wait_pct:.0f} % of the time"
    slower = next((d for d in found if d.name == PROBE), None)
    if slower and (slower.ratio or 1.0) * rate_pct >= settings.healthy_low_pct:
        return str(slower)
    if upper_pct >= settings.healthy_low_pct:
        return f"a quarter of its windows reach {upper_pct:.0f} %"
    return None


def _slow_text(found: Sequence[Difference], settings: GuardSettings) -> str:
    if not found:
        return (
            ". No recorded setting differs: check the other programs on the machine "
            "(top, nvidia-smi) and the disk"
        )
    shown = "".join(f"\n  {one}" for one in found[: settings.max_differences])
    return (
        f". Differences (all {len(found)} are in guard.json):{shown}\nSet the "
        "parameters back; or, if this is intended, set guard.baseline to the run's id"
    )
