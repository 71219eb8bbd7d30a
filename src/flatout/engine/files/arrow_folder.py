"""Write folders of Arrow files in the format of `datasets.load_from_disk`.

Rows are streamed: a recipe yields record batches, small batches are merged, and only
one shard is open for writing at a time.
"""

from __future__ import annotations

import json
import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa

from flatout.engine.files.content_key import ContentKey
from flatout.engine.files.keyed_folder import write_whole
from flatout.engine.files.mirror import Mirror, MirrorError

logger = logging.getLogger(__name__)

MERGE_BYTES = 32 << 20
"""Small record batches are merged up to this size before they are written."""
SHARD_BYTES = 1 << 30


class ArrowRecipe(ABC):
    """A recipe that creates the rows of a table. `key` is the table's content key."""

    key: ContentKey
    mirror: str | None = None
    """URL of a store with copies of folders that recipes have written, or None. Copies
    are named after the digests of their keys."""

    @property
    @abstractmethod
    def schema(self) -> Any:
        """Arrow schema of the rows."""

    @abstractmethod
    def batches(self) -> Iterator[Any]:
        """Yield the rows as record batches."""

    def prepare(self, folder: Path) -> None:  # noqa: B027
        """Prepare to yield batches. `folder` may be used for temporary files."""

    def facts(self) -> dict[str, Any]:
        """Return statistics to store with the rows. Call this after the last batch."""
        return {}

    def to_dataset(self) -> Any:
        """Return the rows as a `datasets.Dataset` in memory."""
        from datasets import Dataset

        return Dataset(pa.Table.from_batches(self.batches(), self.schema))


def without_indices(dataset: Any) -> Any:
    """Return `dataset` with an Arrow table that contains only the rows of `dataset`.
    (`select` and `shuffle` keep the whole table and store row numbers alongside.)"""
    return dataset if dataset._indices is None else dataset.flatten_indices()


def write_recipe(folder: Path, recipe: ArrowRecipe) -> None:
    """Write the rows of `recipe` to `folder` atomically, and upload a copy to its
    mirror, if it has one. If the mirror already has a copy, download it instead. If the
    mirror cannot be used, a warning is logged."""

    def fill(target: Path) -> dict[str, Any]:
        return {"rows": _write_tables(target, recipe), **recipe.facts()}

    mirror = Mirror(recipe.mirror, "tokenize.mirror") if recipe.mirror else None
    name = f"{folder.name}-{recipe.key.digest}"
    try:
        if mirror and mirror.with_retries(mirror.copies).get(name):
            mirror.with_retries(lambda: mirror.download(name, folder))
            logger.info("%s: downloaded from %s", folder.name, mirror.shown)
            return
    except MirrorError as error:
        logger.warning("%s", error)
    write_whole(folder, recipe.key, fill)
    try:
        if mirror:
            mirror.with_retries(lambda: mirror.upload(folder, name))
    except MirrorError as error:
        logger.warning("%s", error)


def _write_tables(folder: Path, recipe: ArrowRecipe) -> int:
    """Write the rows as `Dataset.save_to_disk` would, and return their number."""
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
    """Yield the rows of small batches in batches of about MERGE_BYTES, because a few
    large batches are read faster."""
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
    return pa.Table.from_batches(batches, schema).combine_chunks().to_batches()[0]


class Spool:
    """Stores batches in temporary files, compressed with LZ4. A new file begins when
    the schema changes. The files have no name, so their space is freed even if the
    process is killed. `folder` is by default the system's temporary folder."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder or Path(tempfile.gettempdir())
        self._folder.mkdir(parents=True, exist_ok=True)
        self._files: list[Any] = []
        self._schema: Any = None
        self._writer: Any = None

    def add(self, batch: Any) -> None:
        if batch.schema != self._schema:
            self.close()
            self._schema = batch.schema
            self._files.append(tempfile.TemporaryFile(dir=self._folder))
            packed = pa.ipc.IpcWriteOptions(compression="lz4")
            self._writer = pa.ipc.new_file(
                self._files[-1], batch.schema, options=packed
            )
        self._writer.write_batch(batch)

    def close(self) -> None:
        """Finish the current file."""
        if self._writer is not None:
            self._writer.close()
            self._files[-1].flush()

    def __iter__(self) -> Iterator[Any]:
        """Yield the stored batches one at a time. The iteration may be repeated."""
        for file in self._files:
            reader = pa.ipc.open_file(file)
            for index in range(reader.num_record_batches):
                yield reader.get_batch(index)
