"""
The hash of a row in Spark, as `epochal.row_hash` defines it, and sums of these hashes.

It is one SQL expression. `xxhash64` skips nulls, so their places are added as bits; it has no hash
of maps and joins the elements of arrays without their number, so these are hashed one by one:

    id BIGINT, tags ARRAY<STRING>
    xxhash64(id, array_size(tags), transform(tags, e1 -> xxhash64(e1, IF(e1 IS NULL, 1L, 0L))),
             IF(id IS NULL, 1L, 0L) | IF(tags IS NULL, 2L, 0L))
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epochal.row_hash import NULL_BITS
from epochal.spark.projection import quoted
from epochal.terms import FINGERPRINT_MODULUS, Fingerprint

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructType

logger = logging.getLogger("epochal")

ROW_HASH = "__epochal_row_hash"
_PLAIN = re.compile(r"\w+", re.ASCII)
_ALIKE = frozenset(
    f"{name}Type"
    for name in (
        *("Boolean", "Byte", "Short", "Integer", "Long", "Float", "Double", "Decimal"),
        *("Binary", "Date", "Timestamp", "TimestampNTZ"),
    )
)


def with_row_hash(frame: DataFrame) -> DataFrame | None:
    """
    The frame with one more column, last, that hashes the row; None where a type prevents it. Names
    that Spark can't tell apart are replaced.
    """
    from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark

    try:
        frame = _accessible(frame)
        return frame.withColumn(ROW_HASH, _hash_column(frame))
    except (_NoHash, PySparkException) as error:
        logger.warning("rows are not fingerprinted: %s", str(error).partition("\n")[0])
        return None


def row_hash(frame: DataFrame) -> Column | None:
    """That column; None where a type prevents it."""
    try:
        return _hash_column(frame)
    except _NoHash:
        return None


def is_hashed_alike(schema: StructType) -> bool:
    """Whether `epochal.row_hash` has the same hash for these types. Others are left to Spark."""
    return all(_is_alike(field.dataType) for field in schema.fields)


def _is_alike(kind: DataType) -> bool:
    from pyspark.sql import types  # noqa: PLC0415  importable without pyspark

    if isinstance(kind, types.StructType):
        return is_hashed_alike(kind)
    if isinstance(kind, types.ArrayType):
        return _is_alike(kind.elementType)
    if isinstance(kind, types.MapType):
        return _is_alike(kind.keyType) and _is_alike(kind.valueType)
    if type(kind) is types.StringType:
        return kind == types.StringType()  # with a collation, unequal texts may be equal
    return type(kind).__name__ in _ALIKE


def _accessible(frame: DataFrame) -> DataFrame:
    """The same rows; names that SQL can tell apart, and values of user-defined types unwrapped."""
    from pyspark.sql import functions, types  # noqa: PLC0415  importable without pyspark

    names = [name.lower() for name in frame.columns]
    if len(set(names)) < len(names):
        frame = frame.toDF(*(f"c{place}" for place in range(len(names))))
    if not any(isinstance(field.dataType, types.UserDefinedType) for field in frame.schema.fields):
        return frame
    return frame.select(
        *(
            functions.unwrap_udt(functions.col(quoted(field.name))).alias(field.name)
            if isinstance(field.dataType, types.UserDefinedType)
            else quoted(field.name)
            for field in frame.schema.fields
        )
    )


def _hash_column(frame: DataFrame) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    from epochal.spark.jvm_expressions import built_once  # noqa: PLC0415

    fields = _Fields.of(frame)
    sql = fields.sql
    if sql is not None:
        # One text: building it from columns would cost several JVM calls for each.
        return built_once(frame, sql, lambda: functions.expr(f"{sql} AS {ROW_HASH}"))
    columns = [*_columns(frame, fields.values), *map(functions.expr, fields.null_bits())]
    return functions.xxhash64(*columns).alias(ROW_HASH)


def _columns(frame: DataFrame, values: Sequence[str | _VariantBytes]) -> list[Column]:
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    from epochal.spark.jvm_expressions import UNAVAILABLE, JvmExpressions  # noqa: PLC0415

    try:
        expressions = JvmExpressions(frame.sparkSession)
        return [
            functions.expr(value)
            if isinstance(value, str)
            else expressions.bytes_by(functions.expr(value.variant), value.method)
            for value in values
        ]
    except UNAVAILABLE as error:
        raise _NoHash(f"the bytes of a variant can't be had here: {error}") from None


def fingerprint_of(frame: DataFrame) -> Fingerprint:
    """
    Rows and the sum of their hashes, as receipts carry it; no sum where a type prevents it. For
    rows that were read back.
    """
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    if not frame.columns:  # no epoch has had a row yet
        return Fingerprint(frame.count(), 0)
    hashed = with_row_hash(frame)
    if hashed is None:
        return Fingerprint(frame.count())
    # As decimals: a sum of longs would overflow, which Spark refuses.
    total = functions.sum(hashed[ROW_HASH].cast("decimal(38,0)"))
    rows, hash_sum = hashed.agg(functions.count(functions.lit(1)), total).collect()[0]
    return Fingerprint(int(rows), int(hash_sum or 0) % FINGERPRINT_MODULUS)


class ObservedRows:
    """
    Counts and hashes the rows of a frame while a job reads them.

    Only attempts that count do: those of the job's own tasks that succeeded. Below an exchange,
    rows of a stage that runs again are counted again, so none may follow, and only one job may read
    `frame`. The sum of hashes wraps around at 64 bits, as that of a fingerprint does.
    """

    def __init__(self, frame: DataFrame, *, is_hashed: bool) -> None:
        from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

        from epochal.spark.jvm_expressions import summed  # noqa: PLC0415

        hashed = row_hash(frame) if is_hashed else None
        self._is_hashed = hashed is not None
        key = frame.schema.json() if self._is_hashed else None
        self._rows = summed(
            frame, key, lambda: functions.lit(0).cast("bigint") if hashed is None else hashed
        )

    @property
    def frame(self) -> DataFrame:
        return self._rows.frame

    def fingerprint(self) -> Fingerprint:
        """Of the rows that a job on `frame` has read."""
        rows = int(self._rows.accumulator.count())
        if not self._is_hashed:
            return Fingerprint(rows)
        return Fingerprint(rows, int(self._rows.accumulator.sum()) % FINGERPRINT_MODULUS)


class _NoHash(Exception):
    """Why rows can't be hashed."""


