"""Rows by the values of some columns: sorted once, so that the cost is not one scan a group."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc


def grouped(keys: Sequence[pa.DictionaryArray]) -> tuple[pa.Array, Iterator[tuple[int, int]]]:
    """
    An order of the rows in which equal keys stand together, and where each group of them begins in
    it and how many there are. Rows of one group stay in the order that they came in.
    """
    codes = _combined(keys)
    order = pc.array_sort_indices(codes)
    return order, _stretches(codes.take(order))


def _combined(keys: Sequence[pa.DictionaryArray]) -> pa.Array:
    """One number a row that says which combination of values it has."""
    codes = keys[0].indices.cast(pa.int64())
    for key in keys[1:]:
        codes = pc.add(pc.multiply(codes, len(key.dictionary)), key.indices.cast(pa.int64()))
    return codes


def _stretches(sorted_codes: pa.Array) -> Iterator[tuple[int, int]]:
    first = 0
    for end in pc.run_end_encode(sorted_codes).run_ends.to_pylist():
        yield first, end - first
        first = end
