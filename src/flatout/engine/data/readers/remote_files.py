"""Download files from stores that fsspec supports (s3://, gs://, hf://, https://).

Files are stored locally, because their rows are read several times and their bytes are
hashed. A file is downloaded again only if the store reports that it has changed.
fsspec's `filecache` is not used because it accepts a partial download as the whole file
and does not detect changes of files read over https.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import urlsplit

import xxhash

from flatout.engine.data.raw_texts import RawTextsError
from flatout.engine.data.readers.file_reader import HIDDEN
from flatout.engine.files.atomic_write import clear_leftovers, write_file
from flatout.engine.parameters.faults import first_line

logger = logging.getLogger(__name__)

STAMPS = ".stamps.json"
"""File in the download folder that stores a hash of each file's remote metadata."""
CHECK = "check the address, the network and the entry's credentials"
TELLS_NO_CHANGE = frozenset({"name", "size", "type", "url", "mimetype", "partial"})
"""Metadata fields that may stay the same when the contents of a file change. A file
with only these fields has no stamp."""


def shown(url: str) -> str:
    """Return the URL without credentials and query. A query may contain a signature."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


@dataclass(frozen=True)
class RemoteFiles:
    """A remote file, or all files below a remote folder that `wanted` accepts."""

    url: str
    cache: Path
    wanted: Callable[[Path], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the fsspec file system, such as credentials and the endpoint."""

    @property
    def folder(self) -> Path:
        """The local folder for the downloaded files."""
        name = PurePosixPath(urlsplit(self.url).path).name or "files"
        return self.cache / f"{name}-{xxhash.xxh3_64_hexdigest(self.url.encode())}"

    def fetch(self) -> Path:
        """Make the local files equal to the remote ones, and return the local folder,
        or the file if the URL is that of a file. Raises RawTextsError if this fails."""
        with self._errors():
            store, found, is_file = self._find()
            known, stamps = self.fetched_stamps(), _stamps(store, found)
            clear_leftovers(self.folder)
            for name, path in found.items():
                same = stamps[name] is not None and stamps[name] == known.get(name)
                if not (same and (self.folder / name).is_file()):
                    self._copy(store, path, self.folder / name)
            for name in known.keys() - found.keys():
                (self.folder / name).unlink(missing_ok=True)
            (self.folder / STAMPS).write_text(json.dumps(stamps), encoding="utf-8")
        return self.folder / next(iter(found)) if is_file else self.folder

    def stamps(self) -> dict[str, str | None]:
        """Return a hash of each file's remote metadata, by file name, or None if it
        cannot show changes. Raises RawTextsError if the store cannot be read."""
        with self._errors():
            store, found, _ = self._find()
            return _stamps(store, found)

    def fetched_stamps(self) -> dict[str, str | None]:
        """Return the result of `stamps` at the time of the last download, or {} if
        nothing has been downloaded."""
        try:
            return dict(json.loads((self.folder / STAMPS).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def _find(self) -> tuple[Any, dict[str, str], bool]:
        """Return the file system, a mapping from each file's name relative to the URL
        to its remote path, and whether the URL is that of a single file."""
        from fsspec.core import url_to_fs

        store, root = url_to_fs(self.url, **self.options)
        store.invalidate_cache()
        if not self.url.endswith("/") and _is_file(store, root):
            return store, {PurePosixPath(urlsplit(self.url).path).name: root}, True
        start = len(root.rstrip("/")) + 1
        names = {path[start:]: path for path in sorted(store.find(root))}
        found = {
            name: path
            for name, path in names.items()
            if name == Path(name).as_posix()  # no empty part
            and not any(part.startswith(HIDDEN) for part in Path(name).parts)
            and self.wanted(Path(name))
        }
        if not found:
            there = ", ".join([*names][:10]) or f"nothing: {CHECK}"
            raise RawTextsError(f"{shown(self.url)} has no texts; found: {there}")
        return store, found, False

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except RawTextsError:
            raise
        except ImportError as error:  # The message names the missing package.
            text = f"{shown(self.url)} cannot be read here: {error}"
            raise RawTextsError(text) from error
        except Exception as error:  # Each store raises its own types of errors.
            reason = first_line(error).replace(self.url, shown(self.url))
            kind = type(error).__name__
            raise RawTextsError(
                f"{shown(self.url)} cannot be fetched ({kind}: {reason}): {CHECK}"
            ) from error

    def _copy(self, store: Any, path: str, target: Path) -> None:
        """Download a file completely or not at all."""
        logger.info("fetching %s", shown(store.unstrip_protocol(path)))
        write_file(target, lambda part: store.get_file(path, str(part)))


def _is_file(store: Any, path: str) -> bool:
    """Return whether `path` is a file. (fsspec's HTTP `isfile` downloads the file.)"""
    try:
        return bool(store.info(path)["type"] == "file")
    except FileNotFoundError:
        return False


def _stamps(store: Any, found: Mapping[str, str]) -> dict[str, str | None]:
    return {name: _stamp(store.info(path)) for name, path in found.items()}


def _stamp(info: Mapping[str, Any]) -> str | None:
    """Return a hash of a file's remote metadata, or None if it cannot show changes."""
    if not set(info) - TELLS_NO_CHANGE:
        return None
    text = json.dumps(info, sort_keys=True, default=str)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))
