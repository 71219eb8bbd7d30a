"""Mode journey in words and tables: where whole commands spend their seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flatout.reports.markdown import Columns, Row, cell_text, fixed, section, table

PHASES = {
    "imports": "interpreter and imports",
    "configuration": "configuration",
    "data": "data",
    "model": "model and tokenizer",
    "compilation": "compilation",
    "first_step": "first step",
    "steps": "steps",
    "evaluation": "evaluation",
    "checkpoints": "checkpoints",
    "tracking": "tracking",
    "pictures": "pictures",
    "saving": "saving",
    "rest": "rest",
    "end": "end of the process",
}
"""In the order of tables; phases of other pipelines have the pipeline's name."""
SHORT = {
    "imports": ("imports", "configuration"),
    "data": ("data",),
    "model, tokenizer": ("model",),
    "compile, first step": ("compilation", "first_step"),
    "steps": ("steps",),
    "evaluation": ("evaluation",),
    "saving, tracking": ("checkpoints", "saving", "tracking", "pictures"),
}
"""Lines of the terminal's table between its head, and the rest and the whole."""
Summary = Mapping[str, Any]


def answer(journey: Summary) -> str:
    """One sentence: cold and warm seconds, beside those of the fastest script."""
    rows = journey["rows"]
    failed = [row["failed"] for row in rows if row["failed"]]
    told = [_failure(one) for one in failed]
    own = {row["start"]: row for row in rows if row["contender"] == "flatout"}
    if any(row["median_s"] for row in own.values()):
        told.insert(0, _seconds(own, rows, journey["alone"]))
    return " ".join(told) or "No whole command was measured."


def _seconds(own: Mapping[str, Row], rows: Sequence[Row], alone: str | None) -> str:
    text = f"From the command to the saved model flatout takes {_starts(own)}"
    scripts = [row for row in rows if row["contender"] != "flatout" and row["median_s"]]
    if not scripts:
        why = alone or "none has run to its end"
        return f"{text}; no Trainer script stands beside it: {why}."
    best = min(scripts, key=lambda row: float(row["median_s"]))["contender"]
    beside = {row["start"]: row for row in scripts if row["contender"] == best}
    ratios = [
        f"{own[start]['median_s'] / beside[start]['median_s']:.2f}"
        for start in own
        if start in beside and own[start]["median_s"]
    ]
    return (
        f"{text}, the fastest Trainer script, {best}, {_starts(beside)}: "
        f"{' and '.join(ratios)} of its time."
    )


def _starts(rows: Mapping[str, Row]) -> str:
    """`21.3 s cold and 15.2 s warm`."""
    known = {start: row["median_s"] for start, row in rows.items() if row["median_s"]}
    return " and ".join(f"{s:.1f} s {start}" for start, s in known.items())


def _failure(trial: Row) -> str:
    log = f"; its log: {trial['log']}" if trial["log"] else ""
    return f"{trial['label']} ended as {trial['status']}: {trial['note']}{log}."


def chart(journey: Summary) -> str:
    """Seconds of each command by phase in plain text: ten lines."""
    rows = [row for row in journey["rows"] if row["median_s"]]
    if not rows:
        return ""
    told = {name for names in SHORT.values() for name in names}
    every = tuple(dict.fromkeys(name for row in rows for name in row["phases_s"]))
    rest = tuple(name for name in every if name not in told)
    groups = {**SHORT, "rest": rest, "all": every}
    columns, before = [["seconds", *groups]], ""
    for row in rows:  # a contender's name stands over its first start alone
        head = row["start"] if row["contender"] == before else row["name"]
        before = row["contender"]
        columns.append([head, *(_sum(row, names) for names in groups.values())])
    widths = [max(map(len, column)) for column in columns]
    lines = zip(*columns, strict=True)
    return "\n".join(_aligned(line, widths) for line in lines)


def _sum(row: Row, names: Sequence[str]) -> str:
    return f"{sum(row['phases_s'].get(name, 0.0) for name in names):.1f}"


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The first cell to the left, numbers to the right."""
    first, *numbers = zip(cells, widths, strict=True)
    shown = [f"{first[0]:<{first[1]}}", *(f"{cell:>{w}}" for cell, w in numbers)]
    return "  ".join(shown)


def journey_text(summary: Summary) -> str:
    """The page's section: a line a command, then a line a phase."""
    journey = summary.get("journey")
    if not journey:
        return ""
    rows = [row for row in journey["rows"] if row["median_s"]]
    columns: Columns = {
        "command": "name",
        "s, each turn": lambda row: ", ".join(f"{s:.1f}" for s in row["turns_s"]),
        "median": fixed("median_s", 1),
        "over the fastest script": fixed("over_best_script", 2),
        "samples": "samples",
        "test accuracy": "test_accuracy",
        "model": lambda row: f"`{row['model']}`",
    }
    alone = journey["alone"]
    return section(
        "From the command to the saved model",
        table(rows, columns),
        _phases(rows),
        f"flatout alone: {cell_text(alone)}." if alone else "",
        *(_failure(row["failed"]) for row in journey["rows"] if row["failed"]),
    )


def _phases(rows: Sequence[Row]) -> str:
    """Those that any of the commands spent time in."""
    spent = dict.fromkeys(name for row in rows for name in row["phases_s"])
    names = [*(n for n in PHASES if n in spent), *(n for n in spent if n not in PHASES)]
    lines = [
        {
            "phase": PHASES.get(name, name),
            **{row["name"]: row["phases_s"].get(name, 0.0) for row in rows},
        }
        for name in names
    ]
    columns: Columns = {"phase, s": "phase"}
    columns = {**columns, **{row["name"]: fixed(row["name"], 2) for row in rows}}
    return table(lines, columns) if lines else ""
