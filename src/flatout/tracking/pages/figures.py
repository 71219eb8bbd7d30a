"""Final figures of a run: those that are tags, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

FIGURES = (
    "samples_per_s",
    "tokens_per_s",
    "padding_pct",
    "mfu_pct",
    "share_of_measured_peak_pct",
    "loader_wait_pct",
    "cpu_wait_pct",
    "cpu_probe_ms",
    "gpu_clock_mhz",
    "step_ms_p50",
    "peak_reserved_gib",
    "compile_s",
    "train_wall_s",
)
"""Become tags, to compare runs by: as metrics each would be a chart of one point."""


def report_figures(report: dict[str, Any]) -> dict[str, float]:
    """Speed, and all of the test split."""
    tested = [name for name in report if name.startswith("test_")]
    return {
        name: float(report[name])
        for name in (*FIGURES, *tested)
        if report.get(name) is not None
    }


def figure_tags(figures: Mapping[str, float]) -> dict[str, str]:
    """Those by which runs are compared."""
    compared = [n for n in figures if n in FIGURES or n.startswith("guard_")]
    return {name: f"{figures[name]:.6g}" for name in compared}


def tagged_figures(tags: Mapping[str, str]) -> dict[str, float]:
    """The inverse of `figure_tags`; a tag that is no number any more is none."""
    found = {}
    for name, text in tags.items():
        if name in FIGURES or name.startswith("guard_"):
            with suppress(ValueError):
                found[name] = float(text)
    return found
