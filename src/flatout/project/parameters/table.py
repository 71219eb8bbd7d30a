"""Parameters for people: those of a run with their sources, and the page of all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import groupby
from textwrap import fill
from typing import Any

from flatout.engine.parameters import Settings, near_or_all
from flatout.engine.parameters.described import Parameter, described, purpose
from flatout.engine.parameters.other_names import RENAMED
from flatout.engine.parameters.secrets import without_password
from flatout.project.command_line import CommandError
from flatout.project.config_loader import ProjectConfigLoader

HEAD = """# Every parameter

<!-- Made by `kedro flatout parameters --markdown=docs/parameters.md`. -->

`conf/base/parameters.yml` sets the first few that people change. All others have the
default below. Set yours in `conf/local/parameters.yml`, or for one run with
`--params=train.learning_rate=3e-4`. `kedro flatout parameters` prints the values of a
run and where each comes from.
"""
MISSING = object()
WIDTH = 100


def check_group(group: str | None) -> None:
    """Raises CommandError for a group that no parameter has."""
    if group and group not in Settings.model_fields:
        raise CommandError(
            f"no group {group}; {near_or_all(group, Settings.model_fields.keys())}"
        )


def table(loader: ProjectConfigLoader, group: str | None) -> str:
    """Return one line per parameter: path, value, and `default` or its last source."""
    settings, layers = loader.settings.model_dump(mode="json"), loader.layers()
    lines = [
        (p.path, _yaml(_found(settings, p.path)), _source(layers, p.path))
        for p in described()
        if not group or p.path.split(".")[0] == group
    ]
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    return "\n".join(_line(*line, widths) for line in lines)


def _line(path: str, value: str, source: str, widths: list[int]) -> str:
    """Format one line; a value that is too long is put below it."""
    line = f"{path:{widths[0]}}  {value:{min(widths[1], 40)}}  {source}"
    if len(line) <= WIDTH:
        return line
    below = fill(value, WIDTH, initial_indent="    ", subsequent_indent="    ")
    return f"{path:{widths[0]}}  {source}\n{below}"


def page(loader: ProjectConfigLoader) -> str:
    """Return the text of docs/parameters.md: one table for each group."""
    base = loader.layers()[f"conf/{loader.base_env}"]
    texts = [HEAD]
    for group, members in groupby(described(), lambda p: p.path.split(".")[0]):
        rows = "\n".join(_row(parameter, base) for parameter in members)
        texts.append(
            f"## {group}\n\n{purpose(group)}\n\n"
            f"| parameter | default | values | meaning |\n|---|---|---|---|\n{rows}\n"
        )
    return "\n".join(texts).replace("\n\n\n\n", "\n\n").rstrip("\n") + "\n"


def _row(parameter: Parameter, base: Mapping[str, Any]) -> str:
    shown = f"`{_yaml(parameter.default)}`"
    given = _found(base, parameter.path)
    is_place = isinstance(given, str) and given.startswith("/")
    if given is not MISSING and given != parameter.default and not is_place:
        shown += f"; conf/base: `{_yaml(given)}`"
    meaning = parameter.meaning.replace("|", "\\|")
    return f"| `{parameter.path}` | {shown} | {parameter.values} | {meaning} |"


def _source(layers: Mapping[str, Mapping[str, Any]], path: str) -> str:
    before = [old for old, new in RENAMED.items() if new == path]
    named = [
        place
        for place, tree in layers.items()
        if any(_found(tree, name) is not MISSING for name in (path, *before))
    ]
    return named[-1] if named else "default"


def _found(tree: Mapping[str, Any], path: str) -> Any:
    found: Any = tree
    for name in path.split("."):
        if not isinstance(found, Mapping) or name not in found:
            return MISSING
        found = found[name]
    return found


def _yaml(value: Any) -> str:
    """Format a value on one line, without passwords."""
    return without_password(value) if isinstance(value, str) else json.dumps(value)
