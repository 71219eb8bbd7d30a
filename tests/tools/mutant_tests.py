"""What the tests say of a mutant: pytest plugins of `mutants.py`."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import pytest


class Reached:
    """A pytest plugin: the seconds of each test, and which lines it ran,
    with those of the fixtures that it shares with others."""

    def __init__(self, files: dict[str, str], names: tuple[str, ...]) -> None:
        """`files`: paths whose lines count, and what they are called; `names`: what
        those of the tests begin with."""
        self._files = files
        self._names = names
        self.at_import: set[str] = set()
        """What ran while tests were collected."""
        self._lines = self.at_import
        self._failed: set[str] = set()
        self._of_fixtures: dict[str, set[str]] = {}
        self.tests: dict[str, dict[str, Any]] = {}

    def _trace(self, frame: Any, event: str, _: Any) -> Any:
        file = self._files.get(frame.f_code.co_filename)
        if file is None:
            return None
        if event == "line":
            self._lines.add(f"{file}:{frame.f_lineno}")
        return self._trace

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Any:
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid.startswith(self._names)]

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Any:
        if fixturedef.scope == "function":
            return (yield)
        before, self._lines = self._lines, set()
        try:
            return (yield)
        finally:
            self._of_fixtures[fixturedef.argname] = self._lines
            self._lines = before

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        self._lines, begin_s = set(), time.monotonic()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
            shared = [self._of_fixtures.get(n, set()) for n in item.fixturenames]
            self.tests[item.nodeid] = {
                "seconds": time.monotonic() - begin_s,
                "failed": item.nodeid in self._failed,
                "process": item.get_closest_marker("process") is not None,
                "lines": sorted(self._lines.union(*shared)),
            }

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._failed.add(report.nodeid)


class Ordered:
    """A pytest plugin: only these tests, in this order; which one failed first."""

    def __init__(self, order: list[str]) -> None:
        self._places = {name: place for place, name in enumerate(order)}
        self.failed: str | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self._places]
        items.sort(key=lambda item: self._places[item.nodeid])

    def pytest_collectreport(self, report: Any) -> None:
        self.pytest_runtest_logreport(report)

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and self.failed is None:
            self.failed = report.nodeid or "import"
