"""After a training: is it as fast as the best earlier one of the same work."""

from __future__ import annotations

import json
import logging
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline.node import Node

from flatout.engine.guard import comparison as guard
from flatout.project.hooks import TrackingHooks
from flatout.project.parameters.hooks import checked_settings
from flatout.tracking import RunFolder

logger = logging.getLogger(__name__)

RUNS = "runs.jsonl"


class GuardHooks:
    """Reads what `TrackingHooks` notes of the run: Kedro must call it after those."""

    def __init__(self, tracking: TrackingHooks) -> None:
        self._tracking = tracking

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = checked_settings(context)
        self._reports = Path(self._settings.paths.metrics).parent
        self._verdict: guard.Verdict | None = None
        self._trained: guard.TrackedRun | None = None

    @hook_impl
    def before_node_run(self, node: Node) -> None:
        """The tracking program compares once, early, with this baseline."""
        folder = self._tracking.folder
        if node.short_name != "train_model" or folder is None:
            return
        record = folder.record
        record.tags["work_key"] = guard.work_key(
            self._settings, record.tags["token_key"]
        )
        known = self._baseline(_run_of(folder))
        if known is not None and self._settings.guard.enabled:
            record.baseline = {
                "name": known.name,
                "rate": known.samples_per_s,
                "healthy_low_pct": self._settings.guard.healthy_low_pct,
                "since_s": time.time(),
            }
        folder.save()

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        folder = self._tracking.folder
        if "train_report" not in outputs or folder is None or self._tracking.reused:
            return
        rates = outputs["train_history"]["samples_per_s"].dropna().tolist()
        if (typical := guard.typical_rate(rates)) is not None:
            folder.record.figures[guard.RATE] = typical
        now = _run_of(folder)
        if self._settings.guard.enabled:
            baseline = self._baseline(now)
            self._verdict = guard.judge(now, rates, baseline, self._settings.guard)
            self._note(folder, self._verdict)
        self._trained = _run_of(folder) if typical is not None else None

    @hook_impl
    def after_pipeline_run(self) -> None:
        """The model and all reports are saved by now. Raises SlowRunError."""
        if self._trained is not None:
            guard.append_run(self._reports / RUNS, self._trained)
        found, fails = self._verdict, self._settings.guard.on_slow == "fail"
        if found and found.state == "slow" and fails:
            raise guard.SlowRunError(found.text)

    def _baseline(self, now: guard.TrackedRun) -> guard.TrackedRun | None:
        named, runs = (
            self._settings.guard.baseline,
            guard.read_runs(self._reports / RUNS),
        )
        if named is None:
            return guard.choose_baseline(guard.of_same_work(runs, now), now)
        found = next((run for run in runs if run.run_id == named), None)
        if found is None:
            logger.warning(
                "guard.baseline: %s is not in %s; give the id of a run there, or null",
                named,
                self._reports / RUNS,
            )
        return found

    def _note(self, folder: RunFolder, verdict: guard.Verdict) -> None:
        """In the log, in MLflow and beside the other reports."""
        level = logging.WARNING if verdict.state == "slow" else logging.INFO
        logger.log(level, verdict.text)
        tags = {"guard": verdict.state, "guard_baseline": verdict.baseline}
        folder.record.tags |= {k: v for k, v in tags.items() if v is not None}
        if verdict.differences and verdict.state == "slow":
            named = "; ".join(str(d) for d in verdict.differences)
            folder.record.tags["guard_differences"] = named
        figures = {name: getattr(verdict, name) for name in ("rate_pct", "step_pct")}
        folder.record.figures |= {
            f"guard_{name}": value
            for name, value in figures.items()
            if value is not None
        }
        text = json.dumps(asdict(verdict), indent=1)
        (self._reports / "guard.json").write_text(text, encoding="utf-8")
        folder.save()


def _run_of(folder: RunFolder) -> guard.TrackedRun:
    record = folder.record
    return guard.TrackedRun(
        folder.path.name,
        record.name,
        dict(record.params),
        dict(record.tags),
        dict(record.figures),
    )
