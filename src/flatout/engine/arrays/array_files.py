"""Read numeric data from Parquet, CSV, .npz and HDF5 files, and open data sources."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar
from zipfile import BadZipFile

import numpy as np

from flatout.engine.arrays import tables
from flatout.engine.arrays.sources import (
    ArraysError,
    ArraySource,
    Files,
    Window,
    as_numbers,
    files_of,
    name_in,
    rows_between,
)
from flatout.engine.data.columns import column_faults, cut_text, excerpt, listed
from flatout.engine.data.rows import with_broken_rows
from flatout.engine.parameters import ArraySettings, ImageSettings

HDF5 = (".h5", ".hdf5", ".hdf")
ENDINGS = (*tables.ENDINGS, ".npz", *HDF5)
INDEX = re.compile(r"__index_level_\d+__")
"""Matches the names that pandas gives to index columns in Parquet files."""


@dataclass(frozen=True)
class ArrayFiles:
    """A file, or a folder of files of the same type, with one sample per row."""

    path: Path
    inputs: tuple[str, ...]
    """Names of the input columns of a table, or of the input array in a .npz or HDF5
    file. If empty, all columns or arrays except the label are used."""
    label: str | None
    """Name of the column or array that contains the labels."""
    is_labelled: bool = True
    """Whether labels are required. If this is False, labels are not read."""
    trained_on: tuple[str, ...] = ()
    """The input columns on which a model was trained. If `inputs` is empty, these
    columns are read from each table that contains at least one of them."""
    kind: ClassVar = "arrays"

    @property
    def options(self) -> dict[str, Any]:
        return {"arrays.inputs": list(self.inputs), "split.label_column": self.label}

    @cached_property
    def files(self) -> Files:
        root = self.path if self.path.is_dir() else self.path.parent
        return Files(root, files_of(self.path, ENDINGS))

    def facts(self) -> dict[str, Any]:
        return {}

    def labels(self) -> Iterator[Any]:
        label = self._read_label
        for file in self.files.paths if label else ():
            if file.suffix.lower() in tables.ENDINGS:
                table = tables.table(file)
                self._check_columns(file, table.column_names)
                for batch in table.batches([str(label)]):
                    yield from tables.labels(batch, str(label))
                continue
            with _arrays(file) as arrays:
                self._check_label(file, arrays)
                yield from _labels_one_dim(file, arrays[str(label)])[:].tolist()

    @property
    def _read_label(self) -> str | None:
        return self.label if self.is_labelled else None

    def windows(self) -> Iterator[Window]:
        for file in self.files.paths:
            is_table = file.suffix.lower() in tables.ENDINGS
            yield from self._table(file) if is_table else self._stored(file)

    def _table(self, file: Path) -> Iterator[Window]:
        table, label = tables.table(file), self._read_label
        names = table.column_names
        chosen = self._inputs_in(names)
        if sorted(chosen) == sorted(self._first_inputs):
            chosen = self._first_inputs
        self._check_columns(file, names, chosen)
        if not chosen:
            raise ArraysError(f"{file}: no column but the label {self.label!r}")
        for read in table.batches([*chosen, *([label] if label else [])]):
            batch, broken = with_broken_rows(read)
            inputs = {name: batch.columns[name] for name in chosen}
            values, faults = tables.samples(file, replace(batch, columns=inputs))
            labels = tables.labels(batch, label) if label else None
            start = int(batch.rows[0]) if len(batch.rows) else 0
            shown = {
                n: cut_text(", ".join(excerpt(c[n]) for c in batch.columns.values()))
                for n in faults
            } | {one.row - start: one.excerpt for one in read.broken}
            faults |= broken
            name = name_in(self.path, file)
            yield Window(name, start, values, labels, faults, excerpts=shown)

    def _inputs_in(self, names: Sequence[str]) -> list[str]:
        trained = self.trained_on if {*self.trained_on} & {*names} else ()
        found = self.inputs or trained or [n for n in names if not INDEX.fullmatch(n)]
        return [n for n in found if n != self.label]

    @property
    def column_names(self) -> list[str]:
        """The names of the input columns of a table, or an empty list for arrays."""
        is_table = self.files.paths[0].suffix.lower() in tables.ENDINGS
        return self._first_inputs if is_table else []

    @cached_property
    def _first_inputs(self) -> list[str]:
        """The input columns of the first file, in the order used for all files."""
        return self._inputs_in(tables.table(self.files.paths[0]).column_names)

    def _check_columns(
        self, file: Path, names: Sequence[str], chosen: Sequence[str] = ()
    ) -> None:
        """Raise ArraysError unless the label column and the columns `chosen` exist
        exactly once."""
        wanted = {f"arrays.inputs[{n}]": name for n, name in enumerate(chosen)}
        label = {"split.label_column": self._read_label}
        if fault := column_faults(names, label | wanted, "raw_arrays"):
            raise ArraysError(f"{file} has the columns {listed(names)}. {fault}")

    def _stored(self, file: Path) -> Iterator[Window]:
        with _arrays(file) as arrays:
            self._check_label(file, arrays)
            values = arrays[self._chosen(file, arrays)]
            if not values.ndim:
                raise ArraysError(f"{file}: {self._chosen(file, arrays)} is one number")
            labels = None
            if self._read_label:
                labels = _labels_one_dim(file, arrays[self._read_label])
            if labels is not None and len(labels) != len(values):
                raise ArraysError(
                    f"{file}: {len(values)} samples and {len(labels)} labels"
                )
            row_bytes = math.prod(values.shape[1:]) * values.dtype.itemsize
            for start, stop in rows_between(len(values), row_bytes):
                numbers = as_numbers(values[start:stop])
                if numbers is None:
                    why = f"the values are {values.dtype}, not numbers"
                    raise ArraysError(f"{file}: {why}")
                if numbers.ndim == 1:  # Each sample is a single number.
                    numbers = numbers[:, None]
                own = None if labels is None else labels[start:stop].tolist()
                yield Window(name_in(self.path, file), start, numbers, own)

    def _chosen(self, file: Path, arrays: Mapping[str, Any]) -> str:
        found = [n for n in self.inputs or arrays if n != self.label and n in arrays]
        if len(found) != 1:
            raise ArraysError(
                f"{file} has the arrays {sorted(arrays)}: name the one of the samples "
                "in arrays.inputs"
            )
        return str(found[0])

    def _check_label(self, file: Path, names: Any) -> None:
        if self._read_label and self.label not in names:
            raise ArraysError(
                f"{file}: no array is called {self.label!r} (split.label_column); it "
                f"has {sorted(names)}{'' if names else ' outside of groups'}"
            )


def _labels_one_dim(file: Path, labels: Any) -> Any:
    """Return labels of shape (N,) or (N, 1) as (N,). Raises ArraysError if `labels` has
    any other shape."""
    if labels.ndim == 2 and labels.shape[1] == 1:
        return labels[:, 0]
    if labels.ndim != 1:
        raise ArraysError(
            f"{file}: the labels have the shape {labels.shape}: a sample has one. "
            "Store the number or the name of its class (of one-hot rows "
            "labels.argmax(1))"
        )
    return labels


@contextmanager
def _arrays(file: Path) -> Iterator[Mapping[str, Any]]:
    """Context manager that opens a file and yields its arrays by name. HDF5 arrays are
    read in slices. Raises ArraysError if the file cannot be read."""
    if file.suffix.lower() not in (".npz", *HDF5):
        raise ArraysError(
            f"{file} has a file type other than {', '.join(ENDINGS)}: use numpy.savez"
        )
    try:
        if file.suffix.lower() == ".npz":
            with np.load(file, allow_pickle=False) as opened:
                yield dict(opened)
        else:
            with _h5py(file).File(file, "r") as opened:
                yield {n: a for n, a in opened.items() if hasattr(a, "dtype")}
    except ArraysError:
        raise
    except (OSError, EOFError, ValueError, BadZipFile, zlib.error) as error:
        raise ArraysError(f"{file} cannot be read: {error}") from error


def _h5py(file: Path) -> Any:
    try:
        import h5py
    except ImportError as error:
        text = f"{file} requires h5py: pip install 'flatout[arrays]'"
        raise ArraysError(text) from error
    return h5py


def open_source(
    path: Path,
    label: str | None,
    own: ArraySettings | ImageSettings,
    *,
    is_labelled: bool = True,
) -> ArraySource:
    """Return a source of the samples in the file or folder `path`. Labels, in the
    column `label`, are required if `is_labelled` is True, and not read otherwise. `own`
    contains the parameters of arrays or images."""
    if isinstance(own, ArraySettings):
        return ArrayFiles(path, tuple(own.inputs), label, is_labelled)
    from flatout.engine.arrays.image_files import ImageFiles
    from flatout.engine.rows.decoding import Decoder

    decoder, keeps_files = Decoder(own.size, own.channels), own.keep == "files"
    label = label if is_labelled else None
    return ImageFiles(path, label, own.image_column, decoder, is_labelled, keeps_files)
