"""
The transfer of rows from the JVM to Python, as Arrow: slow types are sent in another form.

Spark writes a decimal into Arrow by way of Java's BigDecimal, which costs as much as four columns
of numbers. A decimal of up to 18 digits is a long inside of Spark: it is sent as that long
(`for_transfer`, on the driver), and Arrow makes a decimal of it again (`as_declared`, in a task).
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
"""What is sent in place of the columns where rows are laid out as bytes (see `row_layout`)."""


def for_transfer(frame: DataFrame, schema: StructType) -> DataFrame:
    """
    The rows as they are sent; Python knows columns by position, and `as_declared` restores them.

    `schema` is that of the first columns. Most frames are sent as they are: each change is one more
    analysis by Spark, in every epoch.
    """
    frame = plainly_named(frame, schema)
    shorts = {
        place for place, field in enumerate(schema.fields) if _is_short_decimal(field.dataType)
    }
    if not shorts:
        return frame
    # On the driver alone: a task needs no Spark for its part.
    from pyspark.sql.functions import col  # noqa: PLC0415

    from epochal.spark.jvm_expressions import UNAVAILABLE, JvmExpressions  # noqa: PLC0415

    try:
        expressions = JvmExpressions(frame.sparkSession)
        return frame.select(
            *(
                expressions.unscaled(col(name)).alias(name) if place in shorts else name
                for place, name in enumerate(frame.columns)
            )
        )
    except UNAVAILABLE as error:
        logger.debug("decimals are sent as they are: %s", error)
        return frame


def plainly_named(frame: DataFrame, schema: StructType) -> DataFrame:
    """The rows under names by which Spark can send them."""
    if _has_plain_names(schema):
        return frame
    return frame.toDF(*(f"c{place}" for place in range(len(frame.columns))))


def _has_plain_names(schema: StructType) -> bool:
    """Spark looks columns up by name when it sends them; a dot or a backtick breaks that."""
    names = [field.name.lower() for field in schema.fields]
    return len(set(names)) == len(names) and all(map(_PLAIN.fullmatch, names))


def as_declared(columns: list[pa.Array], schema: pa.Schema) -> pa.RecordBatch:
    """The rows that arrived, under the declared types."""
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
