"""Folders of Arrow files as `datasets.load_from_disk` reads them: whole or absent.

Rows are streamed into a folder beside the target, which takes the target's place
only when every file is on the disk and the key file, written last, is too.
"""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.content_key import ContentKey, arrow_digest

KEY_FILE = "flatout_key.json"
MERGE_BYTES = 32 << 20
"""Small record batches are merged up to this size before they are written."""
SHARD_BYTES = 1 << 30
REPLACE_ATTEMPTS = 3


class StorageError(OSError):
    """The disk would not take the data; says what was kept and what to do."""


class ArrowRecipe(ABC):
    """How to make a table, and the key of what it will hold."""

    key: ContentKey

    @property
    @abstractmethod
    def schema(self) -> Any:
        """Arrow schema of the rows."""

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """The rows as record batches."""

    def facts(self) -> dict[str, Any]:
        """What was counted on the way; asked for once the batches are through."""
        return {}

    def to_dataset(self) -> Any:
        """The rows as a `datasets.Dataset` in memory."""
        from datasets import Dataset

        return Dataset(pa.Table.from_batches(self.batches(), self.schema))


@dataclass(frozen=True)
class TableRecipe(ArrowRecipe):
    """Rows that are there already: keyed by what they hold."""

    table: Any

    @property
    def key(self) -> ContentKey:  # type: ignore[override]
        return ContentKey({"rows": arrow_digest([self.table])})

    @property
    def schema(self) -> Any:
        return self.table.schema.remove_metadata()

    def batches(self) -> Iterator[Any]:
        yield from self.table.replace_schema_metadata().to_batches()


def without_indices(dataset: Any) -> Any:
    """A `datasets.Dataset` whose table is its rows: `select` and `shuffle` only leave
    numbers of rows beside the whole table."""
    return dataset if dataset._indices is None else dataset.flatten_indices()


def is_current(folder: Path, key: ContentKey) -> bool:
    """Whether `folder` holds, complete, what `key` describes."""
    stored = _read_key_file(folder)
    if stored is None or stored["digest"] != key.digest:
        return False
    return all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in stored["files"].items()
    )


def stored_key(folder: Path) -> ContentKey | None:
    """The key that `folder` was written with; None where there is none."""
    stored = _read_key_file(folder)
    return None if stored is None else ContentKey(stored["fields"])


def stored_facts(folder: Path) -> dict[str, Any]:
    """What the recipe counted while it was carried out."""
    stored = _read_key_file(folder)
    return {} if stored is None else dict(stored.get("facts", {}))


def _read_key_file(folder: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads((folder / KEY_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return stored if {"digest", "fields", "files"} <= set(stored) else None


def write_recipe(folder: Path, recipe: ArrowRecipe) -> int:
    """Write the rows of `recipe` to `folder`, whole or not at all. Returns rows."""
    rows = 0

    def fill(target: Path) -> dict[str, Any]:
        nonlocal rows
        rows = _write_tables(target, recipe)
        return {"rows": rows, **recipe.facts()}

    write_whole(folder, recipe.key, fill)
    return rows


def write_whole(
    folder: Path, key: ContentKey, fill: Callable[[Path], dict[str, Any]]
) -> None:
    """Let `fill` write files into a new folder, then put it in `folder`'s place. What
    `fill` returns is kept beside the key.

    Raises StorageError where the disk is full or not writable; what `folder` held
    before is untouched then.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder)
    mark = f"{platform.node()}-{os.getpid()}-{uuid.uuid4().hex}"
    target = folder.with_name(f".{folder.name}.writing-{mark}")
    try:
        target.mkdir()
        facts = fill(target)
        _write_key_file(target, key, facts)
        _replace(folder, target)
    except BaseException as error:
        shutil.rmtree(target, ignore_errors=True)
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise _storage_error(folder, error) from error
        raise


def _sweep(folder: Path) -> None:
    """Remove what killed processes of this machine left half-written."""
    for rest in folder.parent.glob(f".{folder.name}.writing-{platform.node()}-*"):
        if not _is_alive(int(rest.name.rsplit("-", 2)[1])):
            shutil.rmtree(rest, ignore_errors=True)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def _write_key_file(folder: Path, key: ContentKey, facts: dict[str, Any]) -> None:
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    for name in files:
        _sync(folder / name)
    record = {
        "digest": key.digest,
        "fields": dict(key.fields),
        "facts": facts,
        "files": files,
    }
    text = json.dumps(record, indent=2, ensure_ascii=False)
    (folder / KEY_FILE).write_text(text, encoding="utf-8")
    _sync(folder / KEY_FILE)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _replace(folder: Path, target: Path) -> None:
    """Put `target` in the place of `folder`. Readers that mapped the old files keep
    them; a crash between the two renames leaves no folder, never a mixed one."""
    for attempt in range(REPLACE_ATTEMPTS):
        old = target.with_name(f"{target.name}.old{attempt}")
        with suppress(FileNotFoundError):  # another process moved it just now
            os.rename(folder, old)
        try:
            os.rename(target, folder)
            break
        except OSError:  # another process put its own there just now
            if attempt == REPLACE_ATTEMPTS - 1:
                raise
        finally:
            shutil.rmtree(old, ignore_errors=True)
    _sync(folder.parent)


def _storage_error(folder: Path, error: OSError) -> StorageError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        cause = "the disk is full (or a limit on file size was met)"
    else:
        cause = str(error)
    return StorageError(
        f"{folder} could not be written: {cause}. Nothing was changed there. Free "
        "space, or keep the data elsewhere with --params=data_dir=/another/disk"
    )


def _write_tables(folder: Path, recipe: ArrowRecipe) -> int:
    """Shards, then the two JSON files of `save_to_disk`. Returns the rows."""
    from datasets import DatasetInfo, Features

    shards: list[Path] = []
    rows = 0
    batches = merge_batches(recipe.batches(), recipe.schema)
    pending = next(batches, None)
    while pending is not None or not shards:
        part = folder / f"part-{len(shards):05d}.arrow"
        with pa.OSFile(str(part), "wb") as sink:
            written = 0
            with pa.ipc.new_stream(sink, recipe.schema) as writer:
                while pending is not None and written < SHARD_BYTES:
                    writer.write_batch(pending)
                    written += pending.nbytes
                    rows += pending.num_rows
                    pending = next(batches, None)
        shards.append(part)
    for index, part in enumerate(shards):
        part.rename(folder / f"data-{index:05d}-of-{len(shards):05d}.arrow")
    features = Features.from_arrow_schema(recipe.schema)
    DatasetInfo(features=features).write_to_directory(str(folder))
    _write_state(folder, recipe.key.digest[:16])
    return rows


def _write_state(folder: Path, fingerprint: str) -> None:
    state: dict[str, Any] = {
        "_data_files": [{"filename": p.name} for p in sorted(folder.glob("*.arrow"))],
        "_fingerprint": fingerprint,
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": None,
    }
    (folder / "state.json").write_text(json.dumps(state, indent=2))


def merge_batches(
    batches: Iterable[pa.RecordBatch], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """Merge small batches into ones of about MERGE_BYTES: few, for fast reading."""
    pending: list[pa.RecordBatch] = []
    size = 0
    for batch in batches:
        if not batch.num_rows:
            continue
        pending.append(batch)
        size += batch.nbytes
        if size >= MERGE_BYTES:
            yield _merged(pending, schema)
            pending, size = [], 0
    if pending:
        yield _merged(pending, schema)


def _merged(batches: list[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    if len(batches) == 1:
        return batches[0]
    table = pa.Table.from_batches(batches, schema).combine_chunks()
    return table.to_batches()[0]
