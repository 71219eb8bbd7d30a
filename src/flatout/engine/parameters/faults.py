"""Pydantic's errors in terms of the parameters files."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel

from flatout.engine.parameters.common import SettingsError
from flatout.engine.parameters.other_names import HERE, REMOVED, RENAMED

NEAR = 0.8
"""Minimum of difflib's ratio for a misspelling."""


def first_line(error: BaseException) -> str:
    """Return the first line of its text, or its type's name if it has no text."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def refusal(faults: Sequence[str]) -> SettingsError:
    """Return the error for faults found before a run."""
    count = len(faults)
    return SettingsError(
        f"{count} parameter{'s' if count > 1 else ''} cannot be used; nothing was "
        "run. Correct them in conf/ or on the command line (--params):\n"
        + "\n".join(f"  {fault}" for fault in faults)
    )


def fault_lines(errors: Any, model: type[BaseModel]) -> list[str]:
    """Return one line per path; the texts of a union's branches are joined by `or`."""
    texts: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for fault in errors:
        location = [part for part in fault["loc"] if not _is_union_branch(part)]
        path = ".".join(str(part) for part in location)
        texts.setdefault(path, []).append(_fault_text(fault, location, model))
        values[path] = _shown_value(fault)
    return [
        f"{path}: {' or '.join(dict.fromkeys(texts[path]))}{values[path]}"
        for path in texts
    ]


def some_of(names: Sequence[str], most: int = 5) -> str:
    """Return the first names, quoted, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


def near_or_all(name: str, valid: Collection[str], parent: str = "") -> str:
    """Return the nearest valid name after its `parent`, or all valid names."""
    near = difflib.get_close_matches(name, valid, n=1, cutoff=0.4)
    return f"did you mean {parent}{near[0]}?" if near else f"valid: {sorted(valid)}"


WORDS = {
    "Input should be": "should be",
    "a valid integer": "an integer",
    "a valid ": "a ",
}
"""Pydantic's words, and their replacements."""


def _fault_text(fault: Any, location: list[Any], model: type[BaseModel]) -> str:
    """Return, for example, `unknown parameter; did you mean train.epochs?`."""
    path = ".".join(str(part) for part in location)
    removed = REMOVED.get(path) or REMOVED.get(f"{path}={fault['input']}")
    if fault["type"] == "extra_forbidden":
        removed = removed or REMOVED.get(
            _name_in_other_programs(str(location[-1])) or ""
        )
    if removed:
        return f"was removed in this version: {removed}"
    if fault["type"] == "extra_forbidden":
        return f"unknown parameter; {_hint(location, model)}"
    message = str(fault["msg"]).removeprefix("Value error, ")
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return message


def _hint(location: list[Any], model: type[BaseModel]) -> str:
    """Suggest a parameter of the same or a similar name, here or in other groups."""
    name, siblings = str(location[-1]), _sibling_names(location, model)
    renamed = RENAMED.get(".".join(str(part) for part in location))
    found = [renamed] if renamed else parameters_named_like(name, model)
    if not found and not _nearest(name, siblings):
        found = parameters_named_like(_nearest(name, _names(model)), model)
    if found:
        return f"did you mean {' or '.join(found)}?"
    return near_or_all(name, siblings, "".join(f"{part}." for part in location[:-1]))


def _nearest(name: str, valid: Collection[str]) -> str:
    """Return the valid name that `name` misspells, or an empty text."""
    near = difflib.get_close_matches(name.lower(), valid, n=1, cutoff=NEAR)
    return near[0] if near else ""


def parameters_named_like(name: str, model: type[BaseModel]) -> list[str]:
    """Return paths of the parameters below `model` for which other programs use this
    name, or that have exactly this name."""
    other = _name_in_other_programs(name)
    same = [path for path in _paths(model) if path.rpartition(".")[2] == name]
    return [other, *same] if other else same


def _name_in_other_programs(name: str) -> str | None:
    return HERE.get(name.lower().replace("-", "_"))


def is_misplaced(name: str, value: Any, model: type[BaseModel]) -> bool:
    """Return True if an unknown `name` on the level of `model`'s groups is meant for
    flatout. Other names belong to the user's own nodes."""
    if name.startswith("_"):  # an anchor of YAML
        return False
    groups, found = model.model_fields, parameters_named_like(name, model)
    if _nearest(name, groups) or any(path in groups for path in found):
        return True
    is_group = isinstance(value, Mapping)
    return not is_group and bool(found or _nearest(name, _names(model)))


def _names(model: type[BaseModel]) -> set[str]:
    return {path.rpartition(".")[2] for path in _paths(model)}


def _paths(model: type[BaseModel], parent: str = "") -> Iterator[str]:
    """Yield the path of every group and parameter below `model`."""
    for field, info in model.model_fields.items():
        yield f"{parent}{field}"
        below = _model_of(info.annotation)
        if below is not None:
            yield from _paths(below, f"{parent}{field}.")


def _model_of(annotation: Any) -> type[BaseModel] | None:
    """Return the settings in `LoaderSettings` or `LoaderSettings | None`."""
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
    """Return True for the names of union branches that Pydantic adds to a path."""
    return isinstance(part, str) and (
        part in {"int", "constrained-int", "float", "constrained-float", "bool", "str"}
        or part.startswith("literal[")
    )


def _sibling_names(location: list[Any], model: type[BaseModel]) -> list[str]:
    """Return valid names on the level of the last part of `location`."""
    for part in location[:-1]:
        model = _model_of(model.model_fields[str(part)].annotation) or model
    return sorted(model.model_fields)
