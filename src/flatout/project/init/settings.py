"""Create conf/local for the user's own data (`kedro flatout init`)."""

from __future__ import annotations

import codecs
import shlex
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from flatout.datasets import TextFiles
from flatout.engine.data.raw_texts import RawTexts, RawTextsError
from flatout.engine.families import first_type
from flatout.engine.files.atomic_write import write_text
from flatout.engine.machine.environment import nvidia_gpu_count
from flatout.engine.parameters import parse_settings
from flatout.engine.tasks import HeadKind, columns_of, task_class
from flatout.project.init.guess import Guess, guess, names_are_a_row

DELIMITERS = (";", "\t", "|")
OTHERS = {
    "arrays": (".npz", ".h5", ".hdf5"),
    "images": (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff"),
}
"""Environments for data without texts, each with its file extensions."""
MORE = {"images": ",images.size=64,images.channels=3"}
"""Parameters that override the image size and channels of the built-in example."""
TEXTS = (".csv", ".tsv", ".jsonl", ".json", ".parquet", ".arrow")
FROM_SCRATCH = {"config": {"model_type": "bert"}}
FILES = ("catalog.yml", "parameters.yml")


class ConfExistsError(ValueError):
    """Raised if existing files would be replaced."""


def inspect_file(
    file: str,
    text: str | None = None,
    label: str | None = None,
    task: str | None = None,
) -> tuple[Guess, dict[str, Any]]:
    """Return a guess about the contents of `file`, and a catalog entry that reads the
    file. `text`, `label` and `task` are the text column, the label column and the task
    if the user has given them. Raises RawTextsError if no texts are found, and
    SettingsError if the task does not fit."""
    if kind := other_kind(Path(file)):
        raise RawTextsError(
            f"{file} contains {kind}, not texts: kedro run --env={kind} "
            f"--params={kind}.path={shlex.quote(file)}{MORE.get(kind, '')} "
            f"(--pipelines={kind},benchmark measures)"
        )
    entry: dict[str, Any] = {"type": "flatout.datasets.TextFiles", "filepath": file}
    options: dict[str, Any] = _encoding(Path(file))
    raw: RawTexts = TextFiles(filepath=file, **options).load()
    if len(raw.column_names) == 1:
        marks = (mark for mark in DELIMITERS if mark in raw.column_names[0])
        if mark := next(marks, None):
            options["delimiter"] = mark
            raw = TextFiles(filepath=file, **options).load()
    if is_a_row := names_are_a_row(raw):
        numbered = range(1, len(raw.column_names) + 1)
        options["column_names"] = [f"column_{n}" for n in numbered]
        raw = TextFiles(filepath=file, **options).load()
    found = with_task(guess(raw, text, label, task), task)
    why = f"{found.why}; the first line is a row, not names" if is_a_row else found.why
    return replace(found, why=why), entry | options


def _encoding(file: Path) -> dict[str, str]:
    """Return the `encoding` option for a text file, detected from its first megabyte.
    The result is empty for UTF-8 and for other file formats. Text that is not UTF-8 is
    assumed to be Korean or Western text from Windows. Users have to set any other
    encoding themselves."""
    if file.suffix.lower() not in (".csv", ".tsv", ".jsonl") or not file.is_file():
        return {}
    with file.open("rb") as opened:
        begin = opened.read(2**20)
    if begin.startswith((b"\xff\xfe", b"\xfe\xff")):
        return {}  # UTF-16, which the reader rejects with an explanation
    for encoding, found in (("utf-8", {}), ("euc_kr", {"encoding": "cp949"})):
        with suppress(UnicodeDecodeError):
            codecs.getincrementaldecoder(encoding)().decode(begin)
            return found
    return {"encoding": "cp1252"}


def other_kind(path: Path) -> str | None:
    """Return the environment (`arrays` or `images`) for the files in `path`, or None if
    most of them are tables."""
    files = [path] if path.is_file() else path.rglob("*")
    count = Counter(file.suffix.lower() for file in files if file.is_file())
    found = {env: sum(count[s] for s in known) for env, known in OTHERS.items()}
    most = max(found, key=lambda env: found[env])
    return most if found[most] > sum(count[s] for s in TEXTS) else None


def with_task(found: Guess, task: str | None) -> Guess:
    """Return the guess with its task replaced by `task`, if one is given. Raises
    SettingsError or RawTextsError if the task is unknown or needs a label that was not
    found."""
    if task in (None, found.task):
        return found
    given = {"split": found.split, "model": {"task": task, **FROM_SCRATCH}}
    columns_of(parse_settings(given).split, str(task))
    return replace(found, task=str(task))


def check_absent(folder: Path, texts: Mapping[str, str]) -> None:
    """Raise ConfExistsError if files in `folder` differ from `texts`, the new contents
    by file name."""
    there = [
        str(folder / name)
        for name in FILES
        if (folder / name).exists()
        and (folder / name).read_text("utf-8", "replace") != texts[name]
    ]
    if there:
        raise ConfExistsError(
            f"{' and '.join(there)} would be replaced: move what you need, then "
            "kedro flatout init FILE --force"
        )


def write_settings(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    for name, text in texts.items():
        write_text(folder / name, text)
    return [folder / name for name in texts]


def settings_texts(
    found: Guess, entry: Mapping[str, Any], checkpoint: str | None
) -> dict[str, str]:
    """Return the contents of catalog.yml and parameters.yml, keyed by file name.
    `entry` is the catalog entry of the data, and `checkpoint` is None to train from
    scratch."""
    batch, source = 64 if nvidia_gpu_count() else 16, entry["filepath"]
    train: dict[str, Any] = {"global_batch_size": batch}
    model: dict[str, Any] = {"task": found.task}
    if checkpoint:
        model["name_or_path"] = checkpoint
        train["learning_rate"] = 5.0e-5
    elif kind := _model_type(found.task):
        model["config"] = {"model_type": kind}
    parameters = {
        "split": found.split,
        "model": model,
        "tokenize": {"max_length": found.max_length},
        "train": train,
    }
    head = (
        f"# Written by kedro flatout init from {source}: {found.why}.\n"
        "# About 99 % of the texts fit into max_length. global_batch_size is a first\n"
        "# guess for this device. docs/parameters.md lists all parameters.\n"
    )
    return {
        "catalog.yml": _yaml({"raw_texts": dict(entry)}),
        "parameters.yml": head + _yaml(parameters),
    }


def _model_type(task: str) -> str | None:
    """Return the model type to train from scratch, or None to keep the type in
    conf/base. For heads of kind ROW or TOKEN, the result is None. In this case, the
    model families are not imported, because they import torch."""
    kind = task_class(task)
    if kind.head_kind in (HeadKind.ROW, HeadKind.TOKEN):
        return None
    return first_type(kind.head_kind, causal=kind.texts.causal)


def _yaml(tree: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(tree), sort_keys=False, allow_unicode=True)
