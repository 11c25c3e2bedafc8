"""
The hash of a row in Arrow, the same that `spark.row_hash` has Spark compute.

Sums of these hashes prove that rows written again are the decided ones, so the hash must tell apart
whatever differs. It is XXH64, chained: the hash so far is the seed of the next value. A null has no
bytes, so the places of nulls follow as bits:

    row            the values of its fields, then one bit per field: null or not
    struct         its fields as if they were fields of the row; a bit for the struct, one for each
    list           its size, then the hash of each element as a row of one field
    map            its size, then the hashes of its entries (key, value), sorted: entries of a map
                   have no order

    (NULL, 5)      5, bits 01           struct(1, NULL)    1, bits 0 0 1
    (5, NULL)      5, bits 10           struct(NULL, 1)    1, bits 0 1 0
    []             0, bits 0            [1, NULL]          2, hash(1, bit 0), hash(bit 1), bits 0
    NULL           bits 1               [1]                1, hash(1, bit 0), bits 0

A value has the bytes that Spark hashes: integers of up to 32 bits as 32, others as 64; floats with
one zero and one NaN; timestamps as microseconds; decimals unscaled, up to 18 digits as 64 bits,
else as big-endian bytes; text as UTF-8. All rows of a batch are hashed at once, by NumPy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import flags
from epochal.terms import FINGERPRINT_MODULUS, Fingerprint

SEED = 42
"""Spark's: its `xxhash64` takes no other."""
NULL_BITS = 63
"""How many null bits one 64-bit number carries, so that it is never negative in SQL."""
SHORT_DECIMAL_DIGITS = 18
_ROWS_AT_ONCE = 1 << 14
"""Few enough that what is computed of them stays in the processor's cache."""
_WORDS_AT_ONCE = 1 << 16

_Hashes: TypeAlias = npt.NDArray[np.uint64]
_Flags: TypeAlias = npt.NDArray[np.bool_]
_Places: TypeAlias = npt.NDArray[np.int64]

_P1 = np.uint64(0x9E3779B185EBCA87)
_P2 = np.uint64(0xC2B2AE3D27D4EB4F)
_P3 = np.uint64(0x165667B19E3779F9)
_P4 = np.uint64(0x85EBCA77C2B2AE63)
_P5 = np.uint64(0x27D4EB2F165667C5)
_LOW_HALF = np.uint64(0xFFFF_FFFF)
_LOW_BYTE = np.uint64(0xFF)
_LANE_SEEDS = np.array([[0x60EA27EEADC0B5D6], [_P2], [0], [0x61C8864E7A143579]], dtype=np.uint64)
"""P1 + P2, P2, 0, -P1."""
_STRIPE = 32
_LANES = np.arange(4, dtype=np.int64)[:, None] * 8


def fingerprint_of(batches: Iterable[pa.RecordBatch]) -> Fingerprint:
    """The number of rows and the sum of their hashes."""
    rows = total = 0
    for batch in batches:
        rows += batch.num_rows
        total += int(row_hashes(batch).sum(dtype=np.uint64))
    return Fingerprint(rows, total % FINGERPRINT_MODULUS)


def row_hashes(batch: pa.RecordBatch) -> npt.NDArray[np.uint64]:
    """The hash of every row."""
    return _row_hashes(batch.columns, batch.num_rows)


def is_hashable(schema: pa.Schema) -> bool:
    """Whether every type has a hash: unions have none."""
    return all(_is_hashable(field.type) for field in schema)


