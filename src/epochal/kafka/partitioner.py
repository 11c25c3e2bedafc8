"""`assign`: the partition of a row, as the Java client decides for rows with a key.

Rows of one key meet in one partition only if every producer of a topic agrees on the hash: murmur2
over the key's bytes, made positive, modulo the number of partitions. Computed here for a whole
column at a time, four bytes of all keys in each step.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from epochal.arrow_values import flags
from epochal.kafka.batches import as_binary, ends_of

_SEED = np.uint32(0x9747B28C)
_M = np.uint32(0x5BD1E995)
_R = np.uint32(24)
_POSITIVE = np.uint32(0x7FFFFFFF)
_NARROW = 1 << 15


def murmur2(keys: pa.Array) -> npt.NDArray[np.uint32]:
    """The hash of every key; a null counts as empty."""
    column = as_binary(keys)
    raw_data = column.buffers()[2]
    ends = ends_of(column)
    starts = ends[:-1].astype(np.int64)
    lengths = np.diff(ends).astype(np.int64)
    if column.null_count:
        lengths[flags(column.is_null())] = 0
    # Reads of four bytes may step beyond the last key; those bytes are masked out.
    data = (raw_data.to_pybytes() if raw_data else b"") + bytes(4)
    word_at = np.ndarray(len(data) - 3, dtype="<u4", buffer=data, strides=(1,))
    hashes = _SEED ^ lengths.astype(np.uint32)
    words = lengths // 4
    # The longest keys first: those still at work are always a prefix.
    order = _order(-words)
    falling = -words[order]
    for step in range(int(words.max(initial=0))):
        going = order[: int(np.searchsorted(falling, -step, side="left"))]
        mixed = word_at[starts[going] + 4 * step] * _M
        mixed ^= mixed >> _R
        hashes[going] = (hashes[going] * _M) ^ (mixed * _M)
    _mix_tails(hashes, word_at, starts + 4 * words, lengths % 4)
    hashes ^= hashes >> np.uint32(13)
    hashes *= _M
    hashes ^= hashes >> np.uint32(15)
    return hashes


def _mix_tails(
    hashes: npt.NDArray[np.uint32],
    word_at: npt.NDArray[np.uint32],
    at: npt.NDArray[np.int64],
    left: npt.NDArray[np.int64],
) -> None:
    """The last one to three bytes of keys whose length is no multiple of four."""
    some = np.flatnonzero(left)
    if not len(some):
        return
    kept = (np.uint32(1) << (left[some].astype(np.uint32) * np.uint32(8))) - np.uint32(1)
    hashes[some] = (hashes[some] ^ (word_at[at[some]] & kept)) * _M


def assign(keys: pa.Array, partition_count: int, *, unkeyed: int) -> npt.NDArray[np.int32]:
    """
    The partition of every row. Rows without a key all go to `unkeyed`.

    The caller spreads those: one partition for a whole batch, another for the next, gives fuller
    batches than a partition per row.
    """
    hashes = murmur2(keys) & _POSITIVE
    found = (hashes % np.uint32(partition_count)).astype(np.int32)
    if keys.null_count:
        found[flags(keys.is_null())] = unkeyed
    return found


def group(
    partitions: npt.NDArray[np.int32],
) -> tuple[npt.NDArray[np.int64], list[tuple[int, int, int]]]:
    """
    The order that brings rows of one partition together, and (partition, start, length) of each.

    Stable: rows of a partition keep their order.
    """
    counts = np.bincount(partitions)
    found = np.flatnonzero(counts)
    starts = np.cumsum(counts) - counts
    spans = zip(found.tolist(), starts[found].tolist(), counts[found].tolist(), strict=True)
    return _order(partitions), list(spans)


def _order(values: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.int64]:
    """The indexes of values in rising order, stable; narrow values in linear time, by radix."""
    is_narrow = values.min(initial=0) > -_NARROW and values.max(initial=0) < _NARROW
    return np.argsort(values.astype(np.int16) if is_narrow else values, kind="stable")
