"""What the catalog says of `raw_texts`, as a name and a hash; no row is read for it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash
from kedro.io import DataCatalog, DatasetError

from flatout.datasets import DocstringCorpus, OwnSplits, TextFiles
from flatout.engine.data.forms.given_splits import entry_of
from flatout.engine.data.readers.remote_files import shown

ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Of an object in memory: another at each start."""


def origin_of(catalog: DataCatalog, *, fetched: bool = False) -> dict[str, Any] | None:
    """Name of raw_texts, and a hash of its entry and of the state of its files, of
    which no row is read; of files that were `fetched` the state then. None where the
    entry cannot be made here. The hash alone: an entry may hold credentials."""
    try:
        entry = catalog.get("raw_texts")
        described = entry._describe()
    except Exception:  # a package that is not installed here
        return None
    place = _place(described)
    state = xxhash.xxh3_128()
    for name, value in sorted(described.items()):
        state.update(repr((name, ADDRESS.sub("", str(value)))).encode())
    tells_changes = False
    parts = entry.parts.values() if isinstance(entry, OwnSplits) else [entry]
    for file_state in chain(*(_file_states(part, fetched) for part in parts)):
        state.update(repr(file_state).encode())
        tells_changes |= file_state[1] is not None
    return {
        "name": _shown(entry, described, place),
        "state": state.hexdigest(),
        "tells_changes": tells_changes,
    }


def short_name(catalog: DataCatalog, name: str) -> str:
    """Of the data in an entry, for people; empty where the entry cannot be made."""
    try:
        entry = catalog.get(name)
        described = entry._describe()
    except Exception:  # none of that name, or a package that is not installed here
        return ""
    if isinstance(entry, DocstringCorpus):
        return "docstrings"
    return _shown(entry, described, _place(described)).split(".")[0][:40]


def _shown(entry: Any, described: Mapping[str, Any], place: Any) -> str:
    """A name without the credentials that a URL may carry."""
    if isinstance(entry, DocstringCorpus):
        return "the built-in corpus"
    if isinstance(entry, OwnSplits):
        return ", ".join(map(entry_of, entry.parts))
    if place and "://" in str(place):
        return PurePosixPath(shown(str(place))).name
    named = Path(str(place)).name if place else described.get("name")
    named = str(named or type(entry).__name__)
    return shown(named) if "://" in named else named


def _place(described: Mapping[str, Any]) -> Any:
    return next((described[n] for n in ("filepath", "path") if described.get(n)), None)


def _file_states(entry: Any, fetched: bool) -> Iterator[tuple[Any, ...]]:
    """Name and state of each file; nothing where there are none to look at."""
    place = _place(entry._describe())
    if isinstance(entry, TextFiles) and entry.is_remote:
        try:
            yield from sorted(entry.stamps(fetched=fetched).items())
        except DatasetError:  # loading says why
            yield "not reached", None
    elif place:
        yield from _local_states(Path(str(place)))


def _local_states(path: Path) -> Iterator[tuple[str, tuple[int, int]]]:
    """Size and time of a file, or of all in a folder, by their names."""
    if path.is_file():
        yield path.name, _state(path)
    for folder, _, names in sorted(os.walk(path)):
        for name in sorted(names):
            file = Path(folder, name)
            if file.is_file():
                yield str(file.relative_to(path)), _state(file)


def _state(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_size, found.st_mtime_ns
