"""What all groups of parameters share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

Strategy = Literal["fixed", "random", "grouped", "packed"]
Precision = Literal["fp32", "bf16", "fp16"]
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]


EXECUTION = "execution"
"""Role of a parameter that says how, where or how visibly, and never what, is trained:
a run may go on with another value."""
MACHINE = "machine"
"""Of one that machines which train together may set each for itself."""
BESIDE = "beside"
"""Of one that is no part of a step: it explains no other rate."""


def parameter(
    default: Any, *roles: str, reported: str | None = None, **bounds: Any
) -> Any:
    """A field whose roles other modules ask for (roles.py); without one it decides what
    is trained. `reported`: under which name a report has what it came to."""
    facts: dict[str, Any] = {"roles": list(roles), "reported": reported}
    return Field(default, json_schema_extra=facts, **bounds)


class SettingsError(ValueError):
    """Parameters that cannot be used; the text lists every fault with its path."""


class SettingsModel(BaseModel):
    """Unknown keys are refused; nothing changes once it is checked."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        validate_default=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes true for 1 where a number is asked for."""
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        found = value if isinstance(value, list) else [value]
        told = any(isinstance(one, bool) for one in found)
        if told and kinds & {int, float} and bool not in kinds:
            raise ValueError("should be a number, not true or false")
        return value


def _kinds(annotation: Any) -> set[type]:
    """The types that an annotation such as `Count | Auto` is put together from."""
    if isinstance(annotation, type):
        return {annotation}
    return {kind for part in get_args(annotation) for kind in _kinds(part)}


def by_path(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """`train.loader.num_workers` and its value, of every value in nested groups."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from by_path(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def set_by_path(tree: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """`tree` with `values` by path, as `by_path` gives them; groups that it lacks come
    to it."""
    for path, value in values.items():
        *parents, last = path.split(".")
        level = tree
        for name in parents:
            if not isinstance(level.get(name), dict):
                level[name] = {}
            level = level[name]
        level[last] = value
    return tree
