"""Checks of the data in the catalog: columns, labels and token rows."""

from __future__ import annotations

from typing import Any

import pyarrow.compute as pc
from kedro.io import DataCatalog, DatasetError

from flatout.datasets import DocstringCorpus, KeyedArrowDataset, TextFiles
from flatout.engine.data.columns import Columns, all_numbers
from flatout.engine.data.raw_texts import RawTextsError, named_row, open_raw_texts
from flatout.engine.data.rows import CheckedBatch, check_batch
from flatout.engine.files.keyed_folder import stored_key
from flatout.engine.machine.checks import Finding
from flatout.engine.parameters import Settings
from flatout.engine.rows import row_kind
from flatout.engine.tasks import columns_of
from flatout.engine.tokenizing.token_keys import changed_options
from flatout.project.data.origin import data_fault
from flatout.project.fitting import raw_entry

SHOWN_LABELS = 8
MANY_LABELS = 1000


def raw_rows(catalog: DataCatalog, settings: Settings) -> list[Finding]:
    """Return findings about the columns, the first rows and the labels of the raw
    data."""
    raw = raw_entry(settings)
    source = catalog.get(raw)
    if isinstance(source, DocstringCorpus) and not source.is_parsed:
        text = "the built-in corpus; the first run parses it"
        return [Finding("data", "ok", text), Finding("labels", "ok", "package names")]
    if isinstance(source, TextFiles) and source.is_remote:
        text = f"{raw} is a URL: the first run downloads and checks it"
        return [Finding("data", "ok", text)]
    try:
        return split_findings(source.load(), settings)
    except (DatasetError, RawTextsError) as error:
        fix = "name file and columns in conf/local: catalog.yml, parameters.yml"
        return [Finding("data", "fail", " ".join(str(error).split()), fix)]


def split_findings(data: Any, settings: Settings) -> list[Finding]:
    """Return findings about `data`, which was loaded from the entry `raw_texts`. Raises
    RawTextsError if columns are missing or if there are no rows."""
    raw = open_raw_texts(data)
    task = settings.model.task
    columns = columns_of(settings.split, task).among(raw.column_names)
    columns.check_present(raw)
    first = next(iter(raw.batches(columns.names)), None)
    if first is None or not (len(first.rows) or first.broken):
        raise RawTextsError("raw_texts is empty: it has columns but no rows")
    given = check_batch(first, columns), columns, settings
    return [_columns(*given), _labels(*given)]


def _columns(checked: CheckedBatch, columns: Columns, settings: Settings) -> Finding:
    if all_numbers(checked.table.column("text")):
        number = checked.table.column("text")[0].as_py()
        text = f"each text in {columns.text!r} is a number, such as {number!r}"
        return Finding("data", "warn", text, "is split.text_column right?")
    names = ", ".join(columns.names)
    usable, bad = int(checked.good.sum()), checked.rejected.num_rows
    count = usable + bad
    text = f"columns {names} are there; {usable} of the first {count} rows usable"
    if bad <= settings.split.max_rejected_fraction * count:
        return Finding("data", "ok", text)
    (row,) = checked.rejected.slice(0, 1).to_pylist()
    share = settings.split.max_rejected_fraction
    text += (
        f", which is too few for split.max_rejected_fraction {share:g}; "
        f"{named_row((row['source'], row['row']))}: {row['reason']}"
    )
    fix = "correct the rows, or raise split.max_rejected_fraction; later rows may do"
    return Finding("data", "fail", text, fix)


def _labels(checked: CheckedBatch, columns: Columns, settings: Settings) -> Finding:
    if not columns.has_classes:
        return Finding("labels", "ok", f"{settings.model.task} has no classes")
    labels = checked.table.column("label")
    names = sorted(pc.unique(labels).to_pylist())
    shown = ", ".join(names[:SHOWN_LABELS])
    more = f" and {len(names) - SHOWN_LABELS} more" if len(names) > SHOWN_LABELS else ""
    text = f"{len(names)} in the first {len(labels)} usable rows: {shown}{more}"
    if 2 <= len(names) <= MANY_LABELS:
        return Finding("labels", "ok", text)
    fix = "is split.label_column right? Numbers are for model.task: regression"
    return Finding("labels", "warn", text, fix)


def rows(catalog: DataCatalog, settings: Settings) -> Finding:
    """Return a finding that states whether the tokens or other rows on disk were
    created with the current parameters and data."""
    kind = row_kind(settings.train.rows).kind
    source = catalog[f"train_{kind}"]
    if not source.exists():
        return Finding(kind, "ok", "none yet: kedro run creates them")
    key = stored_key(source.path) if isinstance(source, KeyedArrowDataset) else None
    if key is None:
        return Finding(kind, "ok", "present, without a key: used as they are")
    if kind == "tokens" and (changes := changed_options(key, settings)):
        text = "made with other parameters (then -> now): " + "; ".join(changes)
        fix = "kedro run --pipelines=split,tokenize, or set the parameters back"
        return Finding(kind, "warn", text, fix)
    if fault := data_fault(catalog, settings):
        return Finding(kind, "warn", fault)
    return Finding(kind, "ok", "they match the parameters and the data")
