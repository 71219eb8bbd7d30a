"""Checked rows: which raw rows can be used, and why the others cannot."""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from flatout.engine.data.column_checks import (
    Check,
    Mask,
    read_group,
    read_label,
    read_text,
)
from flatout.engine.data.column_names import column_faults, listed
from flatout.engine.data.forms.flags import read_flags
from flatout.engine.data.forms.given_splits import SplitTexts, entry_of, read_splits
from flatout.engine.data.forms.messages import read_messages
from flatout.engine.data.forms.words import read_tagged
from flatout.engine.data.raw_texts import Kind, RawBatch, RawTexts, RawTextsError
from flatout.engine.parameters import SplitSettings

_TEXT_PARAMETER = {
    "completion": "split.prompt_column",
    "messages": "split.messages_column",
}
EXCERPT_CHARACTERS = 80
CLASS_NAMES = pa.string()
NOTHING = ("", "None")
"""Excerpts that show nothing."""

REJECTED_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row", pa.int64()),
        ("line", pa.int64()),
        ("reason", pa.string()),
        ("excerpt", pa.string()),
    ]
)


@dataclass(frozen=True)
class Columns:
    """Which raw column is what. None: the rows have no such column."""

    text: str
    text_pair: str | None
    label: str | None
    group: str | None
    label_type: Any = CLASS_NAMES
    """Arrow type of the labels, as the task wants them."""
    flags: tuple[str, ...] = ()
    """Columns of 0 and 1, a label each, in place of the one of labels."""
    split: str | None = None
    """Names the split of each row."""
    form: str = "text"
    """What rows become: a text, `words` with a tag each, a `completion` of a prompt,
    or `messages`."""
    completion: str | None = None

    @classmethod
    def of(
        cls, settings: SplitSettings, label_type: Any, task: str, form: str = "text"
    ) -> Columns:
        """`label_type`: what the task learns of each row; None: nothing. Raises
        RawTextsError where it needs labels and no column is named."""
        flags = tuple(settings.label_columns or ())
        if flags and not (_is_names(label_type) and form == "text"):
            raise RawTextsError(
                f"split.label_columns are for several labels a row, and model.task is "
                f"{task}: set split.label_column, or model.task: "
                "multi-label-classification"
            )
        if label_type is not None and settings.label_column is None and not flags:
            raise RawTextsError(
                f"model.task is {task}, which needs labels: set split.label_column "
                "(or a model.task for unlabelled text)"
            )
        return cls(
            text=_text_column(settings, form),
            text_pair=settings.text_pair_column,
            label=None if label_type is None or flags else settings.label_column,
            group=settings.group_column,
            label_type=label_type,
            flags=flags,
            split=settings.split_column,
            form=form,
            completion=settings.completion_column if form == "completion" else None,
        )

    @property
    def has_labels(self) -> bool:
        """Whether rows have something to be learnt beside their text."""
        return self.label is not None or bool(self.flags)

    @property
    def has_classes(self) -> bool:
        """Whether each row has the name of one class."""
        return self.label is not None and pa.types.is_string(self.label_type)

    @property
    def has_names(self) -> bool:
        """Whether labels are names: of one class, or in a list."""
        return self.has_classes or (self.has_labels and _is_names(self.label_type))

    @property
    def has_numbers(self) -> bool:
        """Whether each row has one number."""
        return self.label is not None and pa.types.is_floating(self.label_type)

    @property
    def names(self) -> list[str]:
        wanted = (self.text, self.text_pair, self.completion, self.label)
        others = (self.group, self.split)
        named = [name for name in (*wanted, *others) if name is not None]
        return list(dict.fromkeys([*named, *self.flags]))

    @property
    def row_schema(self) -> pa.Schema:
        """Columns of the checked rows, whatever the raw columns are called."""
        fields = [("text", pa.string())]
        fields += [("text_pair", pa.string())] if self.text_pair else []
        if self.form in ("completion", "messages"):
            fields.append((self.form, pa.string()))
        fields += [("label", self.label_type)] if self.has_labels else []
        return pa.schema([*fields, ("source_row", pa.int64())])

    def check_present(self, raw: RawTexts) -> None:
        """Raises RawTextsError that names what is missing and what there is."""
        wanted = {
            _TEXT_PARAMETER.get(self.form, "split.text_column"): self.text,
            "split.completion_column": self.completion,
            "split.text_pair_column": self.text_pair,
            "split.label_column": self.label,
            "split.group_column": self.group,
            "split.split_column": self.split,
            **{f"split.label_columns[{n}]": f for n, f in enumerate(self.flags)},
        }
        parts: dict[str, RawTexts] = {"raw_texts": raw}
        if isinstance(raw, SplitTexts):
            parts = {entry_of(name): part for name, part in raw.parts.items()}
        for entry, part in parts.items():
            present = part.column_names
            if faults := column_faults(present, wanted, entry):
                columns = listed(present)
                raise RawTextsError(f"{entry} has the columns {columns}. {faults}")
        if self.split and isinstance(raw, SplitTexts):
            raise RawTextsError(
                f"split.split_column is {self.split!r}, and the splits have entries of "
                "their own: set it to null, or give all rows as raw_texts"
            )


def _text_column(settings: SplitSettings, form: str) -> str:
    """The one that rows are known by."""
    own = {"completion": settings.prompt_column, "messages": settings.messages_column}
    return own.get(form) or settings.text_column


def _is_names(label_type: Any) -> bool:
    """Whether labels are lists of names."""
    is_list = label_type is not None and pa.types.is_list(label_type)
    return bool(is_list and pa.types.is_string(label_type.value_type))


