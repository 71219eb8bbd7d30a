"""Checks that cannot hurt their caller."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from flatout.engine.machine.checks import Finding, Status

Result = TypeVar("Result")
Check = Callable[[], "Finding | list[Finding]"]
Known = tuple[type[Exception], ...]


def examine(checks: Mapping[str, Check], known: Known = ()) -> list[Finding]:
    """The findings of all `checks`, in their order."""
    return [
        found
        for name, check in checks.items()
        for found in guarded(name, check, known=known)
    ]


def guarded(
    name: str, check: Check, unknown: Status = "warn", known: Known = ()
) -> list[Finding]:
    """A check that raises is a row too: `fail` with the text of an error that flatout
    knows or that is one of `known`, which stop a run; `unknown` where it could not
    look."""
    try:
        found = check()
        return [found] if isinstance(found, Finding) else found
    except Exception as error:  # a doctor must not fall ill
        text = " ".join(str(error).split()) or "no message"
        own = type(error).__module__.startswith("flatout.")
        if own or isinstance(error, known):
            return [Finding(name, "fail", text, "it says what to change")]
        finding = f"could not be checked ({type(error).__name__}: {text[:300]})"
        fix = (
            "nothing is known to be wrong" if unknown == "warn" else "solve that first"
        )
        return [Finding(name, unknown, finding, fix)]


def within(limit_s: float, action: Callable[[], Result]) -> Result:
    """The result of `action`; what it raises. Raises TimeoutError after `limit_s`, and
    leaves it to itself then."""
    box: dict[str, Any] = {}

    def act() -> None:
        try:
            box["result"] = action()
        except BaseException as error:  # handed to the caller
            box["error"] = error

    thread = threading.Thread(target=act, name="flatout-doctor", daemon=True)
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {limit_s:g} s")
    if "error" in box:
        raise box["error"]
    result: Result = box["result"]
    return result
