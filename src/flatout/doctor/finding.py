"""Run checks, turn their errors into findings, and format all findings."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict

from kedro.io import DatasetError
from rich.table import Table
from rich.text import Text

from flatout.engine.machine.checks import Finding, Status

Check = Callable[[], "Finding | list[Finding]"]


def examine(checks: Mapping[str, Check]) -> list[Finding]:
    """Return the findings of all `checks`, in order."""
    return [found for name, check in checks.items() for found in guarded(name, check)]


def guarded(name: str, check: Check, unknown: Status = "warn") -> list[Finding]:
    """Return the findings of a check. An error becomes a finding, too. Errors of
    flatout or the catalog would end a run, so they get the status `fail`. Other errors
    only prevent the check, so they get the status given by the argument `unknown`."""
    try:
        found = check()
        return [found] if isinstance(found, Finding) else found
    except Exception as error:  # an error must not end the doctor
        text = " ".join(str(error).split()) or "no message"
        own = type(error).__module__.startswith("flatout.")
        if own or isinstance(error, DatasetError):
            return [Finding(name, "fail", text, "see the message")]
        finding = f"could not be checked ({type(error).__name__}: {text[:300]})"
        fix = "no fault is known" if unknown == "warn" else "solve that first"
        return [Finding(name, unknown, finding, fix)]


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
    """Return the findings as a one-line JSON list of objects with check, status,
    finding and fix."""
    return json.dumps([asdict(found) for found in findings], ensure_ascii=False)
