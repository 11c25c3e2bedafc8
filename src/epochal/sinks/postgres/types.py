"""Types, both ways round: what Arrow's become on their way, and which column takes which.

A staging column has the natural type of what arrives; the cast to the column's own type is part of
the statement that applies it. Casts keep one rule: what the column can't hold is refused, never cut
or rounded to fit. `text::varchar(3)` would cut in silence, so a string is left to the assignment,
which refuses; a double is not taken by an integer column at all. (A numeric column's own scale
rounds, as it does in every INSERT.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from epochal.kit import json_lines

_STRINGS = "S"
"""PostgreSQL's category of text, varchar, char, name and citext."""
_INTEGERS = frozenset({"int2", "int4", "int8"})
_FLOATS = frozenset({"float4", "float8"})
_TAKERS: dict[str, frozenset[str]] = {
    "bool": frozenset({"bool"}),
    "int2": _INTEGERS | _FLOATS | {"numeric", "money"},
    "int4": _INTEGERS | _FLOATS | {"numeric", "money"},
    "int8": _INTEGERS | _FLOATS | {"numeric", "money"},
    "float4": _FLOATS | {"numeric"},
    "float8": _FLOATS | {"numeric"},
    "numeric": _FLOATS | {"numeric", "money"},
    "bytea": frozenset({"bytea"}),
    "date": frozenset({"date", "timestamp", "timestamptz"}),
    "time": frozenset({"time"}),
    "timestamp": frozenset({"timestamp", "timestamptz"}),
    "timestamptz": frozenset({"timestamp", "timestamptz"}),
    "interval": frozenset({"interval"}),
    "json": frozenset({"json", "jsonb"}),
}
"""Which types take which, without a cast in the apply statement or with one that loses nothing."""
_WRITTEN = {
    "bool": "boolean",
    "int2": "smallint",
    "int4": "integer",
    "int8": "bigint",
    "float4": "real",
    "float8": "double precision",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """A type as the server's catalog has it, domains resolved to what they are made of."""

    written: str
    """As SQL writes it, without a length or precision."""
    base: str
    """`typname` under all domains; of an array, its element's."""
    category: str = ""
    is_array: bool = False
    is_domain: bool = False
    scale: int = 0
    """Digits after the point, of a numeric that is staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How one Arrow type travels: the staging column, and what becomes of the values first."""

    type: Type
    ddl: str
    convert: Callable[[pa.ChunkedArray], pa.ChunkedArray] | None = None


def sent_as(kind: pa.DataType) -> Sent | str:
    """How values of this type travel, or why they can't."""
    if pa.types.is_dictionary(kind):
        inner = sent_as(kind.value_type)
        return inner if isinstance(inner, str) else _sent(inner.type, inner.ddl, kind.value_type)
    scalar = _scalar(kind)
    if scalar is not None:
        return scalar
    if _is_list(kind):
        element = _scalar(kind.value_type)
        if element is not None and not pa.types.is_null(kind.value_type):
            return _array_of(kind, element)
    if pa.types.is_nested(kind) and not pa.types.is_union(kind):
        why = json_lines.refusal(kind)
        return why or Sent(type=_type("json"), ddl="json", convert=_as_json)
    return f"{kind} has no counterpart in PostgreSQL"


def _scalar(kind: pa.DataType) -> Sent | None:  # noqa: PLR0911  one line a family of types
    is_ = pa.types
    if is_.is_boolean(kind):
        return _sent(_type("bool"))
    if is_.is_integer(kind):
        return _integer(kind)
    if is_.is_floating(kind):
        is_double = is_.is_float64(kind)
        return _sent(
            _type("float8" if is_double else "float4"),
            arrow=pa.float32() if is_.is_float16(kind) else None,
        )
    if is_.is_decimal(kind):
        if kind.precision > 38:
            return None
        return _numeric(kind.precision, kind.scale, is_128=is_.is_decimal128(kind))
    if is_.is_string(kind) or is_.is_large_string(kind):
        return _sent(_type("text"))
    if is_.is_string_view(kind) or is_.is_null(kind):
        return _sent(_type("text"), arrow=pa.string())
    if is_.is_binary(kind) or is_.is_large_binary(kind):
        return _sent(_type("bytea"))
    if is_.is_fixed_size_binary(kind) or is_.is_binary_view(kind):
        return _sent(_type("bytea"), arrow=pa.binary())
    return _moment(kind)


def _moment(kind: pa.DataType) -> Sent | None:
    is_ = pa.types
    if is_.is_date(kind):
        return _sent(_type("date"), arrow=pa.date32())
    if is_.is_time(kind):
        return _sent(_type("time"), arrow=pa.time64("us"))
    if is_.is_timestamp(kind):
        base = "timestamp" if kind.tz is None else "timestamptz"
        return _sent(_type(base), arrow=pa.timestamp("us", kind.tz))
    if is_.is_duration(kind):
        return _sent(_type("interval"), arrow=pa.duration("us"))
    return _sent(_type("interval")) if is_.is_interval(kind) else None


def _integer(kind: pa.DataType) -> Sent:
    bits = kind.bit_width * (2 if pa.types.is_unsigned_integer(kind) else 1)
    if bits <= 16:
        return _sent(_type("int2"), arrow=pa.int16())
    if bits == 32:
        return _sent(_type("int4"), arrow=pa.int32())
    if bits == 64:
        return _sent(_type("int8"), arrow=pa.int64())
    return _numeric(20, 0, is_128=False)


def _numeric(precision: int, scale: int, *, is_128: bool) -> Sent:
    kept = max(scale, 0)
    return _sent(
        _type("numeric", scale=kept),
        f"numeric({precision + kept - scale},{kept})",
        None if is_128 else pa.decimal128(precision, scale),
    )


def _array_of(kind: pa.DataType, element: Sent) -> Sent:
    type_ = Type(
        written=f"{element.type.written}[]",
        base=element.type.base,
        category=element.type.category,
        is_array=True,
        scale=element.type.scale,
    )
    convert = element.convert
    arrow = None if convert is None else convert(pa.chunked_array([], kind.value_type)).type
    return _sent(type_, f"{element.ddl}[]", None if arrow is None else pa.list_(arrow))


def _is_list(kind: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind))


