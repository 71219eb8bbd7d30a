"""Format a run's parameters and their sources as a table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from textwrap import fill
from typing import Any

from flatout.engine.parameters import Settings, near_or_all
from flatout.engine.parameters.common import by_path, fields_of, is_group
from flatout.engine.parameters.other_names import RENAMED
from flatout.engine.parameters.secrets import without_password
from flatout.project.command_line import CommandError
from flatout.project.config_loader import ProjectConfigLoader

MISSING = object()
WIDTH = 100


def check_group(group: str | None) -> None:
    """Raise CommandError if `group` is given and there is no parameter group of this
    name."""
    if group and group not in Settings.model_fields:
        raise CommandError(
            f"no group {group}; {near_or_all(group, Settings.model_fields.keys())}"
        )


def table(loader: ProjectConfigLoader, group: str | None) -> str:
    """Return a string with one line per parameter: path, value, and the last source
    that sets it. If `group` is given, only its parameters are included."""
    settings, layers = loader.settings.model_dump(mode="json"), loader.layers()
    lines = [
        (path, as_yaml(found_in(settings, path)), _source(layers, path))
        for path, field in fields_of(Settings)
        if not is_group(field) and (not group or path.split(".")[0] == group)
    ]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(_line(*line, widths) for line in lines)


def _line(path: str, value: str, source: str, widths: list[int]) -> str:
    """Return the line of one parameter. If it would be longer than WIDTH, the value
    follows on separate lines."""
    line = f"{path:{widths[0]}}  {value:{min(widths[1], 40)}}  {source}"
    if len(line) <= WIDTH:
        return line
    below = fill(value, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{path:{widths[0]}}  {source}\n{below}"


def _source(layers: Mapping[str, Mapping[str, Any]], path: str) -> str:
    before = [old for old, new in RENAMED.items() if new == path]
    named = [
        place
        for place, tree in layers.items()
        if any(found_in(tree, name) is not MISSING for name in (path, *before))
    ]
    return named[-1] if named else "default"


def found_in(tree: Mapping[str, Any], path: str) -> Any:
    """Return the value at a path such as `a.b.c`, or MISSING if the path does not
    exist in `tree`."""
    found: Any = tree
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return MISSING
        found = found[name]
    return found


def as_yaml(value: Any) -> str:
    """Format a value on one line, without passwords."""
    return without_password(value) if isinstance(value, str) else json.dumps(value)


def as_params(tree: Mapping[str, Any]) -> str:
    """Return the parameters in `tree` as the value of --params. Values with a comma,
    such as long lists, are left out, because --params cannot express them."""
    given = ((path, as_yaml(value)) for path, value in by_path(tree))
    return ",".join(f"{path}={text}" for path, text in given if "," not in text)
