"""The sum that a sink's receipts carry, over rows that were read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochal.spark.selecting import ROW_HASH, with_row_hash
from epochal.terms import Fingerprint

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MODULUS = 1 << 64


def fingerprint_of(frame: DataFrame) -> Fingerprint:
    """Rows and the sum of their hashes, as receipts carry it; no sum where a type prevents it."""
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    hashed = with_row_hash(frame)
    if hashed is None:
        return Fingerprint(frame.count())
    # As decimals: a sum of longs would overflow, which Spark refuses.
    total = functions.sum(hashed[ROW_HASH].cast("decimal(38,0)"))
    rows, hash_sum = hashed.agg(functions.count(functions.lit(1)), total).collect()[0]
    return Fingerprint(int(rows), int(hash_sum or 0) % _MODULUS)
