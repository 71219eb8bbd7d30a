"""Extract docstrings from Python files, with few imports so that workers start fast."""

from __future__ import annotations

import ast
from pathlib import Path

MIN_WORDS = 3
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> list[str]:
    """Return the docstrings of at least MIN_WORDS words in a file. If the file is not
    valid Python, the list is empty."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    owners = (node for node in ast.walk(tree) if isinstance(node, _OWNERS))
    texts = (ast.get_docstring(owner) for owner in owners)
    return [text for text in texts if text and len(text.split()) >= MIN_WORDS]


def docstrings_of(files: list[str]) -> list[str]:
    """Return the docstrings of `files` in order."""
    return [text for file in files for text in docstrings(Path(file))]