def _type(base: str, *, scale: int = 0) -> Type:
    return Type(
        written=_WRITTEN.get(base, base),
        base=base,
        category=_STRINGS if base == "text" else "",
        scale=scale,
    )


def _sent(type_: Type, ddl: str = "", arrow: pa.DataType | None = None) -> Sent:
    convert = None if arrow is None else (lambda values: _cast(values, arrow))
    return Sent(type=type_, ddl=ddl or type_.written, convert=convert)


def _cast(values: pa.ChunkedArray, arrow: pa.DataType) -> pa.ChunkedArray:
    return values if values.type == arrow else values.cast(arrow)


def _as_json(values: pa.ChunkedArray) -> pa.ChunkedArray:
    texts = [_json_of(chunk) for chunk in values.chunks]
    return pa.chunked_array(texts, pa.large_string())


def _json_of(values: pa.Array) -> pa.Array:
    text = json_lines.as_json(values)
    return pc.if_else(values.is_valid(), text, pa.scalar(None, text.type))


# What a column takes


@dataclass(frozen=True, slots=True)
class Cast:
    """What surrounds a staged column in the statement that applies it."""

    before: str = ""
    after: str = ""


@dataclass(frozen=True, slots=True)
class Mismatch:
    because: str
    hint: str


NO_CAST = Cast()
_TO_TEXT = (
    'give it as a string (select=["cast(x as string) x"]): text is cast to the column\'s type'
)


def cast_between(source: Type, target: Type) -> Cast | Mismatch:  # noqa: PLR0911  one a rule
    """How a staged value becomes the column's own type, or why it must not."""
    if source.is_array:
        return _array_cast(source, target)
    if target.is_array:
        return _from_text(target) if source.base == "text" else _mismatch(source, target)
    if target.category == _STRINGS:
        return _mismatch(source, target) if source.base == "bytea" else NO_CAST
    if source.base == "text":
        return _from_text(target)
    if source.base == "numeric" and source.scale == 0 and target.base in _INTEGERS:
        return NO_CAST
    if target.base not in _TAKERS.get(source.base, ()):
        return _mismatch(source, target)
    if target.base == "money":
        return Cast(after="::numeric::money")
    return Cast(after=f"::{target.base}") if source.base == "json" else NO_CAST


def _from_text(target: Type) -> Cast:
    # `bit` alone is bit(1), and would cut.
    return Cast(after="::varbit" if target.base == "bit" else f"::{target.written}")


def _array_cast(source: Type, target: Type) -> Cast | Mismatch:
    if not target.is_array:
        if target.base in {"json", "jsonb"}:
            return Cast(before=f"to_{target.base}(", after=")")
        if target.base in {"vector", "halfvec"} and source.base in _TAKERS["int2"]:
            return Cast(after=f"::{target.written}")
        return _mismatch(source, target)
    inner = cast_between(_element(source), _element(target))
    if isinstance(inner, Mismatch):
        return _mismatch(source, target)
    return inner if inner == NO_CAST else Cast(after=f"::{target.written}")


def _element(array: Type) -> Type:
    return Type(
        written=array.written.removesuffix("[]"),
        base=array.base,
        category=array.category,
        scale=array.scale,
    )


def _mismatch(source: Type, target: Type) -> Mismatch:
    return Mismatch(f"{source.written} can't become {target.written} without loss", _TO_TEXT)


# Straight into the table, without staging: the bytes must be those of the column's own type


_ARROW_OF = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
}
_SAME_BYTES = {
    "text": frozenset({"text", "varchar", "bpchar", "citext", "json", "xml", "name"}),
    "json": frozenset({"json", "text", "varchar"}),
    "timestamp": frozenset({"timestamp", "timestamptz"}),
    "timestamptz": frozenset({"timestamp", "timestamptz"}),
}


def is_direct(source: Type, target: Type, *, is_enum: bool) -> bool:
    """Whether a binary COPY of the staged form is, byte for byte, what the column reads."""
    if source.is_array or target.is_array:
        return source.is_array and target.is_array and source.base == target.base
    if source.base == target.base:
        return True
    if source.base in _ARROW_OF and target.base in _ARROW_OF:
        return (source.base in _INTEGERS) == (target.base in _INTEGERS)
    if source.base == "text" and is_enum:
        return True
    return target.base in _SAME_BYTES.get(source.base, ())


def arrow_of(target: Type) -> pa.DataType | None:
    """The Arrow type whose bytes the column reads, where numbers must be widened or narrowed."""
    return None if target.is_array else _ARROW_OF.get(target.base)


def create_as(sent: Sent) -> str:
    """The type of a column that is made for this field: JSON is kept in its indexed form."""
    return "jsonb" if sent.ddl == "json" else sent.ddl
