"""The best trial of a sweep, and the command that trains with its settings."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from flatout.engine.parameters import Settings
from flatout.engine.sweep import comparison
from flatout.engine.sweep.comparison import WINNER, compared, figures, settings_of
from flatout.engine.sweep.queued import FIGURES, Row, shown
from flatout.engine.sweep.space import FOLD, objective

logger = logging.getLogger(__name__)


COMMAND = "kedro run --pipelines=train --env=best"
"""Trains with the settings that the sweep wrote to conf/best."""


class SweepError(RuntimeError):
    """A sweep in which no training finished."""

    exit_code = 1


def compare(rows: Sequence[Row], settings: Settings) -> list[Row]:
    """Return and log a row per setting, the best first. Raises SweepError."""
    name, groups = _ranked(rows, settings)
    found = compared(groups, name)
    for row in found if found[0]["trainings"] > 1 else ():
        logger.info("%s", shown(row))
    return found


def choose_best(
    rows: Sequence[Row], settings: Settings, environment: str | None = None
) -> dict[str, Any]:
    """Return the setting with the best mean `sweep.choose_by`, its first trial and mean
    figures, and whether no other is as good within noise; `environment` is that of the
    sweep. Raises SweepError without a result."""
    name, groups = _ranked(rows, settings)
    best = next(iter(groups[0].values()))
    names = dict.fromkeys([name, *FIGURES])
    found = {n: figures(groups[0].values(), n) for n in names}
    means = {n: fmean(values) if values else None for n, values in found.items()}
    logger.info(
        "best is the setting of trial %s, mean %s", best["trial_id"], shown(means)
    )
    logger.info("train with it: %s", COMMAND)
    return {
        "trial_id": best["trial_id"],
        "settings": settings_of(best),
        "chosen_by": name,
        **means,
        "is_winner": compared(groups, name)[0]["verdict"] == WINNER,
        "trials": dict(Counter(row["status"] for row in rows)),
        "command": COMMAND,
        "environment": environment,
    }


def _ranked(rows: Sequence[Row], settings: Settings) -> tuple[str, Any]:
    name, higher = objective(settings)
    if rows and FOLD in rows[0]:
        name = name.replace("validation_", "test_", 1)
    if groups := comparison.ranked(rows, name, higher=higher):
        return name, groups
    faults = "\n".join(
        f"  {row['trial_id']} {row['status']}: {row['note']} ({row['log']})"
        for row in rows
    )
    raise SweepError(
        f"no trial of the sweep ({len(rows)}) has a {name}. Correct their faults and "
        f"run the sweep again:\n{faults}"
    )
