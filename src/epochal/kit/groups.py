"""Groups of rows with equal values in some columns.

Rows are sorted once, so the cost does not grow with the number of groups.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa
import pyarrow.compute as pc


def grouped(keys: Sequence[pa.DictionaryArray]) -> tuple[pa.Array, Iterator[tuple[int, int]]]:
    """
    An order of the rows in which equal keys are adjacent, and each group's first place in it with
    its number of rows. Rows of one group keep the order that they came in.
    """
    codes = _combined(keys)
    order = pc.array_sort_indices(codes)
    return order, _runs(codes.take(order))


def _combined(keys: Sequence[pa.DictionaryArray]) -> pa.Array:
    """One number per row for the combination of values that it has."""
    codes = keys[0].indices.cast(pa.int64())
    for key in keys[1:]:
        codes = pc.add(pc.multiply(codes, len(key.dictionary)), key.indices.cast(pa.int64()))
    return codes


def _runs(sorted_codes: pa.Array) -> Iterator[tuple[int, int]]:
    first = 0
    for end in pc.run_end_encode(sorted_codes).run_ends.to_pylist():
        yield first, end - first
        first = end
