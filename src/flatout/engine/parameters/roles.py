"""Selection of parameters by the roles of their fields."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flatout.engine.parameters import Settings


@cache
def in_role(role: str, model: type[BaseModel] = Settings) -> tuple[str, ...]:
    """Return parameters, and groups with all their parameters, that have this role of
    common.py."""
    return tuple(
        path for path, field in _fields(model, role) if role in _fact(field, "roles")
    )


@cache
def reported(model: type[BaseModel] = Settings) -> dict[str, str]:
    """Return parameters by the names under which a report has their final values."""
    found = ((path, _fact(field, "reported")) for path, field in _fields(model))
    return {name: path for path, name in found if name}


def is_in(path: str, entries: tuple[str, ...]) -> bool:
    """Return True if a parameter is one of `entries`, or in a group of them."""
    return any(path == entry or path.startswith(f"{entry}.") for entry in entries)


def _fields(
    model: type[BaseModel], role: str | None = None, parent: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield fields by path; a group in `role` is yielded without its fields."""
    for name, field in model.model_fields.items():
        yield f"{parent}{name}", field
        kind = field.annotation
        if role in _fact(field, "roles") or not isinstance(kind, type):
            continue
        if issubclass(kind, BaseModel):
            yield from _fields(kind, role, f"{parent}{name}.")


def _fact(field: FieldInfo, name: str) -> Any:
    facts = field.json_schema_extra
    return facts.get(name) or () if isinstance(facts, dict) else ()
