"""The project's Kedro hooks: four classes that share a `Run`.

`in_order` returns one object of each class, in the order in which Kedro calls them.
"""

from __future__ import annotations

from typing import Any

from flatout.project.hooks.clock import ClockHooks
from flatout.project.hooks.data import DataHooks
from flatout.project.hooks.run import Run
from flatout.project.hooks.settings import SettingsHooks
from flatout.project.hooks.tracking import TrackingHooks


def in_order() -> tuple[Any, ...]:
    run = Run()
    return ClockHooks(run), SettingsHooks(run), DataHooks(run), TrackingHooks(run)
