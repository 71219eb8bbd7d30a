"""Usable values of a column of texts or labels, and reasons against the others."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from flatout.engine.data.raw_texts import Kind, RawBatch, name_of
from flatout.engine.files.content_key import plain_values

Mask = npt.NDArray[np.bool_]
Check = tuple[Mask, str]
"""Mask (N,) of unusable rows, and the reason."""


def mask_of(array: Any) -> Mask:
    mask: Mask = array.to_numpy(zero_copy_only=False).astype(bool)
    return mask


def named(array: Any) -> Any:
    """Values in the form of `plain_values`, with null instead of NaN."""
    array = plain_values(array)
    missing = array.is_null(nan_is_null=True)
    if missing.true_count == array.null_count:
        return array
    return pc.if_else(missing, pa.scalar(None, array.type), array)


def python_values(batch: RawBatch, name: str) -> list[Any]:
    """Values (N,) of a column; all None for a batch that is not UTF-8."""
    array = plain_values(batch.columns[name])
    try:
        return list(array.to_pylist())
    except UnicodeDecodeError:
        return [None] * len(array)


def parsed_list(value: Any) -> Any:
    """Return the list that a text contains as JSON; other values as they are."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        found = json.loads(value)
    except ValueError:
        return value
    return found if isinstance(found, list) else value


def checks_of(found: list[Any]) -> list[Check]:
    """Checks of rows read one by one: a text in `found` (N,) is an error."""
    reasons = sorted({one for one in found if isinstance(one, str)})
    return [(np.array([one == reason for one in found]), reason) for reason in reasons]


def is_text(kind: Any) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
    )


def read_text(batch: RawBatch, name: str) -> tuple[Any, list[Check]]:
    """Return a text column as `string`, with null for an unusable value."""
    array, kinds = named(batch.columns[name]), batch.kinds.get(name)
    if not is_text(array.type):
        nothing = pa.nulls(len(array), pa.string())
        missing = mask_of(array.is_null())
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
    array, bad_bytes = valid_utf8(array)
    checks.append((bad_bytes, f"{name} is not valid UTF-8"))
    checks.append((mask_of(array.is_null()), f"{name} is missing"))
    array = array.cast(pa.string())
    checks.append((_is_blank(array), f"{name} is empty"))
    values = array.buffers()[2]
    if values is not None and 0 in np.frombuffer(values, np.uint8):
        zero = mask_of(pc.match_substring(array, "\x00").fill_null(False))
        checks.append((zero, f"{name} contains a NUL byte (UTF-16 or binary data?)"))
    return array, checks


BYTES = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary)
INVISIBLE = r"\A[\s\p{Z}\p{Cf}]+\z"
"""Matches white space and characters without width."""


def _is_blank(texts: Any) -> Mask:
    """Mask of texts that are present but have no visible character."""
    blank = pc.or_(pc.utf8_is_space(texts), pc.equal(pc.binary_length(texts), 0))
    unseen = pc.match_substring_regex(texts, INVISIBLE)
    return mask_of(pc.or_(blank, unseen).fill_null(False))


def valid_utf8(array: Any) -> tuple[Any, Mask]:
    """Return `array`, with bytes decoded to text and null if they are not UTF-8, and
    the mask of the latter."""
    try:
        array.validate(full=True)
        is_bytes = any(test(array.type) for test in BYTES)
        array = array.cast(pa.large_binary()).cast(pa.string()) if is_bytes else array
        return array, np.zeros(len(array), dtype=bool)
    except pa.ArrowInvalid:
        values = [
            _decoded(value) for value in array.cast(pa.large_binary()).to_pylist()
        ]
        bad = np.array([value is False for value in values])
        good = [None if value is False else value for value in values]
        return pa.array(good, pa.large_string()), bad


def _decoded(value: bytes | None) -> str | bool | None:
    """Return the text; None if missing, False if not UTF-8."""
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return False


def read_label(batch: RawBatch, name: str, label_type: Any) -> tuple[Any, list[Check]]:
    """Labels as an array of `label_type`, and their errors."""
    if pa.types.is_list(label_type):
        return _read_list(batch, name, label_type)
    read = read_number if pa.types.is_floating(label_type) else read_class
    return read(batch, name)


