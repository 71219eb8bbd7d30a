"""Copies of files of a store that fsspec supports (s3://, gs://, hf://, https://).

Rows are read several times and files are hashed, so each file is downloaded once, and
again only if the store reports a change. fsspec's `filecache` treats a partial
download as the whole file, and detects no change over https.
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
from flatout.engine.files.atomic_write import clear_leftovers, write_file
from flatout.engine.parameters.faults import first_line

logger = logging.getLogger(__name__)

STAMPS = ".stamps.json"
"""File in the folder of the copies: the store's metadata of each file."""
CHECK = "check the address, the network and the entry's credentials"
TELLS_NO_CHANGE = frozenset({"name", "size", "type", "url", "mimetype", "partial"})
"""Metadata fields that may stay the same when the bytes of a file change."""


def shown(url: str) -> str:
    """URL without user, password and query, which may contain a signing key."""
    parts = urlsplit(url)
    host = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{host}{parts.path}"


@dataclass(frozen=True)
class RemoteFiles:
    """A file of a store, or all files below a folder that `wanted` accepts."""

    url: str
    cache: Path
    wanted: Callable[[Path], Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options for fsspec: credentials, endpoint."""

    @property
    def folder(self) -> Path:
        """The folder of the copies."""
        name = PurePosixPath(urlsplit(self.url).path).name or "files"
        return self.cache / f"{name}-{xxhash.xxh3_64_hexdigest(self.url.encode())}"

    def fetch(self) -> Path:
        """Update the copies; return their folder, or the path of the one file. Raises
        RawTextsError."""
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
        """Hash of the store's current metadata of each file. Raises RawTextsError."""
        with self._errors():
            store, found, _ = self._find()
            return _stamps(store, found)

    def fetched_stamps(self) -> dict[str, str | None]:
        """Hash of the metadata of each copied file at the time of the copy."""
        try:
            return dict(json.loads((self.folder / STAMPS).read_text(encoding="utf-8")))
        except (OSError, ValueError):
            return {}

    def _find(self) -> tuple[Any, dict[str, str], bool]:
        """Return the store, its paths by their names below the address, and whether the
        address is that of one file."""
        from fsspec.core import url_to_fs

        store, root = url_to_fs(self.url, **self.options)
        store.invalidate_cache()
        if not self.url.endswith("/") and _is_file(store, root):
            return store, {PurePosixPath(urlsplit(self.url).path).name: root}, True
        start = len(root.rstrip("/")) + 1
        names = {path[start:]: path for path in sorted(store.find(root))}
        found = {
            n: p for n, p in names.items() if _is_plain(n) and self.wanted(Path(n))
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
        except ImportError as error:  # the message names the package
            text = f"{shown(self.url)} cannot be read here: {error}"
            raise RawTextsError(text) from error
        except Exception as error:  # each store raises different errors
            reason = first_line(error).replace(self.url, shown(self.url))
            kind = type(error).__name__
            raise RawTextsError(
                f"{shown(self.url)} cannot be fetched ({kind}: {reason}): {CHECK}"
            ) from error

    def _copy(self, store: Any, path: str, target: Path) -> None:
        """Copy a file completely or not at all."""
        logger.info("fetching %s", shown(store.unstrip_protocol(path)))
        write_file(target, lambda part: store.get_file(path, str(part)))


def _is_file(store: Any, path: str) -> bool:
    """Return true for a file. (HTTP's `isfile` requests the whole file.)"""
    try:
        return bool(store.info(path)["type"] == "file")
    except FileNotFoundError:
        return False


def _stamps(store: Any, found: Mapping[str, str]) -> dict[str, str | None]:
    return {name: _stamp(store.info(path)) for name, path in found.items()}


def _stamp(info: Mapping[str, Any]) -> str | None:
    """Hash of a file's metadata in the store; None if it would not show a change."""
    if not set(info) - TELLS_NO_CHANGE:
        return None
    text = json.dumps(info, sort_keys=True, default=str)
    return str(xxhash.xxh3_128_hexdigest(text.encode()))


def _is_plain(name: str) -> bool:
    """True for a file below the folder that is not hidden or a marker (_SUCCESS)."""
    return not any(p.startswith((".", "_")) or not p for p in name.split("/"))
