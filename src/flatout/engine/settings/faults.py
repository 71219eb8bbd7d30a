"""Pydantic's errors in the words of whoever wrote the parameters."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from flatout.engine.settings.common import SettingsError


def refusal(faults: Sequence[str]) -> SettingsError:
    """Before anything has run."""
    count = len(faults)
    return SettingsError(
        f"{count} parameter{'s' if count > 1 else ''} cannot be used; nothing was "
        "run. Mend them in conf/ or on the command line (--params):\n"
        + "\n".join(f"  {fault}" for fault in faults)
    )


def fault_lines(errors: Any, model: type[BaseModel]) -> list[str]:
    """A line a path; what several branches of a union say is joined by `or`."""
    texts: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for fault in errors:
        location = [part for part in fault["loc"] if not _is_union_branch(part)]
        path = ".".join(str(part) for part in location)
        texts.setdefault(path, []).append(_fault_text(fault, location, model))
        values[path] = _shown_value(fault)
    return [f"{path}: {' or '.join(texts[path])}{values[path]}" for path in texts]


def near_or_all(name: str, valid: Collection[str], parent: str = "") -> str:
    """The valid name that is nearest, behind its `parent`; all where none is near."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    return f"did you mean {parent}{near[0]}?" if near else f"valid: {sorted(valid)}"


WORDS = {
    "Input should be": "should be",
    "a valid integer": "an integer",
    "a valid ": "a ",
}
"""Pydantic's words, and ours."""


def _fault_text(fault: Any, location: list[Any], model: type[BaseModel]) -> str:
    """`unknown parameter; did you mean train.global_batch_size?`"""
    if fault["type"] == "extra_forbidden":
        names = _names_beside(location, model)
        parent = "".join(f"{part}." for part in location[:-1])
        elsewhere = _elsewhere(str(location[-1]), model)
        if elsewhere:
            return f"unknown parameter; did you mean {' or '.join(elsewhere)}?"
        return f"unknown parameter; {near_or_all(str(location[-1]), names, parent)}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    for told, ours in WORDS.items():
        message = message.replace(told, ours)
    return message


def _elsewhere(name: str, model: type[BaseModel], parent: str = "") -> list[str]:
    """Paths of the parameters below `model` that have just this name."""
    paths = [f"{parent}{name}"] if name in model.model_fields else []
    for field, info in model.model_fields.items():
        below = _model_of(info.annotation)
        if below is not None:
            paths += _elsewhere(name, below, f"{parent}{field}.")
    return paths


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """The settings behind `LoaderSettings` or `LoaderSettings | None`."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _shown_value(fault: Any) -> str:
    value = fault["input"]
    unknown = fault["type"] == "extra_forbidden"
    return (
        "" if unknown or isinstance(value, (dict, BaseModel)) else f" (got {value!r})"
    )


def _is_union_branch(part: object) -> bool:
    """Pydantic names the branch of a union in the path; users do not know those."""
    return isinstance(part, str) and (
        part in {"int", "constrained-int", "float", "constrained-float", "bool", "str"}
        or part.startswith("literal[")
    )


def _names_beside(location: list[Any], model: type[BaseModel]) -> list[str]:
    """Valid names on the level of the last part of `location`."""
    for part in location[:-1]:
        model = _model_of(model.model_fields[str(part)].annotation) or model
    return sorted(model.model_fields)
