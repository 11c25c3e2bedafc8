"""Protobuf's binary form of rows, a column at a time, by a plan that the driver drew.

The plan is plain data, so tasks need no protobuf package: for each field with a column its name,
number, kind, whether it is repeated and whether it has presence. Fields are written in the order of
their numbers; a null is left out, and so is a zero of a field without presence.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import flag_array, number_array, numbers, scalar, texts
from epochal.errors import RowRejected
from epochal.kafka.varints import Ints, constant, join
from epochal.sinks.kafka.values import binary_columns as made

Plan = Sequence[Mapping[str, Any]]
"""The fields of a message."""

TIMESTAMP: Plan = (
    {"name": "seconds", "number": 1, "kind": "int64"},
    {"name": "nanos", "number": 2, "kind": "int32"},
)
_VARINT, _FIXED64, _SIZED, _FIXED32 = 0, 1, 2, 5
_WIRE = {
    **dict.fromkeys(("int32", "int64", "uint32", "uint64", "sint32", "sint64"), _VARINT),
    **dict.fromkeys(("bool", "enum"), _VARINT),
    **dict.fromkeys(("fixed64", "sfixed64", "double"), _FIXED64),
    **dict.fromkeys(("fixed32", "sfixed32", "float"), _FIXED32),
}
WIDTHS = {
    **dict.fromkeys(("int32", "sint32", "sfixed32"), pa.int32()),
    **dict.fromkeys(("int64", "sint64", "sfixed64"), pa.int64()),
    **dict.fromkeys(("uint32", "fixed32"), pa.uint32()),
    **dict.fromkeys(("uint64", "fixed64"), pa.uint64()),
}


def message(plan: Plan, column: pa.Array) -> pa.Array:
    """Messages of a column of structs without nulls."""
    if not len(column):
        return texts([], pa.binary())
    names = {column.type.field(index).name: index for index in range(column.type.num_fields)}
    columns = column.flatten()
    pieces = [
        _field(field, columns[names[field["name"]]]) for field in plan if field["name"] in names
    ]
    return join([texts([b""] * len(column), pa.binary()), *pieces])


def _field(field: Mapping[str, Any], column: pa.Array) -> pa.Array:
    try:
        if field.get("is_many"):
            return made.spread(column, lambda lists: _many(field, lists))
        column = _without_zeros(field, column)
        return made.spread(column, lambda one: join([_tag(field), _value(field, one)]))
    except (pa.ArrowInvalid, OverflowError) as error:
        raise RowRejected(
            f"{field['name']}: a value does not fit Protobuf's {field['kind']}: {error}"
        ) from error


def _many(field: Mapping[str, Any], column: pa.Array) -> pa.Array:
    lists = made.entries_of(column) if pa.types.is_map(column.type) else column
    elements, counts = lists.flatten(), made.counts_of(lists)
    if elements.null_count:
        raise RowRejected(
            f"{field['name']}: {elements.null_count} elements are null, and Protobuf has no nulls",
            "filter them out in the query",
        )
    if not len(elements):
        return texts([b""] * len(lists), pa.binary())
    if not field.get("is_packed"):
        return made.grouped(join([_tag(field), _value(field, elements)]), counts)
    packed = made.sized(made.grouped(_value(field, elements), counts), made.plain)
    whole = join([_tag(field), packed])
    return pc.if_else(flag_array(counts > 0), whole, constant(b""))


def _tag(field: Mapping[str, Any]) -> pa.Scalar:
    wire = _SIZED if field.get("is_packed") else _WIRE.get(field["kind"], _SIZED)
    number = np.array([field["number"] << 3 | wire], dtype=np.int64)
    return made.plain(number)[0]


def _without_zeros(field: Mapping[str, Any], column: pa.Array) -> pa.Array:
    kind = field["kind"]
    if field.get("has_presence") or kind in ("message", "timestamp", "float", "double"):
        return column
    if kind == "enum":
        column = _numbers_of(field, column)
    return pc.if_else(_is_zero(kind, column), scalar(None, column.type), column)


def _is_zero(kind: str, column: pa.Array) -> pa.Array:
    if kind == "bool":
        return pc.invert(column)
    if kind not in ("string", "bytes"):
        return pc.equal(column, scalar(0, column.type))
    if made.is_text(column.type) or made.is_bytes(column.type):
        return pc.equal(lengths := pc.binary_length(column), scalar(0, lengths.type))
    return pc.is_null(column)  # a decimal or a date, whose text is never empty


def _value(field: Mapping[str, Any], column: pa.Array) -> pa.Array:
    kind = field["kind"]
    if kind == "message":
        return made.sized(message(field["fields"], column), made.plain)
    if kind == "timestamp":
        return made.sized(message(TIMESTAMP, _seconds(column)), made.plain)
    return _SCALARS[kind](_numbers_of(field, column) if kind == "enum" else column)


def _numbers_of(field: Mapping[str, Any], column: pa.Array) -> pa.Array:
    """Names of an enum as its numbers; numbers stay."""
    if pa.types.is_integer(column.type):
        return column.cast(pa.int32())
    names = texts(list(field["symbols"]), pa.string())
    places = pc.index_in(column.cast(pa.string()), names, skip_nulls=True)
    unknown = column.filter(pc.and_(places.is_null(), column.is_valid()))
    if len(unknown):
        raise pa.ArrowInvalid(f"{unknown[0].as_py()!r} is none of its names")
    found = np.array(list(field["symbols"].values()), dtype=np.int32)
    return number_array(found).take(places)


def _seconds(column: pa.Array) -> pa.Array:
    nanos = made.ints_of(column.cast(pa.timestamp("ns", tz=column.type.tz)))
    seconds, rest = np.divmod(nanos, 1_000_000_000)
    return pa.StructArray.from_arrays(
        [number_array(seconds), number_array(rest.astype(np.int32))], names=["seconds", "nanos"]
    )


def _bits(column: pa.Array, kind: str) -> Ints:
    # A negative number of 32 bits takes the form that it has in 64.
    found: Ints = numbers(column.cast(WIDTHS[kind])).astype(np.int64)
    return found


def _varint(kind: str) -> Callable[[pa.Array], pa.Array]:
    write = made.folded if kind.startswith("sint") else made.plain
    return lambda column: write(_bits(column, kind))


def _fixed(kind: str) -> Callable[[pa.Array], pa.Array]:
    width = WIDTHS[kind]
    return lambda column: made.little_endian(column.cast(width), width.to_pandas_dtype())


def _text(column: pa.Array) -> pa.Array:
    if not made.is_text(column.type) and not made.is_bytes(column.type):
        column = column.cast(pa.string())
    return made.sized(made.text_bytes(column), made.plain)


_SCALARS: Mapping[str, Callable[[pa.Array], pa.Array]] = {
    **{kind: _varint(kind) for kind in WIDTHS if "fixed" not in kind},
    **{kind: _fixed(kind) for kind in WIDTHS if "fixed" in kind},
    "bool": made.booleans,
    "enum": lambda column: made.plain(made.ints_of(column)),
    "float": lambda column: made.little_endian(column, "f4"),
    "double": lambda column: made.little_endian(column, "f8"),
    "string": _text,
    "bytes": _text,
}
