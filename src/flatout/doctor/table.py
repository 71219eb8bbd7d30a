"""Findings as a table for people and as JSON for programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text

from flatout.engine.machine.checks import Finding

STYLES = {"ok": "green", "warn": "yellow", "fail": "bold red"}


def as_table(findings: Sequence[Finding]) -> Table:
    table = Table(expand=False)
    for name in ("check", "", "finding", "fix"):
        table.add_column(name, overflow="fold")
    for found in findings:
        status = Text(found.status, STYLES[found.status])
        table.add_row(found.check, status, Text(found.finding), Text(found.fix))
    return table


def as_json(findings: Sequence[Finding]) -> str:
    """One line: a list of objects with `check`, `status`, `finding` and `fix`."""
    return json.dumps([asdict(found) for found in findings], ensure_ascii=False)
