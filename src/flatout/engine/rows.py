"""Checked rows: which raw rows can be used, and why the others cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.raw_texts import Kind, RawBatch, RawTexts, RawTextsError
from flatout.engine.settings import CLASSIFIES, SplitSettings, Task

Mask = npt.NDArray[np.bool_]
Check = tuple[Mask, str]
EXCERPT_CHARACTERS = 80

REJECTED_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("row", pa.int64()),
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
    regression: bool = False

    @classmethod
    def of(cls, settings: SplitSettings, task: Task) -> Columns:
        """Raises RawTextsError where the task needs labels and no column is named."""
        if task in CLASSIFIES and settings.label_column is None:
            raise RawTextsError(
                f"model.task is {task}, which needs labels: set split.label_column "
                "(or model.task: causal-lm / masked-lm for unlabelled text)"
            )
        return cls(
            text=settings.text_column,
            text_pair=settings.text_pair_column,
            label=settings.label_column if task in CLASSIFIES else None,
            group=settings.group_column,
            regression=task == "regression",
        )

    @property
    def names(self) -> list[str]:
        wanted = (self.text, self.text_pair, self.label, self.group)
        return list(dict.fromkeys(name for name in wanted if name is not None))

    @property
    def row_schema(self) -> pa.Schema:
        """Columns of the checked rows, whatever the raw columns are called."""
        label = pa.float64() if self.regression else pa.string()
        fields = [("text", pa.string())]
        fields += [("text_pair", pa.string())] if self.text_pair else []
        fields += [("label", label)] if self.label else []
        return pa.schema([*fields, ("source_row", pa.int64())])

    def check_present(self, raw: RawTexts) -> None:
        """Raises RawTextsError that names what is missing and what there is."""
        present = raw.column_names
        parameters = ("text_column", "text_pair_column", "label_column", "group_column")
        wanted = (self.text, self.text_pair, self.label, self.group)
        faults = [
            f"split.{parameter} is {name!r}, which is "
            + ("there twice" if name in present else "not there")
            for parameter, name in zip(parameters, wanted, strict=True)
            if name is not None and present.count(name) != 1
        ]
        if faults:
            raise RawTextsError(
                f"raw_texts has the columns {', '.join(map(repr, present)) or 'none'}; "
                + "; ".join(faults)
                + ". Set the names in conf/base/parameters_split.yml"
            )


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


def check_batch(batch: RawBatch, columns: Columns) -> CheckedBatch:
    """Judge each row of `batch`; the first reason that applies is the one given."""
    text, checks = _text(batch, columns.text)
    arrays, label_kinds = [text], np.full(len(batch.rows), Kind.TEXT, np.uint8)
    if columns.text_pair:
        pair, more = _text(batch, columns.text_pair)
        arrays, checks = [*arrays, pair], checks + more
    if columns.label:
        read = _number_label if columns.regression else _class_label
        label, label_kinds, more = read(batch, columns.label)
        arrays, checks = [*arrays, label], checks + more
    groups = batch.columns[columns.group] if columns.group else None
    if groups is not None:
        checks.append((_mask(groups.is_null()), f"{columns.group} is missing"))
    good = ~np.logical_or.reduce([mask for mask, _ in checks])
    arrays.append(pa.array(batch.rows))
    table = pa.RecordBatch.from_arrays(arrays, schema=columns.row_schema)
    chosen = pa.array(good)
    return CheckedBatch(
        table=table.filter(chosen),
        good=good,
        groups=None if groups is None else groups.filter(chosen),
        label_kinds=label_kinds[good],
        rejected=_rejected(batch, checks, columns.text),
    )


def _mask(array: Any) -> Mask:
    mask: Mask = array.to_numpy(zero_copy_only=False).astype(bool)
    return mask


def _plain(array: Any) -> Any:
    if pa.types.is_dictionary(array.type):
        return array.dictionary_decode()
    return array


def is_text(kind: Any) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
    )


def _text(batch: RawBatch, name: str) -> tuple[Any, list[Check]]:
    """A text column as `string`, null where it cannot be used."""
    array, kinds = _plain(batch.columns[name]), batch.kinds.get(name)
    if not is_text(array.type):
        nothing = pa.nulls(len(array), pa.string())
        missing = _mask(array.is_null())
        return nothing, [
            (missing, f"{name} is missing"),
            (~missing, f"{name} is {array.type}, not text"),
        ]
    checks: list[Check] = []
    if kinds is not None:
        checks = [
            (kinds == Kind.BAD_UNICODE, f"{name} is not valid Unicode"),
            (kinds == Kind.NUMBER, f"{name} is a number, not text"),
            (kinds == Kind.OTHER, f"{name} is not text"),
        ]
    array, bad_bytes = _valid_utf8(array)
    checks.append((bad_bytes, f"{name} is not valid UTF-8"))
    checks.append((_mask(array.is_null()), f"{name} is missing"))
    array = array.cast(pa.string())
    empty = pc.or_(pc.utf8_is_space(array), pc.equal(pc.binary_length(array), 0))
    checks.append((_mask(empty.fill_null(False)), f"{name} is empty"))
    if _holds_zero_byte(array):
        zero = _mask(pc.match_substring(array, "\x00").fill_null(False))
        checks.append((zero, f"{name} holds a NUL byte (UTF-16 or binary data?)"))
    return array, checks


def _valid_utf8(array: Any) -> tuple[Any, Mask]:
    """`array` with null where the bytes are not UTF-8, and where that is."""
    try:
        array.validate(full=True)
        return array, np.zeros(len(array), dtype=bool)
    except pa.ArrowInvalid:
        values = [
            _decoded(value) for value in array.cast(pa.large_binary()).to_pylist()
        ]
        bad = np.array([value is False for value in values])
        return pa.array([v or None for v in values], pa.large_string()), bad


def _decoded(value: bytes | None) -> str | bool | None:
    """None where missing, False where not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return False


