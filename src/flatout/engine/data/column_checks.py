"""Validate text and label columns, and explain why values are rejected."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.raw_texts import Kind, RawBatch, name_of
from flatout.engine.files.content_key import plain_values

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Faults:
    """Reasons why rows of a batch are rejected, of which the first per row is kept."""

    reasons: dict[int, tuple[str, str]] = field(default_factory=dict)
    """The column and the reason of each rejected row, by row index."""

    def add(self, column: str, mask: Any, reason: str) -> None:
        """Reject the rows selected by `mask` (N,). The message is the column's name
        followed by `reason`."""
        for row in np.flatnonzero(mask).tolist():
            self.reasons.setdefault(row, (column, f"{column} {reason}"))

    def add_texts(self, column: str, found: Sequence[Any]) -> list[Any]:
        """Reject each row whose element in `found` (N,) is a str, with this str as the
        reason. Return `found` with these elements replaced by None."""
        for row, one in enumerate(found):
            if isinstance(one, str):
                self.reasons.setdefault(row, (column, one))
        return [None if isinstance(one, str) else one for one in found]


def named(array: Any) -> Any:
    """Return an Arrow array as `plain_values`, with null instead of NaN."""
    array = plain_values(array)
    missing = array.is_null(nan_is_null=True)
    if missing.true_count == array.null_count:
        return array
    return pc.if_else(missing, pa.scalar(None, array.type), array)


def python_values(batch: RawBatch, name: str, faults: Faults) -> list[Any]:
    """Return the N values of a column as Python objects, or None for other objects than
    strings, numbers and lists. Values that are not valid UTF-8 are rejected."""
    array = plain_values(batch.columns[name])
    try:
        values = list(array.to_pylist())
    except UnicodeDecodeError:
        values = [value_of(one) for one in array]
        lost = np.array([value is None for value in values])
        faults.add(name, lost & array.is_valid().to_numpy(False), "is not valid UTF-8")
    for row in np.flatnonzero(batch.kinds.get(name, np.empty(0)) == Kind.OTHER):
        if not values[row].startswith("["):
            values[row] = None
    return values


def value_of(scalar: Any, bad: Any = None) -> Any:
    """Return an Arrow scalar as a Python object, or `bad` if it is not valid UTF-8."""
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return bad


def parsed_list(value: Any) -> Any:
    """Return the list if `value` is a string that contains a JSON list. Other values
    are returned unchanged."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, list) else value


def is_text(kind: Any) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
    )


def read_text(batch: RawBatch, name: str, faults: Faults) -> Any:
    """Return a text column as Arrow strings. Missing, empty and unreadable values are
    rejected."""
    array, kinds = named(batch.columns[name]), batch.kinds.get(name)
    if not is_text(array.type):
        faults.add(name, array.is_null(), "is missing")
        faults.add(name, array.is_valid(), f"is {array.type}, not text")
        return pa.nulls(len(array), pa.string())
    if kinds is not None:
        faults.add(name, kinds == Kind.BAD_UNICODE, "is not valid Unicode")
        faults.add(name, kinds == Kind.NUMBER, "is a number, not text")
        faults.add(name, kinds == Kind.OTHER, "is not text")
    array = valid_utf8(array, name, faults)
    faults.add(name, array.is_null(), "is missing")
    array = array.cast(pa.string())
    faults.add(name, _is_blank(array), "is empty")
    values = array.buffers()[2]
    if values is not None and 0 in np.frombuffer(values, np.uint8):
        zero = pc.match_substring(array, "\x00").fill_null(False)
        faults.add(name, zero, "contains a NUL byte (UTF-16 or binary data?)")
    return array


BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
INVISIBLE = r"\A[\s\p{Z}\p{Cf}]+\z"
"""Matches texts that consist only of whitespace and zero-width characters."""


def _is_blank(texts: Any) -> Any:
    """Return a mask of the texts that are not missing but have no visible character."""
    blank = pc.or_(pc.utf8_is_space(texts), pc.equal(pc.binary_length(texts), 0))
    unseen = pc.match_substring_regex(texts, INVISIBLE)
    return pc.or_(blank, unseen).fill_null(False)


def valid_utf8(array: Any, name: str, faults: Faults) -> Any:
    """Return `array` with bytes decoded to text. Values that are not valid UTF-8 are
    rejected and become null."""
    try:
        array.validate(full=True)
        is_bytes = any(test(array.type) for test in BYTES)
        return array.cast(pa.large_binary()).cast(pa.string()) if is_bytes else array
    except pa.ArrowInvalid:
        texts = array.cast(pa.large_binary()).view(pa.large_string())
        values = [value_of(one, False) for one in texts]
        bad = [value is False for value in values]
        faults.add(name, bad, "is not valid UTF-8")
        return pa.array(values, pa.large_string(), mask=np.array(bad))


