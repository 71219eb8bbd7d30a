"""The description of a run, which its page in MLflow shows: figures and files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import zip_longest

from flatout.tracking.outbox import RunRecord
from flatout.tracking.outcomes import DESCRIPTION
from flatout.tracking.pages.experiment import MENU
from flatout.tracking.pages.figures import FIGURES

CURVES_PICTURE = "training.png"
GROUPS = {
    "speed": (*FIGURES, "guard_samples_per_s", "guard_rate_pct"),
    "result": ("test_", "validation_"),
    "where the time went": ("time/",),
    "rows": ("split_",),
}
"""Titles of the table, each with names of figures or how they begin."""

Group = list[tuple[str, str]]


def description(record: RunRecord, page: str, files: Iterable[str]) -> str:
    """Markdown. `page`: address of the run in MLflow's pages,
    `#/experiments/1/runs/<id>`; `files`: its artifacts."""
    names = list(files)
    parts = [record.tags.get(DESCRIPTION, ""), _table(record)]
    if CURVES_PICTURE in names:
        parts.append(_picture(CURVES_PICTURE, record.run_id or ""))
    curves = (
        [f"[live curves]({page}/model-metrics?{MENU})"] if record.sent_steps else []
    )
    links = [*curves, *(f"[{name}]({page}/artifacts/{name}?{MENU})" for name in names)]
    return "\n\n".join(part for part in (*parts, " · ".join(links)) if part)


def _table(record: RunRecord) -> str:
    """A pair of columns a group; empty where there are no figures."""
    figures = {**record.metrics, **record.figures}
    found = {title: _group(figures, names) for title, names in GROUPS.items()}
    groups = {title: group for title, group in found.items() if group}
    if not groups:
        return ""
    head = "|".join(f" {title} | " for title in groups)
    rows = [
        "|".join(f" {name} | {value} " for name, value in cells)
        for cells in zip_longest(*groups.values(), fillvalue=("", ""))
    ]
    return "\n".join(
        f"|{row}|" for row in (head, "|".join(["---|---"] * len(groups)), *rows)
    )


def _group(figures: Mapping[str, float], names: tuple[str, ...]) -> Group:
    """In the order of `names`, each figure once."""
    chosen = dict.fromkeys(
        figure
        for name in names
        for figure in figures
        if figure == name or (name[-1] in "_/" and figure.startswith(name))
    )
    return [(_plain(name), shown(figures[name])) for name in chosen]


def _plain(name: str) -> str:
    return name.removeprefix("time/").removeprefix("split_")


def shown(value: float) -> str:
    """Four digits, or whole."""
    whole = value == int(value) if abs(value) < float("inf") else False
    return f"{value:,.0f}" if whole or abs(value) >= 1000 else f"{value:.4g}"


def _picture(name: str, run_id: str) -> str:
    return f"![loss and samples/s](get-artifact?path={name}&run_uuid={run_id})"
