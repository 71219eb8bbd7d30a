"""Rewrite Pydantic's errors in terms of the parameters files."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from pydantic import BaseModel

from flatout.engine.parameters.common import SettingsError, SettingsModel, fields_of
from flatout.engine.parameters.other_names import HERE, REMOVED, RENAMED

NEAR = 0.8
"""Minimum difflib ratio for a name to be treated as a misspelling."""
SIMILAR = 0.55
"""Minimum difflib ratio for a name to be suggested. Misspellings and synonyms of
parameters have at least 0.57, and nine of ten unrelated words less."""


def nearest(name: str, valid: Collection[str], ratio: float = NEAR) -> str:
    """Return the valid name that is most similar to `name`, or "" if there is none with
    at least this difflib ratio."""
    return next(iter(difflib.get_close_matches(name, valid, 1, ratio)), "")


def similar(name: str, valid: Collection[str]) -> str:
    """Return the valid name that is most similar to `name`, or the only one that
    contains it, or "" if there is none."""
    longer = [one for one in valid if name in one]
    return nearest(name, valid, SIMILAR) or (longer[0] if len(longer) == 1 else "")


def first_line(error: BaseException) -> str:
    """Return the first line of the error's text, or its type's name if it has none."""
    return str(error).strip().split("\n")[0] or type(error).__name__


def refusal(faults: Sequence[str]) -> SettingsError:
    """Return a SettingsError that lists the `faults` found before a run."""
    count = len(faults)
    noun, pronoun = ("parameters", "them") if count > 1 else ("parameter", "it")
    return SettingsError(
        f"{count} {noun} cannot be used; nothing was run. Correct {pronoun} in conf/ "
        "or on the command line (--params):\n"
        + "\n".join(f"  {fault}" for fault in faults)
    )


def fault_lines(errors: Any, model: type[SettingsModel]) -> list[str]:
    """Return one line for each parameter path with an error. `errors` are Pydantic's
    errors. Messages for the branches of a union are joined by `or`."""
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
    """Return the first `most` names in quotes, and the number of other names."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more


MOST_LONGER = 4
"""Maximum number of suggested names that contain the given name."""


def near_or_all(name: str, valid: Collection[str], parent: str = "") -> str:
    """Return a text that suggests the closest valid name, prefixed with `parent`, or
    the few names that contain `name`. If none is close, the text lists all valid
    names."""
    if not valid:
        return "remove it"
    typo = nearest(name, valid, 0.9)
    longer = sorted(f"{parent}{one}" for one in valid if name in one)
    if not typo and 1 < len(longer) <= MOST_LONGER:
        return f"did you mean one of {', '.join(longer)}?"
    near = similar(name, valid)
    return f"did you mean {parent}{near}?" if near else f"valid: {sorted(valid)}"


WORDS = {
    "Input should be": "should be",
    "Field required": "is missing",
    "a valid integer": "an integer",
    "a valid ": "a ",
}
"""Phrases in Pydantic's messages, and their replacements."""


def _fault_text(fault: Any, location: list[Any], model: type[SettingsModel]) -> str:
    """Return a message such as `unknown parameter; did you mean train.epochs?`."""
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
    if fault["type"] == "model_type":
        return "should be a group of parameters, not a single value"
    message = str(fault["msg"]).removeprefix("Value error, ")
    for theirs, ours in WORDS.items():
        message = message.replace(theirs, ours)
    return message


def _hint(location: list[Any], model: type[SettingsModel]) -> str:
    """Return a text that suggests similar names, or lists all valid ones."""
    *parents, name = map(str, location)
    parent, renamed = ".".join(parents), RENAMED.get(".".join([*parents, name]))
    places = (path.rpartition(".") for path, _ in fields_of(model))
    siblings = [last for before, _, last in places if before == parent]
    found = [renamed] if renamed else parameters_named_like(name, model)
    if not found and not nearest(name.lower(), siblings):
        found = parameters_named_like(nearest(name.lower(), _names(model)), model)
    if found:
        return f"did you mean {' or '.join(found)}?"
    return near_or_all(name, siblings, f"{parent}." if parent else "")


def parameters_named_like(name: str, model: type[SettingsModel]) -> list[str]:
    """Return the paths of parameters called `name` here or in other programs."""
    other = _name_in_other_programs(name)
    same = [path for path, _ in fields_of(model) if path.rpartition(".")[2] == name]
    return [other, *same] if other else same


def _name_in_other_programs(name: str) -> str | None:
    return HERE.get(name.lower().replace("-", "_"))


def is_misplaced(name: str, value: Any, model: type[SettingsModel]) -> bool:
    """Return whether the unknown top-level `name` is meant for flatout, for example
    because it is a misspelt group. Other names belong to the user's own nodes."""
    if name.startswith("_"):  # an anchor of YAML
        return False
    groups, found = model.model_fields, parameters_named_like(name, model)
    if nearest(name.lower(), groups) or any(path in groups for path in found):
        return True
    is_group = isinstance(value, Mapping)
    return not is_group and bool(found or nearest(name.lower(), _names(model)))


def _names(model: type[SettingsModel]) -> set[str]:
    return {path.rpartition(".")[2] for path, _ in fields_of(model)}


def _shown_value(fault: Any) -> str:
    value, unknown = fault["input"], fault["type"] == "extra_forbidden"
    is_group = isinstance(value, (dict, BaseModel))
    return "" if unknown or is_group else f" (got {value!r})"


def _is_union_branch(part: object) -> bool:
    return isinstance(part, str) and (
        part in {"int", "constrained-int", "float", "constrained-float", "bool", "str"}
        or part.startswith("literal[")
    )
