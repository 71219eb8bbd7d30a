"""Definitions shared by all groups of parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo

if TYPE_CHECKING:
    from typing_extensions import Self

Strategy = Literal["fixed", "random", "grouped", "packed"]
Precision = Literal["fp32", "bf16", "fp16"]
Auto = Literal["auto"]
Count = Annotated[int, Field(ge=1)]
CountOrZero = Annotated[int, Field(ge=0)]
Names = Annotated[
    list[str],
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
]
"""A list of strings. A single string is also accepted, because --params cannot express
lists."""
RowNumbers = Annotated[
    list[CountOrZero] | str,
    BeforeValidator(lambda given: [given] if isinstance(given, int) else given),
]
"""A list of row numbers, a single row number, or a file that contains row numbers."""


EXECUTION = "execution"
"""Role of a parameter that affects how or where a training run executes, or what it
logs, but not its result. A resumed run can use a different value."""
MACHINE = "machine"
"""Role of a parameter that can differ between machines of the same run."""
UNTIMED = "untimed"
"""Role of a parameter that has no effect on the time of a step."""
PATH = "path"
"""Role of a parameter that can be a path, relative to the project."""


def parameter(
    default: Any, *roles: str, reported: str | None = None, **bounds: Any
) -> Any:
    """Return a Pydantic field for a parameter with the given roles. A parameter without
    roles affects the result of training. `reported` is the report key under which the
    final value is stored. `bounds` are arguments of `pydantic.Field`, such as `ge`."""
    facts: dict[str, Any] = {"roles": list(roles), "reported": reported}
    return Field(default, json_schema_extra=facts, **bounds)


class SettingsError(ValueError):
    """Raised for invalid parameters. The message lists all problems by path."""


class SettingsModel(BaseModel):
    """Base class of all parameter groups. Unknown keys are rejected."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        allow_inf_nan=False,
        validate_default=True,
        protected_namespaces=(),
    )

    @field_validator("*", mode="before")
    @classmethod
    def _no_boolean_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Reject true and false for numbers, because Pydantic converts true to 1."""
        kinds = _kinds(cls.model_fields[str(info.field_name)].annotation)
        found = value if isinstance(value, list) else [value]
        is_given = any(isinstance(one, bool) for one in found)
        if is_given and kinds & {int, float} and bool not in kinds:
            raise ValueError("should be a number, not true or false")
        return value

    def changed(self, values: Mapping[str, Any]) -> Self:
        """Return a copy with the given values, keyed by paths such as
        `loader.num_workers`. The values are not validated."""
        found: dict[str, Any] = {}
        for path, value in values.items():
            name, _, rest = path.partition(".")
            before = found.get(name, getattr(self, name))
            found[name] = before.changed({rest: value}) if rest else value
        return self.model_copy(update=found)


def _kinds(annotation: Any) -> set[type]:
    """Return all types in an annotation such as `Count | Auto`."""
    if isinstance(annotation, type):
        return {annotation}
    return {kind for part in get_args(annotation) for kind in _kinds(part)}


def is_group(field: FieldInfo) -> bool:
    kind = field.annotation
    return isinstance(kind, type) and issubclass(kind, SettingsModel)


def fields_of(
    model: type[SettingsModel], parent: str = ""
) -> Iterator[tuple[str, FieldInfo]]:
    """Yield the path and the field of every group and parameter below `model`."""
    for name, field in model.model_fields.items():
        yield f"{parent}{name}", field
        if is_group(field):
            yield from fields_of(field.annotation, f"{parent}{name}.")  # type: ignore[arg-type]


def by_path(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path (such as `train.loader.num_workers`) and value of each leaf."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from by_path(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def set_by_path(tree: dict[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Set `values` in the nested dict `tree` and return `tree`. The keys of `values`
    are paths, as in `by_path`. Missing groups are created."""
    for path, value in values.items():
        *parents, last = path.split(".")
        level = tree
        for name in parents:
            if not isinstance(level.get(name), dict):
                level[name] = {}
            level = level[name]
        level[last] = value
    return tree
