"""Rows laid out as bytes one by one, the plain way: what an engine's own way is compared with."""

from __future__ import annotations

import datetime as dt
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa

from epochal.kit.row_layout import Digits, Fixed, Flag, Number, Piece, RowLayout, Sized

_INTEGERS = {2: ">h", 4: ">i", 8: ">q"}
_FLOATS = {4: ">f", 8: ">d"}
_DAY = dt.date(1970, 1, 1)


def laid_out(rows: pa.RecordBatch, packing: RowLayout) -> pa.RecordBatch:
    """The one column that tasks get."""
    done = [b"".join(_bytes(piece, row) for piece in packing) for row in rows.to_pylist()]
    return pa.record_batch([pa.array(done, pa.binary())], names=["row"])


def _bytes(piece: Piece, row: dict[str, Any]) -> bytes:
    if isinstance(piece, Fixed):
        return piece.value
    value = row[piece.field]
    if value is None:
        return piece.null
    match piece:
        case Flag():
            return piece.true if value else piece.false
        case Sized():
            content = value.encode() if isinstance(value, str) else value
            return struct.pack(">i", len(content)) + content
        case Number():
            return piece.before + _number(piece, value)
        case Digits():
            return _digits(piece, value)


def _number(piece: Number, value: Any) -> bytes:
    if isinstance(value, float):
        return struct.pack(_FLOATS[piece.width], value)
    if isinstance(value, dt.datetime):
        since = dt.datetime(1970, 1, 1, tzinfo=value.tzinfo)
        value = (value - since) // dt.timedelta(microseconds=1)
    elif isinstance(value, dt.date):
        value = (value - _DAY).days
    return struct.pack(_INTEGERS[piece.width], value + piece.plus)


def _digits(piece: Digits, value: Decimal) -> bytes:
    _, digits, _ = value.as_tuple()
    rest, groups = int("".join(map(str, digits))) * 10**piece.zeros, []
    for _ in range(piece.groups):
        rest, group = divmod(rest, 10_000)
        groups.append(group)
    assert rest == 0
    before = piece.before_negative if value < 0 else piece.before
    return before + b"".join(struct.pack(">h", group) for group in reversed(groups))
