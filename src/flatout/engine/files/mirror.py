"""Copy folders to and from object stores and other file systems that fsspec supports.

A copy consists of the files of a folder and a list of their sizes and hashes, which is
written last. A copy without this list is an unfinished upload and is never read.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flatout.engine.files.atomic_write import child, write_folder
from flatout.engine.files.content_key import file_hash
from flatout.engine.parameters.faults import first_line
from flatout.engine.parameters.secrets import without_password

logger = logging.getLogger(__name__)

COMPLETE = "complete.json"
RETRY_S = 60.0
"""Failed requests to a store are retried for this many seconds."""
LASTING = (ImportError, FileNotFoundError, PermissionError, ValueError)
NO_LOGIN = ("NoCredentialsError", "PartialCredentialsError")

Found = TypeVar("Found")


class MirrorError(ValueError):
    """Raised if a store cannot be used. The message gives the cause and a fix."""

    exit_code = 2


class DamagedCopyError(MirrorError):
    """Raised if the files of a copy differ from the files that were uploaded."""


@dataclass(frozen=True)
class Mirror:
    """A store of named copies below a URL such as s3://bucket/run."""

    url: str
    parameter: str
    """Name of the parameter that contains the URL, used in messages."""

    @property
    def shown(self) -> str:
        return without_password(self.url)

    def copies(self) -> dict[str, bool]:
        """Return whether each copy is complete, by the copy's name, sorted."""
        files, root = self._place
        files.invalidate_cache()
        found: dict[str, bool] = {}
        for path in sorted(files.find(root)):
            name, _, file = path.removeprefix(f"{root}/").partition("/")
            if file:
                found[name] = found.get(name, False) or file == COMPLETE
        return found

    def upload(
        self, folder: Path, name: str, seal: Callable[[], None] = lambda: None
    ) -> None:
        """Upload the files of `folder` as the copy `name`. `seal` is called before the
        copy is marked as complete. If it raises an error, the copy is not marked."""
        sizes = {}
        for path in sorted(path for path in folder.iterdir() if path.is_file()):
            self._place[0].put_file(str(path), self._path(f"{name}/{path.name}"))
            sizes[path.name] = [path.stat().st_size, file_hash(path)]
        seal()
        self.write(f"{name}/{COMPLETE}", json.dumps(sizes))

    def download(self, name: str, folder: Path) -> None:
        """Download the copy `name` to `folder`, atomically. Raises DamagedCopyError if
        its files differ from the files that were uploaded."""
        sizes = self.read_json(f"{name}/{COMPLETE}")
        if not sizes:
            raise DamagedCopyError(f"{self.shown}/{name}/{COMPLETE} is damaged")
        write_folder(folder, lambda hidden: self._fetch(name, sizes, hidden))

    def _fetch(self, name: str, sizes: dict[str, Any], folder: Path) -> None:
        for file, facts in sizes.items():
            path = child(folder, file)
            with suppress(FileNotFoundError):
                self._place[0].get_file(self._path(f"{name}/{file}"), str(path))
            if not path.exists() or [path.stat().st_size, file_hash(path)] != facts:
                raise DamagedCopyError(f"{self.shown}/{name}/{file} is damaged")

    def remove(self, name: str) -> None:
        """Mark the copy `name` as unfinished, then remove its files."""
        for path in (f"{name}/{COMPLETE}", name):
            with suppress(FileNotFoundError):
                self._place[0].rm(self._path(path), recursive=True)

    def read(self, file: str) -> str | None:
        """Return the text of a file below the URL, or None if it does not exist."""
        try:
            return str(self._place[0].cat_file(self._path(file)).decode())
        except FileNotFoundError:
            return None

    def read_json(self, file: str) -> dict[str, Any]:
        """Return the JSON object in a file, or {} if it is missing or invalid."""
        with suppress(ValueError):
            found = json.loads(self.read(file) or "{}")
            return found if isinstance(found, dict) else {}
        return {}

    def write(self, file: str, text: str) -> None:
        self._place[0].pipe_file(self._path(file), text.encode())

    def with_retries(self, work: Callable[[], Found]) -> Found:
        """Call `work` and return its result. If `work` raises an error, it is called
        again for up to RETRY_S seconds. Raises MirrorError if `work` still fails then,
        or immediately if the error is permanent."""
        begin_s, pause_s = time.monotonic(), 1.0
        while True:
            try:
                return work()
            except MirrorError:
                raise
            except Exception as error:  # Each store raises its own types of errors.
                reason = f"{self.shown} ({type(error).__name__}: {first_line(error)})"
                lasts = isinstance(error, LASTING) or type(error).__name__ in NO_LOGIN
                if lasts or time.monotonic() - begin_s > RETRY_S:
                    raise MirrorError(
                        f"{self.parameter}: no access to {reason}: check the address, "
                        "the network and this user's credentials, or set it to null"
                    ) from error
            logger.warning("no access to %s; trying again", reason)
            time.sleep(pause_s)
            pause_s *= 2

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """The fsspec file system of the URL, and the URL's path in this file system."""
        import fsspec

        is_local = urlsplit(self.url).scheme in ("", "file", "local")
        options = {"auto_mkdir": True} if is_local else {}
        files, root = fsspec.url_to_fs(self.url, **options)
        return files, root.rstrip("/")

    def _path(self, file: str) -> str:
        return f"{self._place[1]}/{file}"
