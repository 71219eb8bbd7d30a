"""The built-in corpus: docstrings of flatout's dependencies, labelled by package.

It is real text, with a realistic distribution of lengths, and needs no download.
"""

from __future__ import annotations

import importlib.util
import logging
from concurrent.futures import ProcessPoolExecutor
from importlib import metadata
from itertools import zip_longest
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from kedro.io import DatasetError

from flatout.datasets._docstrings import docstrings_of
from flatout.datasets._entry import ReadOnlyDataset
from flatout.engine.files.atomic_write import clear_leftovers, write_file
from flatout.engine.files.content_key import ContentKey
from flatout.engine.machine.environment import usable_cores
from flatout.engine.machine.signals import die_with_parent

logger = logging.getLogger(__name__)

PACKAGES = {
    "torch": "torch",
    "transformers": "transformers",
    "sympy": "sympy",
    "sklearn": "scikit-learn",
    "pandas": "pandas",
    "mlflow": "mlflow",
    "matplotlib": "matplotlib",
    "sqlalchemy": "SQLAlchemy",
    "databricks": "databricks-sdk",
    "fontTools": "fonttools",
    "scipy": "scipy",
    "networkx": "networkx",
}
"""Maps modules to distributions. The first ones that are installed become the
labels."""
FORMAT_VERSION = 1
"""Increase this if the code creates different rows from the same packages."""
FILES_A_CHUNK = 24
SURPLUS = 1.05
"""Ratio of texts collected to texts needed. The surplus replaces duplicates."""


class DocstringCorpus(ReadOnlyDataset):
    """Docstrings as read-only rows with the columns `text` and `label` (package name).

    The corpus has `rows` rows, balanced over `labels` packages. If `rows` is null, all
    docstrings of these packages are used. The texts are stored in the folder
    `filepath`, with a Parquet file for each combination of package versions and sizes.
    """

    content = "docstrings"

    def __init__(
        self,
        *,
        filepath: str,
        rows: int | None = 12_000,
        labels: int = 10,
        metadata: dict[str, Any] | None = None,
    ) -> None:
        self._folder = Path(filepath)
        self._rows, self._labels = rows, labels
        self.metadata = metadata

    def load(self) -> Any:
        packages = _installed(self._labels)
        file = self._file(packages)
        if file.is_file():
            logger.info("docstrings: unchanged, read from %s", file.name)
        else:
            logger.info("docstrings: parsing %s", ", ".join(packages))
            table = _table(list(packages), self._rows)
            clear_leftovers(file.parent)
            write_file(file, lambda path: pq.write_table(table, path))
        from datasets import Dataset

        return Dataset(pq.read_table(file).replace_schema_metadata())

    @property
    def is_parsed(self) -> bool:
        """Return whether the corpus is already stored and needs no parsing."""
        return self._file(_installed(self._labels)).is_file()

    def _file(self, packages: dict[str, str]) -> Path:
        fields = {"format": FORMAT_VERSION, "rows": self._rows, "packages": packages}
        return self._folder / f"docstrings-{ContentKey(fields).digest[:12]}.parquet"

    def _describe(self) -> dict[str, Any]:
        counts = {"rows": self._rows, "labels": self._labels}
        return {"filepath": str(self._folder), **counts}


def _installed(labels: int) -> dict[str, str]:
    """Return the first `labels` installed packages and their versions. Raises
    DatasetError if fewer are installed."""
    found: dict[str, str] = {}
    for module, distribution in PACKAGES.items():
        if importlib.util.find_spec(module) and len(found) < labels:
            found[module] = metadata.version(distribution)
    if len(found) < labels:
        raise DatasetError(
            f"corpus.labels is {labels}, and {len(found)} of the packages whose "
            f"docstrings are used are installed ({', '.join(found)}): set fewer"
        )
    return found


def _table(packages: list[str], rows: int | None) -> pa.Table:
    """Return a table of `rows` distinct texts with their labels, ordered by hash. If
    `rows` is None, all texts are returned. Otherwise, all packages contribute equally.
    If a package has too few texts, the others contribute more."""
    wanted = None if rows is None else -(-rows // len(packages))
    texts = _gather(packages, None if wanted is None else int(wanted * SURPLUS))
    seen: set[str] = set()
    by_label: dict[str, list[str]] = {}
    for label, found in texts.items():
        by_label[label] = sorted(set(found) - seen, key=_hash)
        seen.update(by_label[label])
    total = len(seen) if rows is None else rows
    chosen: list[tuple[str, str]] = []
    fewest_first = sorted(by_label.items(), key=lambda item: len(item[1]))
    for index, (label, own) in enumerate(fewest_first):
        share = (total - len(chosen)) // (len(by_label) - index)
        chosen += [(text, label) for text in own[:share]]
    chosen.sort(key=lambda pair: _hash(pair[0]))
    columns = list(zip(*chosen, strict=True))
    return pa.table({"text": list(columns[0]), "label": list(columns[1])})


def _hash(text: str) -> int:
    return xxhash.xxh3_64_intdigest(text.encode())


def _gather(packages: list[str], wanted: int | None) -> dict[str, list[str]]:
    """Return the texts of each package, from its files in order. A package is complete
    if at least `wanted` distinct texts have been found or all of its files have been
    parsed. The packages take turns, so that complete ones are parsed no further."""
    texts: dict[str, list[str]] = {package: [] for package in packages}
    turns = zip_longest(*map(_chunks, packages))
    processes = ProcessPoolExecutor(
        usable_cores(), get_context("spawn"), die_with_parent
    )
    try:
        parsed = [
            (package, processes.submit(docstrings_of, chunk))
            for turn in turns
            for package, chunk in zip(packages, turn, strict=True)
            if chunk
        ]
        import datasets  # noqa: F401  imported while the workers parse

        for package, found in parsed:
            if _is_complete(texts[package], wanted):
                continue
            texts[package] += found.result()
            if _is_complete(texts[package], wanted):
                for later in (job for owner, job in parsed if owner == package):
                    later.cancel()
    finally:  # Ctrl-C does not wait for the other chunks
        processes.shutdown(cancel_futures=True)
    return texts


def _is_complete(texts: list[str], wanted: int | None) -> bool:
    return wanted is not None and len(set(texts)) >= wanted


def _chunks(package: str) -> list[list[str]]:
    files = _files(package)
    return [files[n : n + FILES_A_CHUNK] for n in range(0, len(files), FILES_A_CHUNK)]


def _files(package: str) -> list[str]:
    """Return the Python files of a package without its tests, ordered by hash."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.submodule_search_locations  # noqa: S101
    root = Path(next(iter(spec.submodule_search_locations)))
    files = [
        path.relative_to(root).as_posix()
        for path in root.rglob("*.py")
        if not {"tests", "test"} & set(path.relative_to(root).parts)
    ]
    return [str(root / name) for name in sorted(files, key=_hash)]