@dataclass(frozen=True)
class CheckedBatch:
    """Rows that can be used, canonical columns; and those that cannot."""

    table: Any
    """RecordBatch with `Columns.row_schema`, N rows."""
    good: Mask
    """(raw rows,) which raw rows of the batch are in `table`."""
    groups: Any | None
    label_kinds: npt.NDArray[np.uint8]
    """(N,) `Kind` of each label."""
    rejected: Any
    """RecordBatch with REJECTED_SCHEMA."""
    splits: npt.NDArray[np.int8]
    """(N,) places of their splits among train, validation and test; -1: not given."""


def check_batch(batch: RawBatch, columns: Columns) -> CheckedBatch:
    """Judge each row of `batch`; the first reason that applies is the one given."""
    if columns.form == "words":
        return _check_words(batch, columns)
    if columns.form == "messages":
        text, kept, found = read_messages(batch, columns.text)
        kinds = np.full(len(batch.rows), Kind.TEXT, np.uint8)
        checks = _of(columns.text, found)
        return _checked(batch, columns, [text, kept], checks, kinds)
    text, found = read_text(batch, columns.text)
    checks = _of(columns.text, found)
    arrays, label_kinds = [text], np.full(len(batch.rows), Kind.TEXT, np.uint8)
    if columns.text_pair:
        pair, found = read_text(batch, columns.text_pair)
        arrays, checks = [*arrays, pair], checks + _of(columns.text_pair, found)
    if columns.completion:
        ends, found = read_text(batch, columns.completion)
        arrays, checks = [*arrays, ends], checks + _of(columns.completion, found)
    if columns.label:
        label, label_kinds, found = read_label(batch, columns.label, columns.label_type)
        arrays, checks = [*arrays, label], checks + _of(columns.label, found)
    if columns.flags:
        label, flaws = read_flags(batch, columns.flags)
        arrays, checks = [*arrays, label], checks + flaws
    return _checked(batch, columns, arrays, checks, label_kinds)


def _check_words(batch: RawBatch, columns: Columns) -> CheckedBatch:
    """Of rows of words, with a tag each."""
    text, tags, checks = read_tagged(batch, columns.text, str(columns.label))
    kinds = np.full(len(batch.rows), Kind.TEXT, np.uint8)
    return _checked(batch, columns, [text, tags], checks, kinds)


def _checked(
    batch: RawBatch,
    columns: Columns,
    arrays: list[Any],
    checks: list[tuple[str, Check]],
    label_kinds: npt.NDArray[np.uint8],
) -> CheckedBatch:
    groups = None
    if columns.group:
        groups, found = read_group(batch, columns.group)
        checks = checks + _of(columns.group, found)
    splits = np.full(len(batch.rows), batch.split, np.int8)
    if columns.split:
        splits, found = read_splits(batch, columns.split)
        checks = checks + _of(columns.split, found)
    nothing = np.zeros(len(batch.rows), bool)
    good = ~np.logical_or.reduce([nothing, *(mask for _, (mask, _) in checks)])
    arrays = [*arrays, pa.array(batch.rows)]
    table = pa.RecordBatch.from_arrays(arrays, schema=columns.row_schema)
    chosen = pa.array(good)
    return CheckedBatch(
        table=table.filter(chosen),
        good=good,
        groups=None if groups is None else groups.filter(chosen),
        label_kinds=label_kinds[good],
        rejected=_rejected(batch, checks, columns.text),
        splits=splits[good],
    )


def _of(column: str, checks: list[Check]) -> list[tuple[str, Check]]:
    return [(column, check) for check in checks]


def _rejected(
    batch: RawBatch, checks: list[tuple[str, Check]], text_column: str
) -> Any:
    """Rows of the quarantine file, in the order of the rows."""
    faults: dict[int, tuple[str, str]] = {}
    for column, (mask, reason) in reversed(checks):  # the first has the last word
        at = np.flatnonzero(mask).tolist()
        faults.update(dict.fromkeys(at, (column, reason)))
    found = []
    for index, (column, reason) in sorted(faults.items()):
        # What is wrong; the row's text where nothing is there to be shown.
        values = [excerpt(batch.columns[name][index]) for name in (column, text_column)]
        shown = values[0] if values[0].strip() not in NOTHING else values[1]
        found.append((int(batch.rows[index]), reason, shown))
    found += [(broken.row, broken.reason, broken.excerpt) for broken in batch.broken]
    found.sort(key=itemgetter(0))  # the lines of a row stay in their order
    return rejected_batch(batch.source, found)


def rejected_batch(source: str, found: list[tuple[int, str, str]]) -> Any:
    """RecordBatch of REJECTED_SCHEMA from (row, reason, excerpt), without lines."""
    size = len(found)
    rows, reasons, excerpts = zip(*found, strict=True) if found else ([], [], [])
    columns = [[source] * size, rows, [None] * size, reasons, excerpts]
    arrays = [
        pa.array(values, field.type)
        for values, field in zip(columns, REJECTED_SCHEMA, strict=True)
    ]
    return pa.RecordBatch.from_arrays(arrays, schema=REJECTED_SCHEMA)


def excerpt(value: Any) -> str:
    """The first characters of a value, printable."""
    try:
        text = str(value.as_py())
    except UnicodeDecodeError:
        text = repr(value.cast(pa.binary()).as_py())
    cut = text[:EXCERPT_CHARACTERS]
    return cut.encode("utf-8", "replace").decode().replace("\x00", "\\0")
