"""After a training: is it as fast as the best earlier one of the same work."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kedro.framework.context import KedroContext
from kedro.framework.hooks import hook_impl
from kedro.pipeline.node import Node

from flatout.engine.guard import comparison as guard
from flatout.engine.parameters.secrets import without_password
from flatout.project.hooks import TrackingHooks
from flatout.project.parameters.hooks import checked_settings
from flatout.tracking import Outbox, one_line
from flatout.tracking.baseline import NoAnswer, Work, ask_for_earlier, rates_since

logger = logging.getLogger(__name__)

EARLY_WINDOWS = 5
"""Behind the warm-up, of which a training is judged while it goes on."""
EARLY_TRIES = 3
"""At log points, where MLflow gives no answer in time."""


class GuardHooks:
    """Reads what `TrackingHooks` notes of the run: Kedro must call it after those."""

    def __init__(self, tracking: TrackingHooks) -> None:
        self._tracking = tracking
        self._verdict: guard.Verdict | None = None

    @hook_impl
    def after_context_created(self, context: KedroContext) -> None:
        self._settings = checked_settings(context)
        self._verdict = None

    @hook_impl
    def before_node_run(self, node: Node) -> None:
        outbox = self._tracking.outbox
        if node.name == "train_model" and outbox is not None:
            key = guard.work_key(self._settings, outbox.record.tags["token_key"])
            outbox.record.tags["work_key"] = key
            self._look_early(outbox)

    def _look_early(self, outbox: Outbox) -> None:
        """In the tracking thread, at the first windows: a long run need not end before
        it is told to be slow."""
        forwarder, begin_s = self._tracking.forwarder, time.time()
        if forwarder is None or not self._settings.guard.enabled:
            return

        unanswered = 0

        def look() -> bool:
            nonlocal unanswered
            try:
                rates = rates_since(outbox.points, begin_s)
                if len(rates) < EARLY_WINDOWS:
                    return False
                now = self._tracked(outbox)
                baseline = self._baseline(outbox, now)
                verdict = guard.judge(now, rates, baseline, self._settings.guard)
            except NoAnswer as fault:
                unanswered += 1
                logger.debug("guard: not compared yet: %s", fault)
                return unanswered == EARLY_TRIES
            except Exception as error:  # looking at speed never ends a run
                logger.debug("guard: not compared yet: %s", one_line(error))
                return True
            if verdict.state == "slow":
                logger.warning("after %d windows: %s", len(rates), verdict.text)
            return True

        forwarder.watch = look

    @hook_impl
    def after_node_run(self, outputs: dict[str, Any]) -> None:
        outbox = self._tracking.outbox
        if "train_report" not in outputs or outbox is None:
            return
        if self._tracking.reused:  # nothing was trained, and nothing is a baseline
            outbox.record.tags.pop("work_key", None)
            return
        rates = outputs["train_history"]["samples_per_s"].dropna().tolist()
        typical = guard.typical_rate(rates)
        if typical is not None:
            outbox.record.figures[guard.RATE] = typical
        if not self._settings.guard.enabled:
            return
        try:
            self._verdict = self._judge(outbox, rates)
            self._note(outbox, self._verdict)
        except Exception as error:  # looking at speed never ends a run
            logger.warning("guard: not compared: %s", one_line(error))

    @hook_impl
    def after_pipeline_run(self) -> None:
        """The model and all reports are saved by now. Raises SlowRunError."""
        verdict = self._verdict
        if (
            verdict
            and verdict.state == "slow"
            and self._settings.guard.on_slow == "fail"
        ):
            raise guard.SlowRunError(verdict.text)

    def _judge(self, outbox: Outbox, rates: Sequence[float]) -> guard.Verdict:
        settings, now = self._settings.guard, self._tracked(outbox)
        if guard.typical_rate(rates) is None:  # MLflow need not be waited for
            return guard.judge(now, rates, None, settings)
        try:
            baseline = self._baseline(outbox, now)
        except NoAnswer as fault:
            return guard.Verdict("unknown", f"guard: not compared. {fault}")
        return guard.judge(now, rates, baseline, settings)

    def _baseline(
        self, outbox: Outbox, now: guard.TrackedRun
    ) -> guard.TrackedRun | None:
        settings, record = self._settings.guard, outbox.record
        forwarder = self._tracking.forwarder
        if forwarder is None or forwarder.failing:
            place = without_password(record.tracking_uri)
            raise NoAnswer(f"MLflow at {place} takes nothing now")

        work = Work(
            record.experiment, now.tags["work_key"], now.tags["device"], record.run_id
        )
        found = forwarder.call(
            ask_for_earlier,
            record.tracking_uri,
            work,
            settings.baseline,
            settings.store_limit_s,
        )
        if settings.baseline is not None:
            return found[0]
        return guard.choose_baseline(found, now)

    def _tracked(self, outbox: Outbox) -> guard.TrackedRun:
        record = outbox.record
        tags = {**record.settled, **record.tags}
        return guard.TrackedRun(
            record.run_id or "", record.name, dict(record.params), tags, record.figures
        )

    def _note(self, outbox: Outbox, verdict: guard.Verdict) -> None:
        """In the log, in MLflow and beside the other reports."""
        level = logging.WARNING if verdict.state == "slow" else logging.INFO
        logger.log(level, verdict.text)
        tags = {"guard": verdict.state, "guard_baseline": verdict.baseline}
        outbox.record.tags |= {k: v for k, v in tags.items() if v is not None}
        if verdict.differences and verdict.state == "slow":
            named = "; ".join(str(d) for d in verdict.differences)
            outbox.record.tags["guard_differences"] = named
        for name in ("rate_pct", "step_pct"):
            value = getattr(verdict, name)
            if value is not None:
                outbox.record.figures[f"guard_{name}"] = value
        text = json.dumps(asdict(verdict), indent=1)
        path = Path(self._settings.paths.metrics).with_name("guard.json")
        path.write_text(text, encoding="utf-8")