def _read_list(batch: RawBatch, name: str, label_type: Any) -> tuple[Any, list[Check]]:
    """Read lists of names or numbers, or texts that contain one as JSON."""
    array = batch.columns[name]
    values = [_list(value, label_type) for value in array.to_pylist()]
    fault = np.array([value is None for value in values], dtype=bool)
    missing = mask_of(array.is_null())
    kind = "names" if pa.types.is_string(label_type.value_type) else "finite numbers"
    checks = [(missing, f"{name} is missing"), (fault, f"{name} is no list of {kind}")]
    return pa.array(values, label_type), checks


def _list(value: Any, label_type: Any) -> list[Any] | None:
    """Return the list; None if a value is not a list of this type."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
        if pa.types.is_string(label_type.value_type) and isinstance(found, list):
            found = [name_of(v) if type(v) is int else v for v in found]
        values = pa.array([found], label_type).to_pylist()[0]
    except (ValueError, TypeError, pa.ArrowException):
        return None
    infinite = (isinstance(v, float) and not math.isfinite(v) for v in values or ())
    return None if values is None or None in values or any(infinite) else list(values)


def read_class(batch: RawBatch, name: str) -> tuple[Any, list[Check]]:
    """Read class names: texts unchanged, whole numbers without a decimal point."""
    array = named(batch.columns[name])
    if pa.types.is_floating(array.type):
        array = _names_of_floats(array)
    if pa.types.is_nested(array.type) or pa.types.is_temporal(array.type):
        fault = np.ones(len(array), dtype=bool)
        nothing = pa.nulls(len(array), pa.string())
        return nothing, [(fault, f"{name} is {array.type}, not a label")]
    array, bad_bytes = valid_utf8(array)
    array = array.cast(pa.string())
    checks = [*_mixed(batch, name), (bad_bytes, f"{name} is not valid UTF-8")]
    checks.append((mask_of(array.is_null()), f"{name} is missing"))
    return array, [*checks, (_is_blank(array), f"{name} is empty")]


def _mixed(batch: RawBatch, name: str) -> list[Check]:
    """Errors in a column of mixed Python values that are names."""
    kinds = batch.kinds.get(name, np.full(len(batch.rows), Kind.TEXT, np.uint8))
    return [
        (kinds == Kind.BAD_UNICODE, f"{name} is not valid Unicode"),
        (kinds == Kind.OTHER, f"{name} is neither text nor a number"),
    ]


def _names_of_floats(array: Any) -> Any:
    """Name each number the same way in every block, whatever else it contains."""
    if pa.types.is_float16(array.type):
        array = array.cast(pa.float32())
    encoded = array.dictionary_encode()
    numbers = encoded.dictionary.to_numpy(zero_copy_only=False)
    names = [name_of(number) for number in numbers]
    return pa.array(names, pa.string()).take(encoded.indices)


def read_group(batch: RawBatch, name: str) -> tuple[Any, list[Check]]:
    """Read names of groups, of any type that has names."""
    array, bad_bytes = valid_utf8(named(batch.columns[name]))
    checks = [*_mixed(batch, name), (bad_bytes, f"{name} is not valid UTF-8")]
    checks.append((mask_of(array.is_null()), f"{name} is missing"))
    if is_text(array.type):
        # Rows with an empty cell would all be one group, and in one split.
        checks.append((_is_blank(array.cast(pa.string())), f"{name} is empty"))
    return array, checks


def read_number(batch: RawBatch, name: str) -> tuple[Any, list[Check]]:
    """Read regression targets: finite numbers, or texts that contain one."""
    array = plain_values(batch.columns[name])
    missing = mask_of(array.is_null())
    try:
        numbers = pc.cast(array, pa.float64()).to_numpy(zero_copy_only=False)
    except pa.ArrowException:
        numbers = np.array([_number(value) for value in array.to_pylist()])
    wrong = f"{name} is not a finite number, as model.task wants"
    checks = [(missing, f"{name} is missing"), (~np.isfinite(numbers), wrong)]
    return pa.array(numbers, pa.float64()), checks


def read_score(batch: RawBatch, name: str, lowest: int) -> tuple[Any, list[Check]]:
    """Read scores from `lowest` to 1."""
    scores, checks = read_number(batch, name)
    numbers = scores.to_numpy()
    wrong = (numbers < lowest) | (numbers > 1)
    why = f"{name} is not between {lowest} and 1: divide all by the largest"
    return scores, [*checks, (wrong, why)]


def _number(value: Any) -> float:
    """Return NaN if a value is not a number. Python reads 1_0 as 10, which is more
    likely a typing error."""
    try:
        return float("nan") if "_" in str(value) else float(value)
    except (TypeError, ValueError):
        return float("nan")
