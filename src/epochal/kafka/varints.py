"""Signed variable-length numbers (zigzag, groups of seven bits), a whole column at a time,
and the joining of columns of bytes that makes records of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochal.kafka.primitives import Malformed

Ints: TypeAlias = npt.NDArray[np.int64]
Bytes: TypeAlias = npt.NDArray[np.uint8]
Flags: TypeAlias = npt.NDArray[np.bool_]

VARINT_BYTES_MAX = 5
VARLONG_BYTES_MAX = 10
_STEPS = np.array([1 << (7 * count) for count in range(1, VARLONG_BYTES_MAX)], dtype=np.uint64)
"""The smallest numbers that take one byte more than those below them."""


def zigzag(values: Ints) -> npt.NDArray[np.uint64]:
    return ((values << 1) ^ (values >> 63)).view(np.uint64)


@dataclass(frozen=True, slots=True)
class Measured:
    """Numbers, and how many bytes each of them takes."""

    values: Ints
    sizes: Ints


def measured(values: Ints) -> Measured:
    folded = zigzag(values)
    sizes = np.ones(len(values), dtype=np.int64)
    widest = folded.max(initial=0)
    for step in _STEPS:
        if step > widest:
            break
        sizes += folded >= step
    return Measured(values, sizes)


def columns(numbers: Measured) -> tuple[Bytes, Flags | None]:
    """
    Each value as a row of bytes as wide as the widest, and which of the bytes count.

    No flags mean that all do: values of one width need no picking out.
    """
    folded = zigzag(numbers.values)
    sizes = numbers.sizes
    width = int(sizes.max(initial=1))
    out = np.empty((len(sizes), width), dtype=np.uint8)
    for place in range(width):
        # The cast keeps the lowest eight bits; the highest of those says that more follow.
        out[:, place] = (folded >> np.uint64(7 * place)).astype(np.uint8) & np.uint8(0x7F)
        if place:
            out[:, place - 1] |= (sizes > place).view(np.uint8) << np.uint8(7)
    if int(sizes.min(initial=width)) == width:
        return out, None
    return out, np.arange(width) < sizes[:, None]


def read(data: Bytes, at: Ints, bytes_max: int = VARINT_BYTES_MAX) -> tuple[Ints, Ints]:
    """
    The values that begin at the given places, and the places behind them.

    `data` must end in padding of VARLONG_BYTES_MAX zeros; the caller compares the new places with
    where its data really ends.
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


def numbers(parts: Sequence[Measured | None]) -> pa.Array:
    """One binary value a row: its numbers, side by side; None stands for a zero byte in each."""
    count = next(len(part.sizes) for part in parts if part is not None)
    blocks: list[Bytes] = []
    flags: list[Flags | None] = []
    for part in parts:
        if part is None:
            blocks.append(np.zeros((count, 1), dtype=np.uint8))
            flags.append(None)
        else:
            block, flag = columns(part)
            blocks.append(block)
            flags.append(flag)
    matrix = np.concatenate(blocks, axis=1)
    ends = np.empty(count + 1, dtype=np.int32)
    ends[0] = 0
    if all(flag is None for flag in flags):
        data = matrix.reshape(-1)
        ends[1:] = np.arange(1, count + 1) * matrix.shape[1]
    else:
        picked = np.concatenate(
            [
                np.ones(block.shape, dtype=np.bool_) if flag is None else flag
                for block, flag in zip(blocks, flags, strict=True)
            ],
            axis=1,
        )
        data = matrix[picked]
        np.cumsum(picked.sum(axis=1), out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), count, [None, pa.py_buffer(ends), pa.py_buffer(data)])


def data_of(column: pa.Array) -> pa.Buffer:
    """The bytes of all elements of a freshly made binary array, one behind the other."""
    _, ends, data = column.buffers()
    width = np.int64 if pa.types.is_large_binary(column.type) else np.int32
    last = int(np.frombuffer(ends, dtype=width, count=len(column) + 1)[-1])
    return data.slice(0, last)


def join(pieces: Sequence[pa.Array | pa.Scalar]) -> pa.Array:
    """Element-wise, without a separator; a null counts as nothing, a scalar stands in every row."""
    nothing = pa.scalar(b"", pa.binary())
    return pc.binary_join_element_wise(
        *pieces, nothing, null_handling="replace", null_replacement=b""
    )
