"""Means of settings over seeds or folds, and which of them differ beyond noise."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from flatout.engine.sweep.queued import Row
from flatout.engine.sweep.space import FOLD, SEED
from flatout.engine.sweep.statistics import paired_difference, seeds_needed

WINNER, WORSE = "winner", "worse than the best"
ENDS = ("difference", "low", "high")

Group = Mapping[Any, Row]
"""Successful trainings of one setting, by seed or fold."""


def ranked(rows: Sequence[Row], name: str, *, higher: bool) -> list[Group]:
    """Return the trainings of each setting that have the figure `name`: first settings
    with the most of them, the best mean first."""
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
    """Return the figures `name` of `rows` that are numbers."""
    found = [row[name] for row in rows]
    return [value for value in found if value is not None and math.isfinite(value)]


def settings_of(row: Row) -> Row:
    return {path: v for path, v in row.items() if "." in path and path != SEED}


def compared(groups: Sequence[Group], name: str) -> list[Row]:
    """Return a row for each group, the best first: mean, standard deviation, and the
    paired difference from the best, whose intervals hold for all pairs of settings
    together at 95 %."""
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
    """Return the difference of `group` from the best, over what both were trained
    with. The train and test rows of a fold are as 1 to the number of others."""
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
