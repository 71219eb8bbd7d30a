"""Conversion between Arrow's fixed-size lists and arrays, without a copy."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa


def values_in(array: Any) -> npt.NDArray[Any]:
    """Values (N, ...) of nested fixed-size lists, or (N,) of plain values."""
    shape = [len(array)]
    while pa.types.is_fixed_size_list(array.type):
        shape.append(array.type.list_size)
        array = array.flatten()
    values: npt.NDArray[Any] = array.to_numpy(zero_copy_only=False)
    return values.reshape(shape)


def array_of(values: npt.NDArray[Any]) -> Any:
    """Nested fixed-size lists from values (N, ...), without a copy."""
    array = pa.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    return array
