"""Arrow values from Python and NumPy and back, made from buffers so that pandas is not imported.

`pa.array`, `pa.scalar`, `to_numpy` and compute functions that are given Python values import pandas
where it is installed, which costs a new Python worker more than a second of CPU. Code that runs in
tasks uses these instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_DTYPES = {
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.int64(): np.int64,
    pa.uint8(): np.uint8,
    pa.uint16(): np.uint16,
    pa.uint32(): np.uint32,
    pa.uint64(): np.uint64,
    pa.float32(): np.float32,
    pa.float64(): np.float64,
}
_LARGE = (pa.large_string(), pa.large_binary())


@lru_cache(maxsize=1024)
def scalar(value: str | bytes | int | None, kind: pa.DataType) -> pa.Scalar:
    """One value of a text, binary or whole-number type; None is a null of any type."""
    if value is None:
        return pa.nulls(1, kind)[0]
    if isinstance(value, int):
        return number_array(np.array([value], dtype=_DTYPES[kind]))[0]
    return texts([value], kind)[0]


def texts(values: Sequence[str | bytes], kind: pa.DataType) -> pa.Array:
    """An array of text or bytes, without nulls."""
    parts = [value.encode() if isinstance(value, str) else value for value in values]
    ends = np.zeros(len(parts) + 1, dtype=np.int64 if kind in _LARGE else np.int32)
    np.cumsum([len(part) for part in parts], out=ends[1:])
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(b"".join(parts))]
    return pa.Array.from_buffers(kind, len(parts), buffers)


def number_array(values: npt.NDArray[Any]) -> pa.Array:
    """Numbers as an array of the same width, without nulls and without a copy."""
    plain = np.ascontiguousarray(values)
    kind = pa.from_numpy_dtype(plain.dtype)
    return pa.Array.from_buffers(kind, len(plain), [None, pa.py_buffer(plain)])


def flag_array(flags: npt.NDArray[np.bool_]) -> pa.Array:
    """Booleans as an array, without nulls."""
    bits = np.packbits(flags, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(flags), [None, pa.py_buffer(bits)])


def numbers(column: pa.Array) -> npt.NDArray[Any]:
    """The numbers of an array without nulls, without a copy."""
    data = column.buffers()[1]
    dtype = np.dtype(_DTYPES[column.type])
    if data is None or not len(column):
        return np.empty(0, dtype=dtype)
    start = column.offset * dtype.itemsize
    return np.frombuffer(data, dtype=dtype, count=len(column), offset=start)


def flags(column: pa.Array) -> npt.NDArray[np.bool_]:
    """The booleans of an array without nulls."""
    found: npt.NDArray[np.bool_] = numbers(column.cast(pa.uint8())).view(np.bool_)
    return found
