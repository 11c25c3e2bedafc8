"""
How rows cross from the JVM to Python: what Spark writes slowly crosses in another form.

Spark writes a decimal into Arrow by way of Java's BigDecimal, which costs as much as four columns
of numbers do. One of up to 18 digits is a long inside of Spark: as that long it crosses, and Arrow
makes the decimal of it again.
"""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

import pyarrow as pa

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import DataType, StructType

logger = logging.getLogger("epochal")

_LONG_DIGITS = 18
_PLAIN = re.compile(r"\w+")
_WIDE = pa.decimal128(38, 0)
ROW = "row"
PACKED = pa.schema([pa.field(ROW, pa.binary())])
"""What crosses in place of the columns where rows are laid out as bytes (see `packing`)."""


def for_crossing(frame: DataFrame, schema: StructType) -> DataFrame:
    """
    The rows for Python's side, which knows columns by place; `as_declared` is the way back.

    `schema` is what is known of the first columns. Most frames cross as they are: each change is
    one more analysis by Spark, in every epoch.
    """
    if not _has_plain_names(schema):
        frame = frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))
    shorts = {
        place for place, field in enumerate(schema.fields) if _is_short_decimal(field.dataType)
    }
    if not shorts:
        return frame
    # On the driver alone: a task's part is done without Spark.
    from pyspark.sql.functions import col  # noqa: PLC0415

    from epochal.spark.jvm_expressions import LACKING, Catalyst  # noqa: PLC0415

    try:
        catalyst = Catalyst(frame.sparkSession)
        return frame.select(
            *(
                catalyst.unscaled(col(name)).alias(name) if place in shorts else name
                for place, name in enumerate(frame.columns)
            )
        )
    except LACKING as error:
        logger.debug("decimals cross as they are: %s", error)
        return frame


def _has_plain_names(schema: StructType) -> bool:
    """Spark looks columns up by name on its way to Python; a dot or a backtick ends its search."""
    names = [field.name.lower() for field in schema.fields]
    return len(set(names)) == len(names) and all(map(_PLAIN.fullmatch, names))


def as_declared(columns: list[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """The rows that crossed, under the declared types."""
    declared = [
        _as_declared(column, field.type) for column, field in zip(columns, schema, strict=True)
    ]
    return pa.RecordBatch.from_arrays(declared, schema=schema)


def _as_declared(column: pa.Array, kind: pa.DataType) -> pa.Array:
    if column.type == kind:
        return column
    if pa.types.is_decimal(kind) and pa.types.is_int64(column.type):
        wide = column.cast(_WIDE)
        return pa.Array.from_buffers(kind, len(wide), wide.buffers(), offset=wide.offset)
    # Spark marks timestamps with the session's zone.
    return column.cast(kind)


def _is_short_decimal(kind: DataType) -> bool:
    from pyspark.sql.types import DecimalType  # noqa: PLC0415  importable without pyspark

    return isinstance(kind, DecimalType) and kind.precision <= _LONG_DIGITS
