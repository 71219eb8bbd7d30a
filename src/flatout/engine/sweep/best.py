"""The best trial of a sweep, and the command that trains with its settings."""

from __future__ import annotations

import logging
import math
import shlex
from collections import Counter
from collections.abc import Sequence
from typing import Any

from flatout.engine.parameters import Settings
from flatout.engine.sweep.space import objective
from flatout.engine.sweep.table import FIGURES, Row, shown

logger = logging.getLogger(__name__)


class SweepError(RuntimeError):
    """A sweep in which no training finished."""

    exit_code = 1


def choose_best(
    rows: Sequence[Row], settings: Settings, environment: str | None = None
) -> dict[str, Any]:
    """Return settings and figures of the trial with the best `sweep.choose_by`;
    `environment` is that of the sweep. Raises SweepError without such a trial."""
    name, higher = objective(settings)
    sign = -1 if higher else 1
    rated = [row for row in rows if row["status"] == "ok" and _is_number(row[name])]
    if not rated:
        raise SweepError(_nothing(rows, name))
    best = min(rated, key=lambda row: sign * row[name])
    chosen = {path: value for path, value in best.items() if "." in path}
    given = ",".join(f"{path}={value}" for path, value in chosen.items())
    env = f" --env={shlex.quote(environment)}" if environment else ""
    command = f"kedro run --pipelines=train{env} --params={shlex.quote(given)}"
    figures = {
        n: best[n] if _is_number(best[n]) else None
        for n in dict.fromkeys([name, *FIGURES])
    }
    logger.info("best is trial %s: %s", best["trial_id"], shown(figures))
    logger.info("train with it: %s", command)
    return {
        "trial_id": best["trial_id"],
        "settings": chosen,
        "chosen_by": name,
        **figures,
        "trials": dict(Counter(row["status"] for row in rows)),
        "command": command,
        "environment": environment,
    }


def _is_number(figure: float | None) -> bool:
    return figure is not None and math.isfinite(figure)


def _nothing(rows: Sequence[Row], name: str) -> str:
    lines = [
        f"  {row['trial_id']} {row['status']}: {row['note']} ({row['log']})"
        for row in rows
    ]
    return "\n".join(
        [
            f"none of the {len(rows)} trials of the sweep has a {name}. Correct what "
            "they say and run the sweep again:",
            *lines,
        ]
    )
