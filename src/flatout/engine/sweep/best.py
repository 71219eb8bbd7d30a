"""Find the settings of a sweep with the best mean metric over seeds or folds, and the
settings that differ from them by more than the noise."""

from __future__ import annotations

import logging
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from flatout.engine.parameters import Settings
from flatout.engine.sweep.queued import FIGURES, Row, shown
from flatout.engine.sweep.space import FOLD, SEED, objective
from flatout.engine.sweep.statistics import paired_difference, seeds_needed

logger = logging.getLogger(__name__)


COMMAND = "kedro run --pipelines=train --env=best"
"""The command that trains with the settings that the sweep has written to conf/best."""
WINNER, WORSE = "winner", "worse than the best"
ENDS = ("difference", "low", "high")

Group = Mapping[Any, Row]
"""The rows of successful runs with the same settings, by seed or fold."""


class SweepError(RuntimeError):
    """Raised if no trial of a sweep has finished."""

    exit_code = 1


def compare(rows: Sequence[Row], settings: Settings) -> list[Row]:
    """Return a row for each combination of settings, best first, with its mean and the
    comparison with the best. Raises SweepError if no trial has finished."""
    name, groups = _ranked(rows, settings)
    found = compared(groups, name)
    for row in found if found[0]["trainings"] > 1 else ():
        logger.info("%s", shown(row))
    return found


def choose_best(
    rows: Sequence[Row], settings: Settings, environment: str | None = None
) -> dict[str, Any]:
    """Return a record of the settings with the best mean of the metric `choose_by`:
    their first trial, their means, and whether they are better than all others by more
    than the noise. Raises SweepError if no trial has finished."""
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
    if groups := ranked(rows, name, higher=higher):
        return name, groups
    faults = "\n".join(
        f"  {row['trial_id']} {row['status']}: {row['note']} ({row['log']})"
        for row in rows
    )
    raise SweepError(
        f"no trial of the sweep ({len(rows)}) has a {name}. Correct the errors and "
        f"run the sweep again:\n{faults}"
    )


def ranked(rows: Sequence[Row], name: str, *, higher: bool) -> list[Group]:
    """Return the successful rows that have the metric `name`, grouped by settings.
    Larger groups come first. Groups of equal size are sorted by their mean, best first.
    `higher` states whether a higher metric is better."""
    found: defaultdict[str, dict[Any, Row]] = defaultdict(dict)
    for row in rows:
        if row["status"] == "ok" and figures([row], name):
            own = found[str(settings_of(row))]
            own.setdefault(row.get(FOLD, row.get(SEED)), row)
    sign, groups = -1 if higher else 1, found.values()
    return sorted(
        groups, key=lambda g: (-len(g), sign * fmean(figures(g.values(), name)))
    )


def figures(rows: Any, name: str) -> list[float]:
    """Return the finite values of the metric `name` in `rows`."""
    found = [row[name] for row in rows]
    return [value for value in found if value is not None and math.isfinite(value)]


def settings_of(row: Row) -> Row:
    return {path: v for path, v in row.items() if "." in path and path != SEED}


def compared(groups: Sequence[Group], name: str) -> list[Row]:
    """Return a row for each group, in the same order, with the mean and the standard
    deviation of the metric `name`, and the paired difference from the first group. The
    95 % confidence intervals are corrected for the number of pairs of groups."""
    best, *others = groups
    ends = [
        _difference_from(best, one, name, math.comb(len(groups), 2)) for one in others
    ]
    verdict = "best mean, no winner" if others else "the only setting"
    if others and all(end["verdict"] == WORSE for end in ends):
        verdict = WINNER
    found = []
    for group, end in zip(groups, [{"verdict": verdict}, *ends], strict=True):
        values = figures(group.values(), name)
        counted: Row = {"trainings": len(values), name: fmean(values)}
        counted["standard_deviation"] = stdev(values) if len(values) > 1 else None
        first = settings_of(next(iter(group.values())))
        found.append({**first, **counted, **dict.fromkeys(ENDS), **end})
    return found


def _difference_from(best: Group, group: Group, name: str, pairs: int) -> Row:
    """Return the paired difference between `group` and `best` over the seeds or folds
    in common. With k folds, there are 1 / (k - 1) test rows per training row."""
    common = [key for key in group if key in best]
    if (count := len(common)) < 2:
        return {"verdict": "one training each: set sweep.seeds to 3"}
    a, b = ([one[key][name] for key in common] for one in (group, best))
    ratio = 1 / (count - 1) if FOLD in best[common[0]] else 0.0
    found = paired_difference(a, b, comparisons=pairs, test_to_train=ratio)
    size = abs(float(found.mean))
    verdict = "not distinguishable; "
    if found.is_distinct:
        verdict = WORSE
    elif ratio or not size:
        verdict += f"differences from {found.high - found.mean:.3g} show here"
    else:
        needed = seeds_needed(float(found.spread), size, pairs)
        more = f"{needed - count:,}" if needed else "over 1,000"
        verdict += f"{more} more seeds would be needed for a difference of {size:.3g}"
    return {**dict(zip(ENDS, map(float, found), strict=False)), "verdict": verdict}
