"""Detect rows that were created from outdated raw data.

When rows are saved, `note_origin` stores the state of the raw data next to them: a hash
of the catalog entry and of the size, times and inode of its files. If the state differs
when a training run starts, the rows are outdated. A new split reads the raw rows, and
keeps the existing rows if their contents are the same.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash
from kedro.io import DataCatalog, DatasetError
from kedro.pipeline import Pipeline

from flatout.datasets import DocstringCorpus, KeyedArrowDataset, OwnSplits, TextFiles
from flatout.engine.data.columns import Columns
from flatout.engine.data.given_splits import entry_of
from flatout.engine.data.raw_texts import SPLITS, RawTextsError
from flatout.engine.data.readers.file_reader import files_below
from flatout.engine.data.readers.remote_files import shown
from flatout.engine.data.split_recipes import ROWS_DIGEST, split_options
from flatout.engine.files.content_key import ContentKey
from flatout.engine.files.keyed_folder import note_facts, stored_facts, stored_key
from flatout.engine.parameters import Settings
from flatout.engine.rows import KINDS, row_kind
from flatout.engine.tasks import columns_of
from flatout.project.fitting import TRAINING_NODES, raw_entry, short_names

logger = logging.getLogger(__name__)

ORIGIN = "raw_texts"
"""Key under which the state of the raw data is stored in a folder of rows."""
DECIDES_NO_ROW = ("max_rejected_fraction", "label_type", "folds")
"""Options in the `split` group that do not affect the rows."""
PLACES = ("filepath", "path")
ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
"""Matches the memory address in an object's repr, which differs in each process."""


def note_origin(catalog: DataCatalog, origin: Mapping[str, Any] | None) -> None:
    """Store the origin of the training rows in the folder of these rows."""
    folder = _folder(catalog, "train_rows")
    if folder is not None and origin is not None:
        note_facts(folder, {ORIGIN: origin})


def stale_fault(
    catalog: DataCatalog, settings: Settings, pipeline: Pipeline
) -> str | None:
    """Return why the rows of a training run are outdated, or None if they are not."""
    kind, inputs = row_kind(settings.train.rows).kind, pipeline.inputs()
    if not TRAINING_NODES & short_names(pipeline):
        return None
    if f"train_{kind}" in inputs:
        return data_fault(catalog, settings)
    return rows_fault(catalog, settings) if "train_rows" in inputs else None


def data_fault(catalog: DataCatalog, settings: Settings) -> str | None:
    """Return the reason why the training rows do not match the raw data, or None if
    they match or if the rows or the raw data are not on this machine."""
    if (kind := row_kind(settings.train.rows).kind) != "tokens":
        return samples_fault(catalog, settings, kind) if kind in KINDS else None
    if any(_is_stale(catalog, split) for split in SPLITS):
        return (
            "the tokens were created from different rows than the last split: run "
            "kedro run, or kedro run --pipelines=tokenize"
        )
    return rows_fault(catalog, settings)


def samples_fault(catalog: DataCatalog, settings: Settings, kind: str) -> str | None:
    """Return why stored rows of this `kind` (arrays or images) do not match the raw
    files, or None if they match or if the raw files are not on this machine."""
    from flatout.engine.arrays.array_files import open_source
    from flatout.engine.arrays.recipes import changes_since

    folders = [_folder(catalog, f"{split}_{kind}") for split in SPLITS]
    keys = [key for folder in folders if folder and (key := stored_key(folder))]
    try:
        path, label = catalog.load(f"raw_{kind}"), settings.split.label_column
        source = open_source(path, label, getattr(settings, kind))
        changes = {
            change
            for key in keys
            for change in changes_since(key, source, settings.split, settings.model)
        }
    except (DatasetError, OSError, ValueError) as error:
        logger.info("raw_%s: not compared with the rows: %s", kind, error)
        return None
    if not changes:
        return None
    return (
        f"the {kind} were created from other inputs (then -> now): "
        f"{'; '.join(sorted(changes))}. Run kedro run with the same --env and "
        "--params, or set the parameters back"
    )


def _is_stale(catalog: DataCatalog, split: str) -> bool:
    rows, tokens = (_folder(catalog, f"{split}_{n}") for n in ("rows", "tokens"))
    if rows is None or tokens is None:
        return False
    digest, key = stored_facts(rows).get(ROWS_DIGEST), stored_key(tokens)
    return None not in (digest, key) and key.fields.get("rows") != digest  # type: ignore[union-attr]


