"""Signed variable-length numbers (zigzag, groups of seven bits), a whole column at a time, and
joins of binary columns, of which records are made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import number_array, scalar
from epochal.kafka.primitives import Malformed

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]

VARINT_BYTES_MAX = 5
VARLONG_BYTES_MAX = 10
TABLED_BELOW = 1 << 16
"""Lengths and counts below this are looked up in a table: nearly all are, and rows with a larger
one are so long that it does not matter."""
_STEPS = np.array([1 << (7 * count) for count in range(1, VARLONG_BYTES_MAX)], dtype=np.uint64)
"""The smallest numbers that take one byte more than those below them."""


def zigzag(values: Ints) -> npt.NDArray[np.uint64]:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers, with the bytes that each of them takes."""

    values: Ints
    sizes: Ints
    is_tabled: bool
    """All of them are in the table."""


def measured(values: Ints) -> Measured:
    if len(values) and values.min() >= -1 and values.max() < TABLED_BELOW:
        return Measured(values, _table().sizes[values + 1], is_tabled=True)
    folded = zigzag(values)
    sizes = np.ones(len(values), dtype=np.int64)
    widest = folded.max(initial=0)
    for step in _STEPS:
        if step > widest:
            break
        sizes += folded >= step
    return Measured(values, sizes, is_tabled=False)


def columns(numbers: Measured) -> tuple[Bytes, Flags | None]:
    """
    Each value as a row of bytes as wide as the widest, and flags for the bytes in use.

    None instead of flags: all values have the same width.
    """
    folded = zigzag(numbers.values)
    sizes = numbers.sizes
    width = int(sizes.max(initial=1))
    out = np.empty((len(sizes), width), dtype=np.uint8)
    for place in range(width):
        # The cast keeps the lowest eight bits; the highest of those marks that more follow.
        out[:, place] = (folded >> np.uint64(7 * place)).astype(np.uint8) & np.uint8(0x7F)
        if place:
            out[:, place - 1] |= (sizes > place).view(np.uint8) << np.uint8(7)
    if int(sizes.min(initial=width)) == width:
        return out, None
    return out, np.arange(width) < sizes[:, None]


def read(data: Bytes, at: Ints, bytes_max: int = VARINT_BYTES_MAX) -> tuple[Ints, Ints]:
    """
    The values that begin at the given positions, and the positions behind them.

    `data` must end in padding of VARLONG_BYTES_MAX zeros; the caller compares the new positions
    with the end of its data.
    """
    folded = np.zeros(len(at), dtype=np.uint64)
    going = np.arange(len(at))
    at = at.copy()
    for place in range(bytes_max):
        byte = data[at[going]]
        folded[going] |= (byte & np.uint8(0x7F)).astype(np.uint64) << np.uint64(7 * place)
        at[going] += 1
        going = going[byte >= np.uint8(0x80)]
        if not len(going):
            signs = -(folded & np.uint64(1)).view(np.int64)
            return (folded >> np.uint64(1)).view(np.int64) ^ signs, at
    raise Malformed(f"a variable-length number of more than {bytes_max} bytes in a record")


def one(value: int) -> bytes:
    """A single value."""
    folded = (value << 1) ^ (value >> 63)
    out = bytearray()
    while folded > 0x7F:
        out.append(folded & 0x7F | 0x80)
        folded >>= 7
    out.append(folded)
    return bytes(out)


def written(numbers: Measured) -> pa.Array:
    """The encoded numbers, as a binary column."""
    if numbers.is_tabled:
        return _table().written.take(number_array(numbers.values + 1))
    return _spelled(numbers)


def counted(count: int, *, behind: bytes = b"") -> tuple[pa.Array, Ints]:
    """0, 1, 2 … encoded, each behind the same bytes; and the sizes of these."""
    if count < TABLED_BELOW:
        table = _table(behind)
        return table.written.slice(1, count), table.sizes[1 : count + 1]
    numbers = measured(np.arange(count, dtype=np.int64))
    return join([constant(behind), written(numbers)]), numbers.sizes + len(behind)


def _spelled(numbers: Measured) -> pa.Array:
    count = len(numbers.sizes)
    block, flags = columns(numbers)
    ends = np.zeros(count + 1, dtype=np.int32)
    np.cumsum(numbers.sizes, out=ends[1:])
    data = block.reshape(-1) if flags is None else block[flags]
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])


@dataclass(frozen=True, slots=True)
class _Table:
    """The encoded -1 (for null), 0, 1, 2 …: the number n is at index n + 1."""

    written: pa.Array
    sizes: Ints


@cache
def _table(behind: bytes = b"") -> _Table:
    if behind:
        written = join([constant(behind), _table().written])
        return _Table(written, _table().sizes + len(behind))
    values = np.arange(-1, TABLED_BELOW, dtype=np.int64)
    # In runs of one width each, which `columns` encodes without flags.
    sizes = 1 + np.searchsorted(_STEPS, zigzag(values), side="right")
    runs = np.split(np.arange(len(values)), np.flatnonzero(np.diff(sizes)) + 1)
    spelled = [_spelled(Measured(values[run], sizes[run], is_tabled=False)) for run in runs]
    return _Table(pa.concat_arrays(spelled), sizes)


def data_of(column: pa.Array) -> pa.Buffer:
    """The bytes of all elements of a newly made binary array."""
    _, ends, data = column.buffers()
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    last = int(np.frombuffer(ends, dtype=width, count=len(column) + 1)[-1])
    return data.slice(0, last)


def join(pieces: Sequence[pa.Array | pa.Scalar]) -> pa.Array:
    """Join element-wise, without a separator; a null is left out, a scalar is in every row."""
    return pc.binary_join_element_wise(
        *pieces, constant(b""), null_handling="replace", null_replacement=b""
    )


def constant(data: bytes) -> pa.Scalar:
    """Bytes that a join puts into every row."""
    return scalar(data, pa.binary())