def _is_hashable(kind: pa.DataType) -> bool:
    if pa.types.is_union(kind):
        return False
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return _is_hashable(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _is_hashable(kind.storage_type)
    return all(_is_hashable(kind.field(place).type) for place in range(kind.num_fields))


def _row_hashes(columns: Sequence[pa.Array], count: int) -> _Hashes:
    hashes = np.empty(count, dtype=np.uint64)
    for start in range(0, count, _ROWS_AT_ONCE):
        some = slice(start, min(start + _ROWS_AT_ONCE, count))
        rows = _Rows(some.stop - start)
        for column in columns:
            rows.add(column.slice(start, some.stop - start))
        hashes[some] = rows.ended()
    return hashes


class _Rows:
    """Rows of which some columns are hashed: the hashes so far, and where values are null."""

    def __init__(self, count: int) -> None:
        self._hashes = np.full(count, SEED, dtype=np.uint64)
        self._nulls: list[_Flags | None] = []

    def ended(self) -> _Hashes:
        """The hashes, once all columns are added."""
        for start in range(0, len(self._nulls), NULL_BITS):
            bits = np.zeros(len(self._hashes), dtype=np.uint64)
            for place, nulls in enumerate(self._nulls[start : start + NULL_BITS]):
                if nulls is not None:
                    bits |= nulls.astype(np.uint64) << np.uint64(place)
            self._hashes = _of_longs(bits, self._hashes)
        return self._hashes

    def add(self, column: pa.Array) -> None:
        column = _plain(column)
        kind = column.type
        nulls = flags(column.is_null()) if column.null_count else None
        self._nulls.append(nulls)
        if pa.types.is_struct(kind):
            for field in column.flatten():  # null where the struct is
                self.add(field)
        elif pa.types.is_map(kind):
            self._add_elements(
                *_sorted(*_elements(column, [column.keys, column.items], nulls)), nulls
            )
        elif any(is_one(kind) for is_one in _LISTS):
            self._add_elements(*_elements(column, [column.values], nulls), nulls)
        elif not pa.types.is_null(kind):
            self._take(_of_values(column, self._hashes, nulls), nulls)

    def _add_elements(
        self, elements: _Hashes, starts: _Places, sizes: _Places, nulls: _Flags | None
    ) -> None:
        self._take(_of_ints(sizes, self._hashes), nulls)
        # The longest first: those that still have elements are always a prefix.
        order = np.argsort(-sizes, kind="stable")
        falling = -sizes[order]
        for step in range(int(sizes.max(initial=0))):
            some = order[: int(np.searchsorted(falling, -step, side="left"))]
            self._hashes[some] = _of_longs(elements[starts[some] + step], self._hashes[some])

    def _take(self, hashes: _Hashes, nulls: _Flags | None) -> None:
        """A null leaves the hash as it was."""
        self._hashes = hashes if nulls is None else np.where(nulls, self._hashes, hashes)


def _plain(column: pa.Array) -> pa.Array:
    """The same values in one of the types that are hashed."""
    kind = column.type
    if isinstance(kind, pa.BaseExtensionType):
        return _plain(column.storage)
    if pa.types.is_dictionary(kind):
        return _plain(column.dictionary_decode())
    if pa.types.is_run_end_encoded(kind):
        return _plain(pc.run_end_decode(column))
    for is_one, like in _CASTS:
        if is_one(kind):
            return column.cast(like(kind))
    return column


_LISTS = (
    pa.types.is_list,
    pa.types.is_large_list,
    pa.types.is_fixed_size_list,
    pa.types.is_list_view,
    pa.types.is_large_list_view,
)
_CASTS: Sequence[tuple[Callable[[pa.DataType], bool], Callable[[pa.DataType], pa.DataType]]] = (
    (pa.types.is_string_view, lambda _: pa.large_string()),
    (pa.types.is_binary_view, lambda _: pa.large_binary()),
    (
        lambda kind: pa.types.is_decimal(kind) and kind.bit_width < 128,
        lambda kind: pa.decimal128(kind.precision, kind.scale),
    ),
    (pa.types.is_boolean, lambda _: pa.int8()),
    (pa.types.is_float16, lambda _: pa.float32()),
    (pa.types.is_date64, lambda _: pa.date32()),
    (
        lambda kind: pa.types.is_timestamp(kind) and kind.unit in ("s", "ms"),
        lambda kind: pa.timestamp("us", tz=kind.tz),
    ),
)


def _elements(
    column: pa.Array, fields: Sequence[pa.Array], nulls: _Flags | None
) -> tuple[_Hashes, _Places, _Places]:
    """The hashes of all elements, where those of each list begin, and how many it has."""
    starts, sizes = _spans(column)
    if nulls is not None:
        sizes[nulls] = 0  # Arrow allows a null list to have elements
    first = int(starts.min())
    count = int((starts + sizes).max()) - first
    hashes = _row_hashes([field.slice(first, count) for field in fields], count)
    return hashes, starts - first, sizes


def _spans(column: pa.Array) -> tuple[_Places, _Places]:
    """Where each list begins among all elements, and its size."""
    kind = column.type
    if pa.types.is_fixed_size_list(kind):
        starts = np.arange(column.offset, column.offset + len(column)) * kind.list_size
        return starts, np.full(len(column), kind.list_size)
    is_large = pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind)
    dtype = np.dtype(np.int64 if is_large else np.int32)
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        starts, sizes = (_numbers(column, dtype, buffer=place) for place in (1, 2))
        return starts.astype(np.int64), sizes.astype(np.int64)
    ends = _numbers(column, dtype, extra=1).astype(np.int64)
    return ends[:-1], np.diff(ends)


def _sorted(elements: _Hashes, starts: _Places, sizes: _Places) -> tuple[_Hashes, _Places, _Places]:
    """The same with each list's hashes in rising order, as signed numbers."""
    lists = np.repeat(np.arange(len(sizes)), sizes)
    firsts = np.cumsum(sizes) - sizes
    kept = elements[np.arange(len(lists)) + np.repeat(starts - firsts, sizes)]
    return kept[np.lexsort((kept.view(np.int64), lists))], firsts, sizes


