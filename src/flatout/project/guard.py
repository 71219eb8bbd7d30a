"""Compare the throughput of a training run with that of the fastest earlier run of the
same workload."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flatout.engine import guard
from flatout.engine.guard import RATE
from flatout.engine.parameters import Settings
from flatout.tracking import RunFolder

logger = logging.getLogger(__name__)

RUNS = "runs.jsonl"


class Guard:
    """Compares a tracked training run with earlier runs in the same folder."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._reports = Path(settings.paths.metrics).parent
        self._runs = self._reports / RUNS
        self._verdict: guard.Verdict | None = None
        self._trained: guard.TrackedRun | None = None

    def start(self, folder: RunFolder) -> None:
        """Store the baseline in the run's record. The tracking program compares the
        throughput of the first windows with it."""
        record, options = folder.record, self._settings.guard
        work_key = guard.work_key(self._settings, record.tags["token_key"])
        record.tags["work_key"] = work_key
        runs = guard.read_runs(self._runs)
        known = guard.choose_baseline(runs, _run_of(folder))
        if known is not None and options.enabled:
            record.baseline = {
                "name": known.name,
                "rate": known.samples_per_s,
                "healthy_low_pct": options.healthy_low_pct,
            }

    def trained(self, folder: RunFolder, history: Any) -> None:
        """Compare the run's throughput with the baseline, and record the verdict.
        `history` is a DataFrame whose column `samples_per_s` has one value per
        window."""
        rates = history["samples_per_s"].dropna().tolist()
        if (typical := guard.typical_rate(rates)) is not None:
            folder.record.figures[RATE] = typical
        if self._settings.guard.enabled:
            now = _run_of(folder)
            baseline = guard.choose_baseline(guard.read_runs(self._runs), now)
            self._verdict = guard.judge(now, rates, baseline, self._settings.guard)
            self._note(folder, self._verdict)
        self._trained = _run_of(folder) if typical is not None else None

    def ended(self) -> None:
        """Record the run as a possible baseline for later runs. Raises SlowRunError if
        the run was slow and `guard.on_slow` is `fail`."""
        if self._trained is not None:
            guard.append_run(self._runs, self._trained)
        found, fails = self._verdict, self._settings.guard.on_slow == "fail"
        if found and found.state == "slow" and fails:
            raise guard.SlowRunError(found.text)

    def _note(self, folder: RunFolder, verdict: guard.Verdict) -> None:
        """Write the verdict to the log, to MLflow and to guard.json."""
        level = logging.WARNING if verdict.state == "slow" else logging.INFO
        logger.log(level, verdict.text)
        tags = {"guard": verdict.state, "guard_baseline": verdict.baseline}
        if verdict.differences and verdict.state == "slow":
            tags["guard_differences"] = "; ".join(map(str, verdict.differences))
        figures = {
            "guard_rate_pct": verdict.rate_pct,
            "guard_step_pct": verdict.step_pct,
        }
        folder.record.tags |= {k: v for k, v in tags.items() if v is not None}
        folder.record.figures |= {k: v for k, v in figures.items() if v is not None}
        text = json.dumps(asdict(verdict), indent=1)
        (self._reports / "guard.json").write_text(text, encoding="utf-8")


def _run_of(folder: RunFolder) -> guard.TrackedRun:
    record = folder.record
    return guard.TrackedRun(
        folder.path.name,
        record.name,
        dict(record.params),
        dict(record.tags),
        dict(record.figures),
    )
