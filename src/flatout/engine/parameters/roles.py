"""Selection of parameters by the roles of their fields."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any

from pydantic.fields import FieldInfo

from flatout.engine.parameters import Settings, SettingsModel
from flatout.engine.parameters.common import fields_of


@cache
def in_role(role: str, model: type[SettingsModel] = Settings) -> tuple[str, ...]:
    """Return parameters, and groups with all their parameters, that have this role of
    common.py."""
    found: list[str] = []
    for path, field in fields_of(model):
        if role in _fact(field, "roles") and not is_in(path, found):
            found.append(path)
    return tuple(found)


@cache
def reported(model: type[SettingsModel] = Settings) -> dict[str, str]:
    """Return parameters by the names under which a report has their final values."""
    found = ((path, _fact(field, "reported")) for path, field in fields_of(model))
    return {name: path for path, name in found if name}


def is_in(path: str, entries: Collection[str]) -> bool:
    """Return True if a parameter is one of `entries`, or in a group of them."""
    return any(path == entry or path.startswith(f"{entry}.") for entry in entries)


def _fact(field: FieldInfo, name: str) -> Any:
    facts = field.json_schema_extra
    return facts.get(name) or () if isinstance(facts, dict) else ()
