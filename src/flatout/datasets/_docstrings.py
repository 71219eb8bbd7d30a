"""Extract docstrings from Python files, with few imports so that workers start fast."""

from __future__ import annotations

import ast
from pathlib import Path

MIN_WORDS = 3
FILES_AT_A_TIME = 24
_OWNERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def docstrings(path: Path) -> list[str]:
    """Return the docstrings of at least MIN_WORDS words in a file. Returns an empty
    list if the file is not valid Python."""
    try:
        tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError, RecursionError):
        return []
    owners = (node for node in ast.walk(tree) if isinstance(node, _OWNERS))
    texts = (ast.get_docstring(owner) for owner in owners)
    return [text for text in texts if text and len(text.split()) >= MIN_WORDS]


def docstrings_of(files: list[str], wanted: int | None) -> list[str]:
    """Return the docstrings of `files` in order. Parsing stops once there are `wanted`
    distinct docstrings. If `wanted` is None, all files are parsed."""
    texts: list[str] = []
    for start in range(0, len(files), FILES_AT_A_TIME):
        for file in files[start : start + FILES_AT_A_TIME]:
            texts += docstrings(Path(file))
        if wanted is not None and len(set(texts)) >= wanted:
            break
    return texts
