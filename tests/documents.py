"""Read commands, names and tables from the project's Markdown, with their position."""

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROJECT = Path(__file__).parents[1]
FOLDERS = ("conf", "src", "tests", "notebooks")
HISTORY = ("CHANGELOG.md", "docs/log.md", "docs/migration.md")
"""Documents that mention commands and parameters of earlier versions."""
SHELL = frozenset({"bash", "sh", "shell", "console"})
PROGRAMS = frozenset(
    {"make", "kedro", "flatout", "python", "pip", "torchrun", "accelerate"}
    | {"sbatch", "kubectl", "nvidia-smi", "docker", "tar"}
    | {"source", "git"}
)


@dataclass(frozen=True)
class Line:
    """A piece of text with its position in a document."""

    text: str
    file: str
    number: int

    @property
    def place(self) -> str:
        return f"{self.file}:{self.number}"


@dataclass(frozen=True)
class Fence:
    """A fenced code block."""

    language: str
    lines: list[Line]

    @property
    def is_shell(self) -> bool:
        """Return whether this is a block of shell commands, marked as one or starting
        with one."""
        first = self.lines[0].text.split()[:1] if self.lines else []
        plain = self.language in ("", "text") and bool(set(first) & PROGRAMS)
        return self.language in SHELL or plain


def documents() -> list[Path]:
    """Return all Markdown files except HISTORY and those written by runs."""
    inside = [path for name in FOLDERS for path in (PROJECT / name).rglob("*.md")]
    found = [path for path in inside if "egg-info" not in str(path)]
    folders = ("docs", "docs/guides", "docs/pipelines")
    docs = [page for name in folders for page in (PROJECT / name).glob("*.md")]
    history = {PROJECT / name for name in HISTORY}
    return sorted({*PROJECT.glob("*.md"), *docs, *found} - history)


def lines_of(path: Path) -> list[Line]:
    name = path.relative_to(PROJECT).as_posix()
    texts = path.read_text(encoding="utf-8").splitlines()
    return [Line(text, name, number) for number, text in enumerate(texts, 1)]


def fences_and_prose(path: Path) -> tuple[list[Fence], list[Line]]:
    fences: list[Fence] = []
    prose: list[Line] = []
    inside = False
    for line in lines_of(path):
        mark = re.match(r"\s*```(\w*)", line.text)
        if mark and not inside:
            fences.append(Fence(mark[1], []))
        elif not mark:
            (fences[-1].lines if inside else prose).append(line)
        inside = inside != bool(mark)
    assert not inside, f"{path}: a fence is not closed"
    return fences, prose


def spans(path: Path) -> list[Line]:
    """Return all code spans in the prose."""
    return [
        Line(text, line.file, line.number)
        for line in fences_and_prose(path)[1]
        for text in re.findall(r"`([^`]+)`", line.text)
    ]


def fenced_commands(path: Path) -> list[Line]:
    """Return the commands in shell blocks, without comments and line continuations."""
    found: list[Line] = []
    for fence in fences_and_prose(path)[0]:
        if not fence.is_shell:
            continue
        begun = ""
        for line in fence.lines:
            text = begun + line.text.strip().removeprefix("$ ")
            begun = text[:-1] if text.endswith("\\") else ""
            if text and not begun and not text.startswith("#"):
                found.append(Line(text, line.file, line.number))
    return found


def commands(path: Path) -> list[Line]:
    """Return the commands in shell blocks, and those in code spans of the prose."""
    named = [
        span
        for span in spans(path)
        if span.text.split()[0] in PROGRAMS and len(span.text.split()) > 1
    ]
    return fenced_commands(path) + named


def table_cells(path: Path, header: str) -> list[Line]:
    """Return the first column of all tables whose heading begins with `header`."""
    found: list[Line] = []
    inside = False
    for line in fences_and_prose(path)[1]:
        if not line.text.startswith("|"):
            inside = False
            continue
        cell = line.text.split("|")[1].strip()
        if cell.startswith(header):
            inside = True
        elif inside and set(cell) - set("- :"):
            found.append(Line(cell, line.file, line.number))
    return found


@cache
def sentences_of_the_code() -> tuple[str, ...]:
    """Return all strings in src, with an ellipsis for each placeholder."""
    return tuple(
        " ".join(text.split())
        for path in (PROJECT / "src").rglob("*.py")
        for text in _texts(ast.parse(path.read_text(encoding="utf-8")))
    )


def _texts(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            found.append("".join(_shown(part) for part in node.values))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(re.sub(r"%[-\d.]*[sdrgf]", "…", node.value))
    return found


def _shown(part: ast.expr) -> str:
    return str(part.value) if isinstance(part, ast.Constant) else "…"
