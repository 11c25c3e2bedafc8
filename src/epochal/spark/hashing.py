"""The sum that a sink's receipts carry, over rows that were read back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from epochal.spark.selecting import ROW_HASH, with_row_hash

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_MODULUS = 1 << 64


def hash_sum(frame: DataFrame) -> int | None:
    """The sum of all row hashes modulo 2^64; None where a type can't be hashed."""
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    hashed = with_row_hash(frame)
    if hashed is None:
        return None
    # As decimals: a sum of longs would overflow, which Spark refuses.
    found = hashed.agg(functions.sum(hashed[ROW_HASH].cast("decimal(38,0)"))).first()
    return 0 if found is None or found[0] is None else int(found[0]) % _MODULUS
