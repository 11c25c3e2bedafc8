"""
Rows as a binary COPY reads them, for the engine to lay out.

A row is the number of its columns, and for each the number of its bytes, -1 for NULL, and the
bytes. Only what needs no look at its value first is laid out this way: a type that a column would
have to be narrowed for, or that the engine has no bytes for, sends all rows the other way.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from epochal.packing import Digits, Fixed, Flag, Number, Packing, Piece, Sized
from epochal.sinks.postgres.catalog import from_json
from epochal.sinks.postgres.checking import sent_fields
from epochal.sinks.postgres.plan import may_go_direct, plan
from epochal.terms import Json

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres

HEADER = b"PGCOPY\n\xff\r\n\0" + bytes(8)
"""The signature, and neither flags nor an extension."""
TRAILER = b"\xff\xff"
_NULL = b"\xff\xff\xff\xff"
_WIDTHS = {"int2": 2, "int4": 4, "int8": 8}
_FLOATS = {"float4": pa.float32(), "float8": pa.float64()}
_DAYS_TO_2000 = 10_957
_MICROSECONDS_TO_2000 = _DAYS_TO_2000 * 86_400_000_000
_DIGITS_MAX = 18
_NEGATIVE = 0x4000


def laid_out(sink: Postgres, schema: pa.Schema, handout: Json) -> Packing | None:
    """How the engine lays out a row for this sink's tasks, in the order that they copy; or not."""
    sent = sent_fields(schema, sink)
    read_as = {name: one.type.base for name, one in sent.items()}
    if sink.strategy == "prepared":
        given: Any = handout
        table = from_json(given["table"])
        types = {name: one.type for name, one in sent.items()}
        chosen = plan(types, table, sink.column_map, sink.write_mode)
        if may_go_direct(chosen, table):
            read_as = {one.field: one.column.type.base for one in chosen.mapped}
    pieces = [_piece(name, schema.field(name).type, base) for name, base in read_as.items()]
    known = [piece for piece in pieces if piece is not None]
    if len(known) < len(pieces):
        return None
    return (Fixed(struct.pack("!h", len(known))), *known)


def _piece(field: str, kind: pa.DataType, base: str) -> Piece | None:  # noqa: PLR0911  one a family
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


def places_of_nul(rows: Iterable[bytes], texts: Collection[int]) -> dict[int, int]:
    """Of these columns, those that hold a NUL, each with the first such row."""
    found: dict[int, int] = {}
    for number, row in enumerate(rows):
        for place, value in enumerate(_values(row)):
            if place in texts and b"\0" in value:
                found.setdefault(place, number)
    return found


def _values(row: bytes) -> Iterator[bytes]:
    at = 2
    while at < len(row):
        (size,) = struct.unpack_from("!i", row, at)
        value = row[at + 4 : at + 4 + max(size, 0)]
        at += 4 + len(value)
        yield value