def rows_fault(catalog: DataCatalog, settings: Settings) -> str | None:
    """Return why the rows of the last split do not match the raw data or the
    parameters, or None if they match or cannot be compared."""
    folder, raw = _folder(catalog, "train_rows"), raw_entry(settings)
    key = stored_key(folder) if folder else None
    if folder is None or key is None or "raw_texts" not in key.fields:
        if catalog.exists("train_tokens"):
            logger.info(
                "the rows of these tokens are not here: the tokens are used unchecked"
            )
        return None
    columns = columns_of(settings.split, settings.model.task)
    columns = columns.among([key.fields.get("label_column")])
    if changes := _changed_options(key, columns, settings):
        return (
            f"the rows were split with other parameters (then -> now): "
            f"{'; '.join(changes)}. Run kedro run with the same --env and "
            "--params, or set the parameters back"
        )
    then, now = stored_facts(folder).get(ORIGIN), origin_of(catalog, raw)
    if now is None or not now["state"]:
        logger.info("%s cannot be opened here: the tokens are trusted", raw)
        return None
    if then in (None, now):
        return None
    return (
        f"the rows were made from {then['name']}, and {raw} is now {now['name']} with "
        "another catalog entry, or with files of other sizes, times or inodes: run "
        "kedro run --pipelines=split,tokenize with the same --env and --params, or "
        f"set {raw} back"
    )


def _changed_options(
    key: ContentKey, columns: Columns, settings: Settings
) -> list[str]:
    wanted = {"split.drop_rows": None} | {
        f"split.{name}": value
        for name, value in split_options(columns, settings.split).items()
        if name not in DECIDES_NO_ROW
    }
    stored = {name: key.fields.get(name.removeprefix("split.")) for name in wanted}
    return ContentKey(wanted).changes_since(ContentKey(stored))


def origin_of(
    catalog: DataCatalog, raw: str, *, fetched: bool = False
) -> dict[str, str] | None:
    """Return the `name` and `state` of the raw data without reading any row, or None if
    the catalog entry `raw` cannot be created on this machine. The state is a hash,
    because an entry may contain credentials, or "" if the files cannot be reached. If
    `fetched` is True, the hash describes remote files as they were when they were
    downloaded."""
    try:
        entry = catalog.get(raw)
        described = entry._describe()
    except Exception:  # e.g. a missing package
        return None
    state, parts = "", entry.parts if isinstance(entry, OwnSplits) else {"": entry}
    with suppress(DatasetError, OSError, RawTextsError):
        facts = [
            (name, _options(part), *_file_states(part, fetched))
            for name, part in parts.items()
        ]
        state = xxhash.xxh3_128_hexdigest(repr(facts).encode())
    return {"name": _shown(entry, described), "state": state}


def short_name(catalog: DataCatalog, raw: str) -> str:
    """Return a short name for the data, or "" if the entry cannot be created."""
    found = origin_of(catalog, raw)
    if found is None:
        return ""
    is_built_in = isinstance(catalog.get(raw), DocstringCorpus)
    return "docstrings" if is_built_in else found["name"].split(".")[0][:40]


def _shown(entry: Any, described: Mapping[str, Any]) -> str:
    """Return a name for the entry, without the credentials that a URL may contain."""
    if isinstance(entry, DocstringCorpus):
        return "the built-in corpus"
    if isinstance(entry, OwnSplits):
        return ", ".join(map(entry_of, entry.parts))
    place = str(_place(described) or described.get("name") or type(entry).__name__)
    if "://" in place:
        return PurePosixPath(shown(place)).name
    return Path(place).name if _place(described) else place


def _place(described: Mapping[str, Any]) -> Any:
    return next((described[n] for n in PLACES if described.get(n)), None)


def _options(entry: Any) -> list[tuple[str, str]]:
    """Return the options of a raw entry. Of a local path, only the name is kept,
    because the project may be moved."""
    texts = {n: ADDRESS.sub("", str(v)) for n, v in entry._describe().items()}
    for name in texts.keys() & PLACES:
        if Path(texts[name]).is_absolute():
            texts[name] = Path(texts[name]).name
    return sorted(texts.items())


def _file_states(entry: Any, fetched: bool) -> Iterator[tuple[Any, ...]]:
    """Yield the name and state of each file of a raw entry. Raises DatasetError,
    OSError or RawTextsError if the files cannot be reached."""
    described = entry._describe()
    place = _place(described)
    if isinstance(entry, TextFiles) and entry.is_remote:
        yield from sorted(entry.stamps(fetched=fetched).items())
    elif isinstance(entry, DocstringCorpus):
        if not entry.is_parsed:
            raise FileNotFoundError
    elif place and described.get("protocol", "file") == "file":
        path = Path(str(place))
        path.stat()  # raises an error if it does not exist
        for file in files_below(path, hidden=()):
            found = file.stat()
            times = found.st_mtime_ns, found.st_ctime_ns
            name = str(file.relative_to(path.parent))
            yield name, found.st_size, *times, found.st_ino


def _folder(catalog: DataCatalog, name: str) -> Path | None:
    """Return the folder of the entry `name` if it is a KeyedArrowDataset, else None."""
    entry = catalog.get(name)
    return entry.path if isinstance(entry, KeyedArrowDataset) else None
