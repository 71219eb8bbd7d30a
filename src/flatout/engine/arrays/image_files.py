"""Read images from one folder per class, or from the files listed in a manifest."""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from flatout.engine.arrays import tables
from flatout.engine.arrays.sources import (
    ArraysError,
    Files,
    Window,
    files_of,
    name_in,
    rows_between,
)
from flatout.engine.data.column_checks import Faults, read_class, read_text
from flatout.engine.data.columns import column_faults, listed
from flatout.engine.data.given_splits import SPLIT_CODES
from flatout.engine.data.raw_texts import RawBatch
from flatout.engine.data.readers.file_reader import files_below
from flatout.engine.data.readers.text_files import TextFiles
from flatout.engine.data.rows import with_broken_rows
from flatout.engine.machine.environment import usable_cores
from flatout.engine.rows.decoding import BadImage, Decoder

logger = logging.getLogger(__name__)

IMAGES = tuple(".png .jpg .jpeg .bmp .gif .webp .tif .tiff .ppm .pgm".split())


@dataclass
class ImageFiles:
    """A source of images. The images of each window are decoded in parallel threads."""

    path: Path
    label: str | None
    image_column: str
    decoder: Decoder
    is_labelled: bool = True
    """Whether labels are required. If this is False, labels are not read."""
    keeps_files: bool = False
    """Whether rows store the encoded image files instead of pixels."""
    kind: ClassVar = "images"

    @property
    def options(self) -> dict[str, Any]:
        return {
            "images.size": self.decoder.size,
            "images.channels": self.decoder.channels,
            "images.image_column": self.image_column,
            "images.keep": "files" if self.keeps_files else "pixels",
            "split.label_column": self.label,
        }

    @cached_property
    def files(self) -> Files:
        there = [file for file, *_ in self._listed if os.path.isfile(file)]
        manifest = [] if self.path.is_dir() else [self.path]
        return Files(self._root, [*there, *manifest])

    def facts(self) -> dict[str, Any]:
        """Return entries for the split report: the milliseconds per image of each slow
        transform and, if the source is a folder, the class folders without images and
        the number of files that are not images."""
        found: dict[str, Any] = {"slow_transforms_ms": self.decoder.slow_transforms_ms}
        if not self.path.is_dir():
            return found
        read = {file for file, *_ in self._listed}
        folders = {f.name for f in self.path.iterdir() if f.is_dir()}
        classes = {self._class_of(file) for file in read}
        empty = sorted(f for f in folders - classes if not f.startswith("."))
        others = sum(f not in read for f in files_below(self.path, (".",)))
        if empty and self.is_labelled:
            logger.warning("%s: no image in the class folders %s", self.path, empty)
        return found | {"empty_class_folders": empty, "files_of_other_kinds": others}

    def labels(self) -> Iterator[Any]:
        yield from (label for _, label, _ in self._listed)

    def windows(self) -> Iterator[Window]:
        shape = self.decoder.size, self.decoder.size, self.decoder.channels
        for start, stop in rows_between(len(self._listed), math.prod(shape)):
            files, labels, broken = zip(*self._listed[start:stop], strict=True)
            pixels = np.zeros((len(files), *shape), np.uint8)
            faults = self._decode_into(pixels, files)
            faults |= {n: reason for n, reason in enumerate(broken) if reason}
            names = [name_in(self._root, file) for file in files]
            given = labels if self.is_labelled else None
            kept = files if self.keeps_files else None
            yield Window("", start, pixels, given, faults, names, kept)
        if lost := self.decoder.lost_detail():
            logger.warning("images: %s", lost)
        for name, ms in self.decoder.slow_transforms_ms.items():
            logger.warning("images: %s needs %.1f ms per image", name, ms)

    @property
    def _root(self) -> Path:
        return self.path if self.path.is_dir() else self.path.parent

    @cached_property
    def _listed(self) -> list[tuple[Path, Any, str | None]]:
        """A tuple (file, label, rejection reason or None) for each image. Raises
        ArraysError if there are no images."""
        if self.path.is_dir():
            files = files_of(self.path, IMAGES)
            classes = list(map(self._class_of, files))
            if self.is_labelled:
                _check_classes(self.path, {name for name in classes if name})
            return [(*pair, None) for pair in zip(files, classes, strict=True)]
        if listed := list(self._manifest()):
            return listed
        raise ArraysError(f"{self.path} names no image: it has columns but no rows")

    def _manifest(self) -> Iterator[tuple[Path, Any, str | None]]:
        """Yield the file, the label and the rejection reason (or None) of each row of
        the manifest. If the file name itself is rejected, the yielded path is a
        placeholder that contains the row number. Raises ArraysError or RawTextsError if
        the manifest cannot be used."""
        is_table = self.path.suffix.lower() in tables.ENDINGS
        table = tables.table(self.path) if is_table else TextFiles(self.path)
        places = {"images.image_column": self.image_column}
        places |= {"split.label_column": self.label} if self.label else {}
        names = table.column_names
        if fault := column_faults(names, places, "raw_images"):
            raise ArraysError(f"{self.path} has the columns {listed(names)}. {fault}")
        for batch in table.batches([*places.values()]):
            yield from self._read(*with_broken_rows(batch))

    def _read(
        self, batch: RawBatch, broken: dict[int, str]
    ) -> Iterator[tuple[Path, Any, str | None]]:
        """Yield the file, the label and the rejection reason (or None) of each row of
        `batch`. Rejected labels are yielded as None."""
        faults = Faults({row: ("", reason) for row, reason in broken.items()})
        names = read_text(batch, self.image_column, faults).to_pylist()
        unread = faults.reasons.copy()
        labels = [None] * len(names)
        if self.label:
            labels = read_class(batch, self.label, faults).to_pylist()
        for at, row in enumerate(batch.rows.tolist()):
            _, fault = faults.reasons.get(at, ("", None))
            own = f"{self.path.name}:{row}" if at in unread else names[at]
            yield file_below(self._root, own), None if fault else labels[at], fault

    def _class_of(self, file: Path) -> str | None:
        """Return the name of the class folder that contains `file`, or None if the file
        is not in a subfolder."""
        parts = file.relative_to(self.path).parts
        return parts[0] if len(parts) > 1 else None

    def _decode_into(
        self, pixels: npt.NDArray[np.uint8], files: Sequence[Path]
    ) -> dict[int, str]:
        """Decode `files` (n,) into `pixels` (n, ...). Return a mapping from the index
        of each unreadable file to the error message."""
        faults: dict[int, str] = {}

        def decode(row: int) -> None:
            try:
                pixels[row] = self.decoder(files[row])
            except BadImage as error:
                faults[row] = str(error)

        with ThreadPoolExecutor(usable_cores()) as pool:
            list(pool.map(decode, range(len(files))))
        return faults


def _check_classes(path: Path, names: set[str]) -> None:
    """Raise ArraysError if the folders are named after splits instead of classes."""
    if len(names) > 1 and {name.casefold() for name in names} <= SPLIT_CODES.keys():
        raise ArraysError(
            f"{path} has the folders {sorted(names)}, which are splits, not classes: "
            "put the images of a class into one folder (split.fractions makes the "
            "splits), or name a folder with one folder per class"
        )


def file_below(root: Path, name: Any) -> Path:
    """Return the path of `name`, a file listed in a manifest in `root`. Links are not
    followed. Raises ArraysError if the path is outside `root`."""
    file, folder = (Path(os.path.abspath(path)) for path in (root / str(name), root))
    if not file.is_relative_to(folder):
        raise ArraysError(f"{name!r} leads out of the manifest's folder {root}")
    return root / file.relative_to(folder)
