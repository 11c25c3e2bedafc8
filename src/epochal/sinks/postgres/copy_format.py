"""The binary format of COPY: rows that the engine (Spark) lays out as bytes, and how they are read.

A row is the number of its columns, and for each the number of its bytes, -1 for NULL, and the
bytes. Only types whose values need no check first are laid out this way: one that a column would
have to narrow, or that the engine has no bytes for, makes all rows travel as columns instead.
"""

from __future__ import annotations

import datetime as dt
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from epochal.kit.row_layout import Digits, Fixed, Flag, Number, Piece, RowLayout, Sized
from epochal.sinks.postgres.types import from_json, may_go_direct, plan, sent_fields
from epochal.terms import Json

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres

_NULL = b"\xff\xff\xff\xff"
_WIDTHS = {"int2": 2, "int4": 4, "int8": 8}
_FLOATS = {"float4": pa.float32(), "float8": pa.float64()}
_DAYS_TO_2000 = 10_957
_MICROSECONDS_TO_2000 = _DAYS_TO_2000 * 86_400_000_000
_DIGITS_MAX = 18
_NEGATIVE = 0x4000


def row_packing(sink: Postgres, schema: pa.Schema, handout: Json) -> RowLayout | None:
    """How the engine packs a row for the tasks, in the order of their COPY; None where it can't."""
    sent = sent_fields(schema, sink)
    read_as = {name: one.type.base for name, one in sent.items()}
    if sink.strategy == "prepared":
        given: Any = handout
        table = from_json(given["table"])
        types = {name: one.type for name, one in sent.items()}
        chosen = plan(types, table, sink)
        if may_go_direct(chosen, table):
            read_as = {one.field: one.column.type.base for one in chosen}
    pieces = [_piece(name, schema.field(name).type, base) for name, base in read_as.items()]
    known = [piece for piece in pieces if piece is not None]
    if len(known) < len(pieces):
        return None
    return (Fixed(struct.pack("!h", len(known))), *known)


def _piece(field: str, kind: pa.DataType, base: str) -> Piece | None:  # noqa: PLR0911  one per family
    is_ = pa.types
    if is_.is_boolean(kind):
        return Flag(field=field, true=_sized(b"\1"), false=_sized(b"\0"), null=_NULL)
    if is_.is_signed_integer(kind):
        width = _WIDTHS.get(base, 0)
        return _number(field, width) if width * 8 >= kind.bit_width else None
    if is_.is_floating(kind):
        return _number(field, kind.bit_width // 8) if _FLOATS.get(base) == kind else None
    if is_.is_decimal128(kind) and 0 <= kind.scale <= kind.precision <= _DIGITS_MAX:
        return _digits(field, kind) if base == "numeric" else None
    if is_.is_string(kind) or is_.is_binary(kind):
        return Sized(field=field, null=_NULL)
    if is_.is_date32(kind):
        return _number(field, 4, plus=-_DAYS_TO_2000)
    if is_.is_timestamp(kind) and kind.unit == "us":
        return _number(field, 8, plus=-_MICROSECONDS_TO_2000)
    return None


def _sized(value: bytes) -> bytes:
    return struct.pack("!i", len(value)) + value


def _number(field: str, width: int, plus: int = 0) -> Number:
    before = struct.pack("!i", width)
    return Number(field=field, width=width, plus=plus, before=before, null=_NULL)


def _digits(field: str, kind: pa.Decimal128Type) -> Digits:
    """Groups of four digits on both sides of the point; the server drops those that are zero."""
    before_point, after_point = -(-(kind.precision - kind.scale) // 4), -(-kind.scale // 4)
    groups = before_point + after_point

    def before(sign: int) -> bytes:
        size = 8 + 2 * groups
        return struct.pack("!ihhHh", size, groups, before_point - 1, sign, kind.scale)

    return Digits(
        field=field,
        groups=groups,
        zeros=after_point * 4 - kind.scale,
        before=before(0),
        before_negative=before(_NEGATIVE),
        null=_NULL,
    )


def rows_with_nul(rows: Iterable[bytes], texts: Collection[int]) -> Iterator[tuple[int, int]]:
    """Of these columns, those that hold a NUL, each with the row."""
    for number, row in enumerate(rows):
        for column, value in enumerate(_values(row)):
            if column in texts and value is not None and b"\0" in value:
                yield column, number


def read_row(row: bytes, bases: Sequence[str]) -> list[object]:
    """The values of a row, for people; `bases` are the types of its columns."""
    return [
        None if value is None else _READ[base](value)
        for value, base in zip(_values(row), bases, strict=True)
    ]


def _number_of(value: bytes) -> int:
    return int.from_bytes(value, "big", signed=True)


def _decimal_of(value: bytes) -> Decimal:
    groups, weight, sign, scale = struct.unpack_from("!hhHh", value)
    digits = struct.unpack_from(f"!{groups}H", value, 8)
    number = sum(
        (Decimal(digit).scaleb(4 * (weight - place)) for place, digit in enumerate(digits)),
        Decimal(0),
    )
    return (-number if sign else number).quantize(Decimal(1).scaleb(-scale))


def _moment_of(value: bytes, zone: dt.tzinfo | None = None) -> object:
    """A text where the year is beyond Python's."""
    count = _number_of(value)
    try:
        return dt.datetime(2000, 1, 1, tzinfo=zone) + dt.timedelta(microseconds=count)
    except OverflowError:
        moment = np.datetime64("2000-01-01", "us") + np.timedelta64(count, "us")
        return f"{moment}{'' if zone is None else '+00:00'}"


def _day_of(value: bytes) -> object:
    count = _number_of(value)
    try:
        return dt.date(2000, 1, 1) + dt.timedelta(days=count)
    except OverflowError:
        return str(np.datetime64("2000-01-01", "D") + np.timedelta64(count, "D"))


_READ: Mapping[str, Callable[[bytes], object]] = {
    "bool": lambda value: value != b"\0",
    "int2": _number_of,
    "int4": _number_of,
    "int8": _number_of,
    "float4": lambda value: struct.unpack("!f", value)[0],
    "float8": lambda value: struct.unpack("!d", value)[0],
    "numeric": _decimal_of,
    "text": lambda value: value.decode(errors="replace"),
    "bytea": bytes,
    "date": _day_of,
    "timestamp": _moment_of,
    "timestamptz": lambda value: _moment_of(value, dt.UTC),
}


def _values(row: bytes) -> Iterator[bytes | None]:
    at = 2
    while at < len(row):
        (size,) = struct.unpack_from("!i", row, at)
        end = at + 4 + max(size, 0)
        yield None if size < 0 else row[at + 4 : end]
        at = end
