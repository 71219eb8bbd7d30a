"""Names of parameters by what their fields say of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from flatout.engine.parameters import Settings


@cache
def in_role(role: str, model: type[BaseModel] = Settings) -> tuple[str, ...]:
    """Parameters, and groups with all that is in them, of one of the roles of
    common.py."""
    return tuple(
        path for path, field in _fields(model, role) if role in _fact(field, "roles")
    )


@cache
def reported(model: type[BaseModel] = Settings) -> dict[str, str]:
    """Parameters by the names under which a report has what they came to."""
    found = ((path, _fact(field, "reported")) for path, field in _fields(model))
    return {name: path for path, name in found if name}


def is_in(path: str, entries: tuple[str, ...]) -> bool:
    """Whether a parameter is one of `entries`, or in a group of them."""
    return any(path == entry or path.startswith(f"{entry}.") for entry in entries)


def _fields(
    model: type[BaseModel], role: str | None = None, parent: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """By path; of a group in `role` the group alone."""
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
