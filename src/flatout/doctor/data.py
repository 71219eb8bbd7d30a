"""The catalog's data: columns, labels, and tokens that fit the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from kedro.io import DataCatalog, DatasetError

from flatout.datasets import DocstringCorpus, TextFiles
from flatout.engine.data.raw_texts import RawTextsError, batches_of, open_raw_texts
from flatout.engine.data.rows import CheckedBatch, Columns, check_batch
from flatout.engine.data.whole_folder import stored_key
from flatout.engine.doctor.finding import Finding, within
from flatout.engine.settings import Settings
from flatout.engine.tokenizing.token_keys import changed_options

READING_LIMIT_S = 4.0
SHOWN_LABELS = 8
MANY_LABELS = 1000


def raw_rows(catalog: DataCatalog, settings: Settings) -> list[Finding]:
    """Two rows: the columns with the first rows judged, and the labels in them."""
    source = catalog.get("raw_texts")
    if isinstance(source, DocstringCorpus) and not source.is_parsed:
        text = "the built-in corpus; the first run parses it"
        return [Finding("data", "ok", text), Finding("labels", "ok", "package names")]
    if isinstance(source, TextFiles) and source.is_remote:
        text = "raw_texts is a URL: the first run fetches it and looks at it"
        return [Finding("data", "ok", text)]
    try:
        data = within(READING_LIMIT_S, source.load)
        return judged(data, settings)
    except TimeoutError:
        text = f"raw_texts was not read within {READING_LIMIT_S:g} s: not looked at"
        return [Finding("data", "ok", text)]
    except (DatasetError, RawTextsError) as error:
        fix = "name file and columns in conf/local: catalog.yml, parameters.yml"
        return [Finding("data", "fail", " ".join(str(error).split()), fix)]


def judged(data: Any, settings: Settings) -> list[Finding]:
    """Of what the entry `raw_texts` loads as. Raises RawTextsError."""
    raw = open_raw_texts(data)
    columns = Columns.of(settings.split, settings.model.task)
    columns.check_present(raw)
    first = next(iter(batches_of(raw, columns.names)), None)
    if first is None or not (len(first.rows) or first.broken):
        raise RawTextsError("raw_texts is empty: it has columns but no rows")
    checked = check_batch(first, columns)
    return [_columns(checked, columns, settings), _labels(checked, columns, settings)]


def _columns(checked: CheckedBatch, columns: Columns, settings: Settings) -> Finding:
    names = ", ".join(columns.names)
    usable, bad = int(checked.good.sum()), checked.rejected.num_rows
    count = usable + bad
    text = f"columns {names} are there; {usable} of the first {count} rows usable"
    if bad <= settings.split.max_rejected_fraction * count:
        return Finding("data", "ok", text)
    reason = checked.rejected.column("reason")[0].as_py()
    row = checked.rejected.column("row")[0].as_py()
    share = settings.split.max_rejected_fraction
    text += f", which is too few for split.max_rejected_fraction {share:g}"
    fix = "mend the rows, or raise split.max_rejected_fraction; later rows may do"
    return Finding("data", "fail", f"{text}; row {row}: {reason}", fix)


def _labels(checked: CheckedBatch, columns: Columns, settings: Settings) -> Finding:
    if columns.label is None:
        return Finding("labels", "ok", f"{settings.model.task} needs none")
    labels = checked.table.column("label")
    if columns.regression:
        low, high = (v.as_py() for v in pc.min_max(labels).values())
        return Finding("labels", "ok", f"numbers from {low} to {high}")
    names = sorted(pc.unique(labels).to_pylist())
    shown = ", ".join(names[:SHOWN_LABELS])
    more = f" and {len(names) - SHOWN_LABELS} more" if len(names) > SHOWN_LABELS else ""
    text = f"{len(names)} in the first {len(labels)} usable rows"
    text += f": {shown}{more}" if names else ""
    fix = "is split.label_column right? Numbers are for model.task: regression"
    if len(names) < 2:
        return Finding("labels", "warn", f"{text}: nothing to tell apart", fix)
    if len(names) > MANY_LABELS:
        return Finding("labels", "warn", text, fix)
    return Finding("labels", "ok", text)


def tokens(catalog: DataCatalog, settings: Settings) -> Finding:
    """Token rows on the disk against the parameters that decide them."""
    source = catalog.get("train_tokens")
    if not source.exists():
        return Finding("tokens", "ok", "none yet: kedro run makes them")
    filepath = source._describe().get("filepath")
    key = stored_key(Path(filepath)) if filepath else None
    if key is None:
        return Finding("tokens", "ok", "there, without a key: taken as they are")
    changes = changed_options(key, settings)
    if not changes:
        return Finding("tokens", "ok", "they match the parameters")
    text = "made with other parameters (then -> now): " + "; ".join(changes)
    fix = "kedro run --pipelines=tokenize, or set the parameters back"
    return Finding("tokens", "warn", text, fix)