def _of_values(column: pa.Array, seeds: _Hashes, nulls: _Flags | None) -> _Hashes:
    kind = column.type
    if _is_sized(kind):
        return _of_sized(column, seeds, nulls)
    if pa.types.is_decimal(kind):
        return _of_decimals(column, seeds)
    if pa.types.is_floating(kind):
        return _of_floats(column, seeds)
    if kind in _INTS:
        return _of_ints(_numbers(column, _INTS[kind]), seeds)
    if kind.bit_width > 64 or pa.types.is_fixed_size_binary(kind):
        return _of_fixed(column, seeds)
    return _of_longs(_numbers(column, _LONGS.get(kind, np.int64)), seeds)


_INTS: dict[pa.DataType, type[np.integer[Any]]] = {
    pa.int8(): np.int8,
    pa.int16(): np.int16,
    pa.int32(): np.int32,
    pa.uint8(): np.uint8,
    pa.uint16(): np.uint16,
    pa.date32(): np.int32,
    pa.time32("s"): np.int32,
    pa.time32("ms"): np.int32,
}
_LONGS = {pa.uint32(): np.uint32}


def _is_sized(kind: pa.DataType) -> bool:
    return bool(
        pa.types.is_string(kind)
        or pa.types.is_binary(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_large_binary(kind)
    )


def _numbers(column: pa.Array, dtype: Any, *, extra: int = 0, buffer: int = 1) -> npt.NDArray[Any]:
    """The numbers of one of the column's buffers; anything where it is null."""
    kind = np.dtype(dtype)
    start = column.offset * kind.itemsize
    return np.frombuffer(column.buffers()[buffer], kind, count=len(column) + extra, offset=start)


def _of_floats(column: pa.Array, seeds: _Hashes) -> _Hashes:
    """By their bits; all zeros are alike, and all NaNs."""
    dtype = np.float64 if pa.types.is_float64(column.type) else np.float32
    values = _numbers(column, dtype) + dtype(0)  # -0.0 becomes 0.0
    values[np.isnan(values)] = np.nan
    if dtype is np.float64:
        return _of_longs(values.view(np.int64), seeds)
    return _of_ints(values.view(np.int32), seeds)


def _of_decimals(column: pa.Array, seeds: _Hashes) -> _Hashes:
    width = column.type.bit_width // 8
    parts = _numbers(column, np.dtype((np.int64, (width // 8,))))
    if column.type.precision <= SHORT_DECIMAL_DIGITS:
        return _of_longs(parts[:, 0], seeds)
    digits = np.ascontiguousarray(parts.view(np.uint8).reshape(-1, width)[:, ::-1])
    # As few bytes as leave the sign in the first bit.
    magnitude = digits ^ np.where(digits[:, :1] > 127, np.uint8(255), np.uint8(0))
    magnitude[:, -1] |= magnitude[:, -1] == 0
    first = (magnitude != 0).argmax(axis=1)
    top = magnitude[np.arange(len(first)), first]
    first -= top > 127
    starts = np.arange(len(first), dtype=np.int64) * width + first
    return _of_bytes(digits.reshape(-1), starts, width - first, seeds)


def _of_sized(column: pa.Array, seeds: _Hashes, nulls: _Flags | None) -> _Hashes:
    is_large = pa.types.is_large_string(column.type) or pa.types.is_large_binary(column.type)
    ends = _numbers(column, np.int64 if is_large else np.int32, extra=1).astype(np.int64)
    lengths = np.diff(ends)
    if nulls is not None:
        lengths[nulls] = 0
    first, last = int(ends[0]), int(ends[-1])
    raw = column.buffers()[2]
    data = np.frombuffer(raw, np.uint8)[first:last] if raw else np.empty(0, np.uint8)
    return _of_bytes(data, ends[:-1] - first, lengths, seeds)


def _of_fixed(column: pa.Array, seeds: _Hashes) -> _Hashes:
    """Values that all take the same number of bytes, hashed as these bytes."""
    width = column.type.bit_width // 8
    data = _numbers(column, np.dtype((np.uint8, (width,)))).reshape(-1)
    starts = np.arange(len(column), dtype=np.int64) * width
    return _of_bytes(data, starts, np.full(len(column), width, dtype=np.int64), seeds)


# XXH64 of many values at once


def _of_ints(values: npt.NDArray[Any], seeds: _Hashes) -> _Hashes:
    """Of 4 bytes each."""
    hashes = seeds + (_P5 + np.uint64(4))
    _mix_half(hashes, values.astype(np.int64).view(np.uint64) & _LOW_HALF)
    return _finished(hashes)


def _of_longs(values: npt.NDArray[Any], seeds: _Hashes) -> _Hashes:
    """Of 8 bytes each."""
    hashes = seeds + (_P5 + np.uint64(8))
    _mix_word(hashes, values.astype(np.uint64))
    return _finished(hashes)


def _of_bytes(
    data: npt.NDArray[np.uint8], starts: _Places, lengths: _Places, seeds: _Hashes
) -> _Hashes:
    # Reads of eight bytes may step beyond the last value; those bytes are masked out.
    padded = np.concatenate([data, np.zeros(8, np.uint8)])
    word_at = np.ndarray(len(data) + 1, dtype="<u8", buffer=padded, strides=(1,))
    hashes = seeds + _P5
    stripes = lengths // _STRIPE
    long = np.flatnonzero(stripes)
    if len(long):
        hashes[long] = _of_stripes(word_at, starts[long], stripes[long], seeds[long])
    hashes += lengths.astype(np.uint64)
    _mix_tails(hashes, word_at, starts + stripes * _STRIPE, lengths % _STRIPE)
    return _finished(hashes)


def _of_stripes(word_at: _Hashes, starts: _Places, stripes: _Places, seeds: _Hashes) -> _Hashes:
    """Of the whole stripes of 32 bytes: four lanes that are mixed independently, then joined."""
    # The longest first: those that still have stripes are always a prefix.
    order = np.argsort(-stripes, kind="stable")
    falling = -stripes[order]
    from_here = starts[order]
    lanes = seeds[order] + _LANE_SEEDS
    step = 0
    while step < stripes.max():
        count = int(np.searchsorted(falling, -step, side="left"))
        steps = min(int(-falling[count - 1]) - step, max(1, _WORDS_AT_ONCE // (4 * count)))
        ahead = np.arange(step, step + steps, dtype=np.int64)[:, None, None] * _STRIPE
        words = word_at[from_here[:count] + _LANES + ahead] * _P2
        going = lanes[:, :count]
        for word in words:
            going += word
            _rotate(going, 31)
            going *= _P1
        step += steps
    hashes = np.empty_like(seeds)
    hashes[order] = _joined(lanes)
    return hashes


def _joined(lanes: _Hashes) -> _Hashes:
    turned = [lane.copy() for lane in lanes]
    for lane, by in zip(turned, (1, 7, 12, 18), strict=True):
        _rotate(lane, by)
    hashes: _Hashes = turned[0] + turned[1] + turned[2] + turned[3]
    lanes *= _P2
    _rotate(lanes, 31)
    lanes *= _P1
    for lane in lanes:
        hashes ^= lane
        hashes *= _P1
        hashes += _P4
    return hashes


def _mix_tails(hashes: _Hashes, word_at: _Hashes, at: _Places, left: _Places) -> None:
    """The last 0 to 31 bytes: by eights, by four, by ones."""
    for step in range(3):
        some = np.flatnonzero(left >= 8 * (step + 1))
        _mix_some(hashes, some, word_at[at[some] + 8 * step], _mix_word)
    at = at + left // 8 * 8
    some = np.flatnonzero(left & 4)
    _mix_some(hashes, some, word_at[at[some]] & _LOW_HALF, _mix_half)
    at += left & 4
    for step in range(3):
        some = np.flatnonzero((left & 3) > step)
        _mix_some(hashes, some, word_at[at[some] + step] & _LOW_BYTE, _mix_byte)


def _mix_some(
    hashes: _Hashes, some: _Places, values: _Hashes, mix: Callable[[_Hashes, _Hashes], None]
) -> None:
    if len(some) == len(hashes):
        mix(hashes, values)
    elif len(some):
        mixed = hashes[some]
        mix(mixed, values)
        hashes[some] = mixed


def _mix_word(hashes: _Hashes, words: _Hashes) -> None:
    mixed = words * _P2
    _rotate(mixed, 31)
    mixed *= _P1
    hashes ^= mixed
    _rotate(hashes, 27)
    hashes *= _P1
    hashes += _P4


def _mix_half(hashes: _Hashes, halves: _Hashes) -> None:
    hashes ^= halves * _P1
    _rotate(hashes, 23)
    hashes *= _P2
    hashes += _P3


def _mix_byte(hashes: _Hashes, values: _Hashes) -> None:
    hashes ^= values * _P5
    _rotate(hashes, 11)
    hashes *= _P1


def _finished(hashes: _Hashes) -> _Hashes:
    hashes ^= hashes >> np.uint64(33)
    hashes *= _P2
    hashes ^= hashes >> np.uint64(29)
    hashes *= _P3
    hashes ^= hashes >> np.uint64(32)
    return hashes


def _rotate(values: _Hashes, by: int) -> None:
    """In place, to the left."""
    low = values >> np.uint64(64 - by)
    values <<= np.uint64(by)
    values |= low
