"""Writes docs/parameters.md: `python docs/parameters_page.py`."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from flatout.engine.parameters import Settings
from flatout.project.config_loader import ProjectConfigLoader
from flatout.project.parameters.table import MISSING, as_yaml, found_in
from flatout.settings import CONFIG_LOADER_ARGS

PAGE = Path(__file__).with_name("parameters.md")
HEAD = """# Every parameter

<!-- Made by `python docs/parameters_page.py`. -->

`conf/base/parameters.yml` sets the first few that people change. All others have the
default below. Set yours in `conf/local/parameters.yml`, or for one run with
`--params=train.learning_rate=3e-4`. `kedro flatout parameters` prints the values of a
run and where each comes from.
"""
DEFAULTS = Settings()
KINDS = {
    bool: "true, false",
    int: "whole number",
    float: "number",
    str: "text",
    type(None): "null",
}


@dataclass(frozen=True)
class Parameter:
    path: str
    default: Any
    values: str
    meaning: str


def described(group: BaseModel = DEFAULTS, parent: str = "") -> Iterator[Parameter]:
    """Yield all parameters below `group`, in the order of the classes."""
    meanings = _docstrings(type(group))
    for name, field in type(group).model_fields.items():
        default = getattr(group, name)
        if isinstance(default, BaseModel):
            yield from described(default, f"{parent}{name}.")
            continue
        values = ", ".join(dict.fromkeys(_values(field.annotation)))
        yield Parameter(f"{parent}{name}", default, values, meanings.get(name, ""))


def purpose(name: str) -> str:
    """Return the purpose of a group; empty if `name` is a single value."""
    group = getattr(DEFAULTS, name)
    known = isinstance(group, BaseModel)
    return " ".join(inspect.cleandoc(group.__doc__ or "").split()) if known else ""


def _values(annotation: Any) -> Iterator[str]:
    """Yield `whole number` and `auto` for `Count | Auto`."""
    origin = get_origin(annotation)
    if origin is Literal:
        yield from (str(value) for value in get_args(annotation))
    elif annotation in KINDS:
        yield KINDS[annotation]
    elif origin in (list, dict):
        kind = "list" if origin is list else "mapping"
        values = " or ".join(_values(get_args(annotation)[-1]))
        yield f"{kind} of {values or 'anything'}"
    else:
        for part in get_args(annotation):
            yield from _values(part)


def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the text under each field, which Python does not keep."""
    if model is BaseModel:
        return {}
    [body] = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    lines = body.body if isinstance(body, ast.ClassDef) else []
    [base] = model.__bases__
    return _docstrings(base) | {
        field.target.id: " ".join(str(text.value.value).split())
        for field, text in pairwise(lines)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
    }


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
    shown = f"`{as_yaml(parameter.default)}`"
    given = found_in(base, parameter.path)
    is_place = isinstance(given, str) and given.startswith("/")
    if given is not MISSING and given != parameter.default and not is_place:
        shown += f"; conf/base: `{as_yaml(given)}`"
    meaning = parameter.meaning.replace("|", "\\|")
    return f"| `{parameter.path}` | {shown} | {parameter.values} | {meaning} |"


if __name__ == "__main__":
    conf = PAGE.parents[1] / "conf"
    loader = ProjectConfigLoader(str(conf), env=None, **CONFIG_LOADER_ARGS)
    PAGE.write_text(page(loader), encoding="utf-8")
