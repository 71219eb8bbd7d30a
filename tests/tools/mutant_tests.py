"""Pytest plugins for `mutants.py`, which observe the tests of a mutant."""

import sys
import threading
import time
from typing import Any

import pytest


class Reached:
    """Pytest plugin that records the duration of each test and the lines it executes,
    including the lines of shared fixtures."""

    def __init__(self, files: dict[str, str], names: tuple[str, ...]) -> None:
        """`files` maps the paths that are traced to their names. Only tests whose names
        begin with one of `names` are run."""
        self._files = files
        self._names = names
        self.at_import: set[str] = set()
        """Lines that are executed while tests are collected."""
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
    """Pytest plugin that runs the given tests in order, and records the first
    failure."""

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
