"""Generate sessions, some of them abnormal, that imitate the logs of file system
blocks.

Session names and keys show that the data is synthetic. The data does not represent a
real log.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from flatout.engine.data.sessions.grouping import (
    ABNORMAL,
    COLUMNS,
    NORMAL,
    SessionFilter,
)

FORMAT_VERSION = 1
"""Increase this whenever the same seed would give different sessions."""
ABNORMAL_SHARE = 0.05
REPLICAS = 3
Keys = list[str]


def synthetic_sessions(count: int, seed: int, sessions_filter: SessionFilter) -> Any:
    """Generate `count` sessions from `seed`, and return those that `sessions_filter`
    selects as an Arrow table with the columns `session`, `text` and `label`."""
    rng = random.Random(seed)  # noqa: S311 - no secret
    found = [_session(rng, number) for number in range(count)]
    names, texts, labels = map(list, zip(*found, strict=True))
    taken = sessions_filter.mask(names, labels).nonzero()[0].tolist()
    return pa.table([names, texts, labels], names=COLUMNS).take(taken)


def _session(rng: random.Random, number: int) -> tuple[str, str, str]:
    keys, label = _normal(rng), NORMAL
    if rng.random() < ABNORMAL_SHARE:
        keys, label = rng.choice(FAULTS)(keys, rng), ABNORMAL
    return f"synthetic-{number}", " ".join(keys), label


def _normal(rng: random.Random) -> Keys:
    """Generate the keys of a normal session. The replicas of a block are written in
    parallel, then read, and usually deleted."""
    keys = ["synthetic-allocate"]
    left = [["open", "receive", "written", "confirm"] for _ in range(REPLICAS)]
    while any(left):
        keys.append(rng.choice([steps for steps in left if steps]).pop(0))
    for _ in range(rng.randrange(6)):
        keys += rng.choice([["serve"], ["verify"], ["serve", "served"]])
    if rng.random() < 0.3:
        keys += ["replicate", "receive", "written", "confirm"]
    if rng.random() < 0.7:
        keys += ["mark", *["delete"] * REPLICAS, "deleted"]
    return keys


def _without_one(keys: Keys, rng: random.Random) -> Keys:
    at = rng.randrange(1, len(keys) - 1)
    return keys[:at] + keys[at + 1 :]


def _breaks_off(keys: Keys, rng: random.Random) -> Keys:
    return keys[: rng.randrange(2, 3 * REPLICAS)]


def _error(keys: Keys, rng: random.Random) -> Keys:
    at = rng.randrange(1, len(keys))
    return [*keys[:at], rng.choice(["timeout", "refused", "corrupt"]), *keys[at:]]


def _repeats(keys: Keys, rng: random.Random) -> Keys:
    at = rng.randrange(1, len(keys))
    return keys[:at] + [keys[at]] * rng.randrange(5, 12) + keys[at:]


def _other_order(keys: Keys, rng: random.Random) -> Keys:
    return [keys[0], *sorted(keys[1:], reverse=True)]


FAULTS: list[Callable[[Keys, random.Random], Keys]] = [
    _without_one,
    _breaks_off,
    _error,
    _repeats,
    _other_order,
]
