"""
Rows laid out as bytes inside of the JVM, for sinks that ask for it (`epochal.kit.row_layout`).

The layout is built from Spark's own expressions, some of which have no name in SQL, so that its
compiled code does the work. Where a release lacks one, or a type has no such form, the columns are
sent as they are. Imports pyspark: only the driver imports this module.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING

from pyspark.sql import Column, DataFrame, functions, types

from epochal.contract import Sink
from epochal.kit.row_layout import Digits, Fixed, Flag, LaysOutRows, Number, Piece, RowLayout, Sized
from epochal.spark.arrow_transfer import ROW
from epochal.spark.jvm_expressions import UNAVAILABLE, JvmExpressions, built_once
from epochal.spark.projection import quoted
from epochal.terms import Json

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("epochal")

_GROUP = 10_000
_GROUPS_PER_LONG = 4


def packed(
    frame: DataFrame, sink: Sink, arrow: pa.Schema, handout: Json, *, extra_column: Column | None
) -> DataFrame | None:
    """
    The rows as bytes, and one more column; None where the sink does not ask for bytes, or
    Spark can't build them.
    """
    packing = sink.row_layout(arrow, handout) if isinstance(sink, LaysOutRows) else None
    if packing is None:
        return None
    try:
        key = (packing, frame.schema.json())
        row = built_once(frame, key, lambda: _Builder(frame).row(packing))
        return frame.select(row, *([] if extra_column is None else [extra_column]))
    # Also where Spark refuses a column: names that differ by case alone are ambiguous.
    except UNAVAILABLE as error:
        logger.debug("sink %r: columns are sent as they are: %s", sink.name, error)
        return None


class _Builder:
    def __init__(self, frame: DataFrame) -> None:
        self._expressions = JvmExpressions(frame.sparkSession)
        self._types = {field.name: field.dataType for field in frame.schema.fields}

    def row(self, packing: RowLayout) -> Column:
        """
        A string, though it is none: Spark copies a binary value twice more on its way to Arrow,
        once out of the field and once out of the row. No cast between the two looks at the bytes.
        """
        texts: list[Column] = []
        run: list[Column] = []
        for piece in _folded(packing):
            run += self._parts(piece)
            if isinstance(piece, Sized):
                texts += [_text(run), _or_nothing(self._column(piece).cast("string"), "")]
                run = []
        return functions.concat(*texts, *([_text(run)] if run else [])).alias(ROW)

    def _column(self, piece: Number | Flag | Sized | Digits) -> Column:
        return functions.col(quoted(piece.field))

    def _parts(self, piece: Piece) -> list[Column]:
        """The bytes to concatenate, without the value of a sized piece."""
        if isinstance(piece, Fixed):
            return [_bytes(piece.value)]
        column = self._column(piece)
        if isinstance(piece, Number):
            return self._marked_number(column, piece)
        if isinstance(piece, Flag):
            mark = functions.when(column.isNull(), _bytes(piece.null))
            return [mark.when(column, _bytes(piece.true)).otherwise(_bytes(piece.false))]
        if isinstance(piece, Sized):
            size = self._expressions.bytes_of(functions.octet_length(column))
            return [functions.coalesce(size, _bytes(piece.null))]
        return self._digits(column, piece)

    def _marked_number(self, column: Column, piece: Number) -> list[Column]:
        number = self._number(column, piece)
        if piece.width == 4 and len(piece.before) == 4:
            before = int.from_bytes(piece.before, signed=True) << 32
            whole = number.cast("bigint").bitwiseAND(0xFFFF_FFFF).bitwiseOR(before)
            return [functions.coalesce(self._expressions.bytes_of(whole), _bytes(piece.null))]
        mark = functions.when(column.isNull(), _bytes(piece.null)).otherwise(_bytes(piece.before))
        return [mark, _or_nothing(self._expressions.bytes_of(number))]

    def _number(self, column: Column, piece: Number) -> Column:
        kind = self._types[piece.field]
        if isinstance(kind, types.DoubleType):
            return self._expressions.bits(column)
        if isinstance(kind, types.FloatType):
            return self._expressions.bits_of_float(column)
        if isinstance(kind, types.DateType):
            column = functions.unix_date(column)
        elif isinstance(kind, types.TimestampType | types.TimestampNTZType):
            column = self._expressions.microseconds(column, kind)
        else:
            column = column.cast({2: "smallint", 4: "int", 8: "bigint"}[piece.width])
        if piece.plus < 0 and piece.width == 8:
            # Nothing wraps around to a number that means another moment: the target refuses this.
            first = functions.lit(-(2**63) - piece.plus + 1)
            column = functions.when(column < first, first).otherwise(column)
        return column + functions.lit(piece.plus) if piece.plus else column

    def _digits(self, column: Column, piece: Digits) -> list[Column]:
        unscaled = self._expressions.unscaled(column)
        value = functions.abs(unscaled)
        mark = functions.when(column.isNull(), _bytes(piece.null))
        mark = mark.when(unscaled < 0, _bytes(piece.before_negative))
        groups = [self._group(value, place, piece) for place in reversed(range(piece.groups))]
        first = len(groups) % _GROUPS_PER_LONG
        singles = [group.cast("smallint") for group in groups[:first]]
        fours = [
            _in_one_long(groups[at : at + _GROUPS_PER_LONG])
            for at in range(first, len(groups), _GROUPS_PER_LONG)
        ]
        digits = [_or_nothing(self._expressions.bytes_of(one)) for one in (*singles, *fours)]
        return [mark.otherwise(_bytes(piece.before)), *digits]

    def _group(self, value: Column, place: int, piece: Digits) -> Column:
        """The digit to base 10,000 at this place, counted from the last."""
        zeros = 10**piece.zeros
        group: Column
        if place == 0:
            group = value % (_GROUP // zeros) * zeros
        else:
            group = self._expressions.quotient(value, _GROUP**place // zeros) % _GROUP
        return group


def _folded(packing: RowLayout) -> list[Piece]:
    """The same row in fewer parts: each part costs more than its bytes do."""
    folded: list[Piece] = []
    for piece in packing:
        before = folded[-1] if folded else None
        if isinstance(before, Fixed) and isinstance(piece, Number):
            value = before.value
            folded[-1] = replace(piece, before=value + piece.before, null=value + piece.null)
        else:
            folded.append(piece)
    return folded


def _in_one_long(groups: list[Column]) -> Column:
    return reduce(lambda high, low: functions.shiftleft(high, 16).bitwiseOR(low), groups)


def _bytes(value: bytes) -> Column:
    return functions.lit(value)


def _or_nothing(payload: Column, nothing: bytes | str = b"") -> Column:
    """Without this, a null would make the whole row null."""
    return functions.coalesce(payload, functions.lit(nothing))


def _text(run: list[Column]) -> Column:
    """Of these bytes; by `spark.sql.function.concatBinaryAsString` they are one already."""
    return functions.concat(*run).cast("string")
