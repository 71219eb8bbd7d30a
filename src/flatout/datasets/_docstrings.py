"""Docstrings of Python files; runs in helper processes, imports next to nothing."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

from flatout.engine.machine.workers import serve

MIN_WORDS = 3
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> list[str]:
    """Whole docstrings of a file; none where the file is not valid Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    owners = (node for node in ast.walk(tree) if isinstance(node, _OWNERS))
    texts = (ast.get_docstring(owner) for owner in owners)
    return [text for text in texts if text and len(text.split()) >= MIN_WORDS]


def _answer(files: list[str]) -> bytes:
    texts = [text for file in files for text in docstrings(Path(file))]
    return json.dumps(texts).encode()


def _prepare(_: Any) -> Any:
    return _answer


def main() -> None:
    serve(_prepare)
