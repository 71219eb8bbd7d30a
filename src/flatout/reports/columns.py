"""Columns of a trial on the page and among the picks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PAGE, PICKS = "page", "picks"


@dataclass(frozen=True)
class Column:
    """A column of benchmark_trials.csv (or of a pick), and the places that show it."""

    head: str
    name: str
    shown: tuple[str, ...]


EVERYWHERE = (PAGE, PICKS)
COLUMNS = (
    Column("pick", "pick", (PICKS,)),
    Column("trial", "trial_id", (PAGE, PICKS)),
    Column("label", "label", (PAGE,)),
    Column("kind", "kind", (PAGE,)),
    Column("devices", "world_size", (PAGE,)),
    Column("batch", "global_batch_size", EVERYWHERE),
    Column("strategy", "strategy", EVERYWHERE),
    Column("budget", "token_budget", EVERYWHERE),
    Column("workers", "num_workers", EVERYWHERE),
    Column("type", "precision", EVERYWHERE),
    Column("I/O ms", "io_ms", (PAGE,)),
    Column("forward ms", "forward_ms", (PAGE,)),
    Column("backward ms", "backward_ms", (PAGE,)),
    Column("optim. ms", "optimizer_ms", (PAGE,)),
    Column("total ms", "total_ms", (PAGE,)),
    Column("samples/s", "samples_per_s", EVERYWHERE),
    Column("loader/s", "loader_samples_per_s", (PAGE,)),
    Column("GPU %", "gpu_util_pct", EVERYWHERE),
    Column("GiB", "reserved_memory_gib", EVERYWHERE),
    Column("% of its memory", "memory_pct", (PICKS,)),
    Column("samples/s per GiB", "samples_per_s_per_gib", (PICKS,)),
    Column("status", "status", (PAGE,)),
    Column("note", "note", (PAGE,)),
)
"""Figures of a trial, and those that show whether they are reliable."""


def columns_of(place: str, rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return column names by heading, only those with information on these rows."""
    shown = {one.head: one.name for one in COLUMNS if place in one.shown}
    if not rows:
        return shown
    return {
        head: name
        for head, name in shown.items()
        if _is_told(name, {row[name] for row in rows})
    }


def _is_told(name: str, values: set[object]) -> bool:
    return len(values) > 1 if name == "world_size" else values != {None}