def read_label(batch: RawBatch, name: str, label_type: Any, faults: Faults) -> Any:
    """Return the labels in the column `name` of a batch as an Arrow array of
    `label_type`. Invalid labels are rejected."""
    if pa.types.is_list(label_type):
        return _read_list(batch, name, label_type, faults)
    read = read_number if pa.types.is_floating(label_type) else read_class
    return read(batch, name, faults)


def _read_list(batch: RawBatch, name: str, label_type: Any, faults: Faults) -> Any:
    """Return lists of names or numbers as an Arrow array of `label_type`. A list may
    also be given as JSON text."""
    array = batch.columns[name]
    given = python_values(batch, name, faults)
    values = [_list(value, label_type) for value in given]
    kind = "names" if pa.types.is_string(label_type.value_type) else "finite numbers"
    faults.add(name, array.is_null(), "is missing")
    faults.add(name, [value is None for value in values], f"is not a list of {kind}")
    return pa.array(values, label_type)


def _list(value: Any, label_type: Any) -> list[Any] | None:
    """Return `value` as a list of type `label_type`, or None if that is impossible."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if pa.types.is_string(label_type.value_type) and isinstance(found, list):
            found = [name_of(v) if type(v) is int else v for v in found]
        values = pa.array([found], label_type).to_pylist()[0]
    except (ValueError, TypeError, pa.ArrowException):
        return None
    infinite = (isinstance(v, float) and not math.isfinite(v) for v in values or ())
    return None if values is None or None in values or any(infinite) else list(values)


def read_class(batch: RawBatch, name: str, faults: Faults) -> Any:
    """Return the class names in a column as Arrow strings. Strings are not changed, and
    floats such as 1.0 become `1`. Missing and empty values are rejected."""
    array = named(batch.columns[name])
    if pa.types.is_floating(array.type):
        array = _names_of_floats(array)
    if pa.types.is_nested(array.type) or pa.types.is_temporal(array.type):
        every = np.ones(len(array), dtype=bool)
        faults.add(name, every, f"is {array.type}, not a label")
        return pa.nulls(len(array), pa.string())
    array = _named_values(batch, array, name, faults).cast(pa.string())
    faults.add(name, _is_blank(array), "is empty")
    return array


def _named_values(batch: RawBatch, array: Any, name: str, faults: Faults) -> Any:
    """Return `array` with bytes decoded to text. Missing values, and values that are
    neither strings nor numbers, are rejected."""
    kinds = batch.kinds.get(name, np.full(len(batch.rows), Kind.TEXT, np.uint8))
    faults.add(name, kinds == Kind.BAD_UNICODE, "is not valid Unicode")
    faults.add(name, kinds == Kind.OTHER, "is neither text nor a number")
    array = valid_utf8(array, name, faults)
    faults.add(name, array.is_null(), "is missing")
    return array


def _names_of_floats(array: Any) -> Any:
    """Return floats as class names. Equal numbers have the same name in all batches."""
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    encoded = array.dictionary_encode()
    numbers = encoded.dictionary.to_numpy(zero_copy_only=False)
    names = [name_of(number) for number in numbers]
    return pa.array(names, pa.string()).take(encoded.indices)


def read_group(batch: RawBatch, name: str, faults: Faults) -> Any:
    """Return the group names in a column, which may be strings, numbers or other single
    values. Missing and empty values are rejected."""
    array = _named_values(batch, named(batch.columns[name]), name, faults)
    if is_text(array.type):
        # Otherwise, all rows with an empty cell would form one group.
        faults.add(name, _is_blank(array.cast(pa.string())), "is empty")
    return array


def read_number(batch: RawBatch, name: str, faults: Faults) -> Any:
    """Return a column of finite numbers, or strings with a number, as an Arrow array of
    float64. Other values, and numbers too large for float32, are rejected."""
    array = plain_values(batch.columns[name])
    try:
        numbers = pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        numbers = np.array([_number(value_of(one)) for one in array])
    faults.add(name, array.is_null(), "is missing")
    wrong = "is not a finite number, as model.task wants"
    faults.add(name, ~np.isfinite(numbers), wrong)
    with np.errstate(over="ignore"):  # values too large for float32 become infinite
        large = np.isinf(numbers.astype(np.float32))
    faults.add(name, large, "is too large for float32")
    return pa.array(numbers, pa.float64())


def read_score(batch: RawBatch, name: str, lowest: int, faults: Faults) -> Any:
    """Return a column of scores as an Arrow array of float64. Scores that are not
    between `lowest` and 1 are rejected."""
    scores = read_number(batch, name, faults)
    numbers = scores.to_numpy()
    wrong = f"is not between {lowest} and 1: divide all by the largest"
    faults.add(name, (numbers < lowest) | (numbers > 1), wrong)
    return scores


def _number(value: Any) -> float:
    """Return `value` as a float, or NaN if it is not a number. Strings such as 1_0,
    which Python reads as 10, also give NaN, because they are probably typos."""
    try:
        return float("nan") if "_" in str(value) else float(value)
    except (TypeError, ValueError):
        return float("nan")
