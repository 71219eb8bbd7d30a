"""Every parameter with its default, its values and its docstring, for people."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel

from flatout.engine.parameters import Settings

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