def _holds_zero_byte(array: Any) -> bool:
    values = array.buffers()[2]
    return values is not None and bool((np.frombuffer(values, np.uint8) == 0).any())


def _class_label(batch: RawBatch, name: str) -> tuple[Any, Any, list[Check]]:
    """Class names: texts as they are, whole numbers without a decimal point."""
    array = _plain(batch.columns[name])
    kinds = batch.kinds.get(name)
    if kinds is None:
        kinds = np.full(len(array), _kind_of_type(array.type), np.uint8)
    if pa.types.is_floating(array.type) and pc.all(_is_whole(array)).as_py():
        array = array.cast(pa.float64()).cast(pa.int64(), safe=False)
    if pa.types.is_nested(array.type) or pa.types.is_temporal(array.type):
        fault = np.ones(len(array), dtype=bool)
        nothing = pa.nulls(len(array), pa.string())
        return nothing, kinds, [(fault, f"{name} is {array.type}, not a label")]
    array = array.cast(pa.string())
    empty = pc.or_(pc.utf8_is_space(array), pc.equal(pc.binary_length(array), 0))
    return (
        array,
        kinds,
        [
            (kinds == Kind.BAD_UNICODE, f"{name} is not valid Unicode"),
            (kinds == Kind.OTHER, f"{name} is neither text nor a number"),
            (_mask(array.is_null()), f"{name} is missing"),
            (_mask(empty.fill_null(False)), f"{name} is empty"),
        ],
    )


def _is_whole(array: Any) -> Any:
    return pc.equal(pc.floor(array), array).fill_null(True)


def _kind_of_type(kind: Any) -> Kind:
    is_number = pa.types.is_integer(kind) or pa.types.is_floating(kind)
    return Kind.NUMBER if is_number or pa.types.is_boolean(kind) else Kind.TEXT


def _number_label(batch: RawBatch, name: str) -> tuple[Any, Any, list[Check]]:
    """Targets of a regression: finite numbers, or texts that spell one."""
    array = _plain(batch.columns[name])
    missing = _mask(array.is_null())
    try:
        numbers = pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        numbers = np.array([_number(value) for value in array.to_pylist()])
    kinds = np.full(len(array), Kind.NUMBER, np.uint8)
    finite = np.isfinite(numbers)
    return (
        pa.array(numbers, pa.float64()),
        kinds,
        [
            (missing, f"{name} is missing"),
            (~finite, f"{name} is not a finite number (model.task is regression)"),
        ],
    )


def _number(value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        return float("nan")


def _rejected(batch: RawBatch, checks: list[Check], text_column: str) -> Any:
    """Rows of the quarantine file, in the order of the rows."""
    reasons: dict[int, str] = {}
    for mask, reason in reversed(checks):  # the first check has the last word
        reasons.update(dict.fromkeys(np.flatnonzero(mask).tolist(), reason))
    texts = batch.columns[text_column]
    found = [
        (int(batch.rows[index]), reasons[index], excerpt(texts[index]))
        for index in sorted(reasons)
    ]
    found += [(broken.row, broken.reason, broken.excerpt) for broken in batch.broken]
    return rejected_batch(batch.source, sorted(found))


def rejected_batch(source: str, found: list[tuple[int, str, str]]) -> Any:
    """RecordBatch of REJECTED_SCHEMA from (row, reason, excerpt)."""
    rows, reasons, excerpts = zip(*found, strict=True) if found else ([], [], [])
    columns = [[source] * len(found), list(rows), list(reasons), list(excerpts)]
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


Reader = Callable[[RawBatch, str], tuple[Any, Any, list[Check]]]