@dataclass(frozen=True, slots=True)
class _VariantBytes:
    """A part of a variant, which has no name in SQL: the result of a method of the JVM's object."""

    variant: str
    method: str


class _Fields:
    """The fields that are hashed together: SQL of their values, and of all that may be null."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self.values: list[str | _VariantBytes] = []
        self._places: list[str] = []

    @classmethod
    def of(cls, frame: DataFrame) -> _Fields:
        """The columns of a frame."""
        fields = cls()
        for field in frame.schema.fields:
            fields.add(quoted(field.name), field.dataType)
        return fields

    @property
    def sql(self) -> str | None:
        """The hash; None where a part of it has no name in SQL."""
        return self.hashed() if all(isinstance(value, str) for value in self.values) else None

    def hashed(self) -> str:
        return f"xxhash64({', '.join(map(str, [*self.values, *self.null_bits()]))})"

    def null_bits(self) -> list[str]:
        return [
            " | ".join(
                f"IF({sql} IS NULL, {1 << place}L, 0L)"
                for place, sql in enumerate(self._places[start : start + NULL_BITS])
            )
            for start in range(0, len(self._places), NULL_BITS)
        ]

    def add(self, sql: str, kind: DataType) -> None:
        from pyspark.sql import types  # noqa: PLC0415  importable without pyspark

        self._places.append(sql)
        match kind:
            case types.StructType():
                self._add_struct(sql, kind)
            case types.ArrayType():
                self.values += [f"array_size({sql})", self._elements(sql, ("", kind.elementType))]
            case types.MapType():
                entries = f"map_entries({sql})"
                fields = ("['key']", kind.keyType), ("['value']", kind.valueType)
                hashes = self._elements(entries, *fields)
                self.values += [f"array_size({entries})", f"sort_array({hashes})"]
            case types.StringType() if kind.simpleString() != "string":
                # Equal by its collation is not the same: the bytes count.
                self.values.append(f"CAST({sql} AS BINARY)")
            case _:
                self._add_other(sql, kind)

    def _add_other(self, sql: str, kind: DataType) -> None:
        """By name: releases differ in the types they have."""
        name = type(kind).__name__
        if name in ("GeometryType", "GeographyType"):  # in Arrow: a struct of these two
            self._places += [sql, sql]
            self.values += [f"ST_Srid({sql})", f"ST_AsBinary({sql})"]
        elif name == "VariantType" and not self._depth:  # in Arrow: a struct of these two
            self._places += [sql, sql]
            self.values += [_VariantBytes(sql, "getValue"), _VariantBytes(sql, "getMetadata")]
        elif name == "VariantType" or hasattr(kind, "sqlType"):
            raise _NoHash(f"values of type {kind.simpleString()} within others")
        elif name != "NullType":
            self.values.append(sql)

    def _add_struct(self, sql: str, kind: StructType) -> None:
        names = {field.name.lower() for field in kind.fields}
        if len(names) < len(kind.fields) or not all(map(_PLAIN.fullmatch, names)):
            kind = _renamed(kind)
            sql = f"CAST({sql} AS {kind.simpleString()})"
        for field in kind.fields:
            # In brackets: after a dot it could be a column of a table of that name.
            self.add(f"{sql}['{field.name}']", field.dataType)

    def _elements(self, sql: str, *fields: tuple[str, DataType]) -> str:
        element = _Fields(self._depth + 1)
        name = f"e{element._depth}"
        for suffix, kind in fields:
            element.add(name + suffix, kind)
        return f"transform({sql}, {name} -> {element.hashed()})"


def _renamed(kind: StructType) -> StructType:
    """The same type with names that SQL can use, at every depth: a cast goes by position."""
    from pyspark.sql import types  # noqa: PLC0415  importable without pyspark

    def within(kind: DataType) -> DataType:
        if isinstance(kind, types.StructType):
            return _renamed(kind)
        if isinstance(kind, types.ArrayType):
            return types.ArrayType(within(kind.elementType))
        if isinstance(kind, types.MapType):
            return types.MapType(within(kind.keyType), within(kind.valueType))
        return kind

    return types.StructType(
        [
            types.StructField(f"c{place}", within(field.dataType))
            for place, field in enumerate(kind.fields)
        ]
    )
