"""Types, both ways round: what Arrow's become on their way, and which column takes which.

A staging column has the type of the column that its field is meant for. One rule holds: what the
column can't hold is refused, never cut. Where Oracle would cut or change without a word (fractions
of a second in a DATE, digits behind a NUMBER's scale, the empty string, which it takes for null),
the values are looked at before they leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from epochal.kit import json_lines

_TEXT = pa.large_string()
_NUMBERS = frozenset({"NUMBER", "FLOAT"})
_BINARY_FLOATS = frozenset({"BINARY_FLOAT", "BINARY_DOUBLE"})
_TEXTS = frozenset({"VARCHAR2", "NVARCHAR2", "CHAR", "NCHAR", "CLOB", "NCLOB"})
_MOMENTS = frozenset({"DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE"}) | {
    "TIMESTAMP WITH LOCAL TIME ZONE"
}
_TAKERS: dict[str, frozenset[str]] = {
    "bool": _NUMBERS | {"BOOLEAN"},
    "integer": _NUMBERS | _BINARY_FLOATS,
    "float": _NUMBERS | _BINARY_FLOATS,
    "decimal": _NUMBERS | _BINARY_FLOATS,
    "text": _TEXTS | _NUMBERS | {"JSON"},
    "binary": frozenset({"RAW", "BLOB"}),
    "date": _MOMENTS,
    "timestamp": _MOMENTS,
    "duration": _NUMBERS,
    "json": _TEXTS | {"JSON"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How one Arrow type travels."""

    kind: str
    ddl: str
    """The column that holds it naturally."""
    convert: Callable[[pa.Array], pa.Array]
    scale: int = 0


def sent_as(kind: pa.DataType) -> Sent | str:  # noqa: PLR0911  one line a family of types
    """How values of this type travel, or why they can't."""
    is_ = pa.types
    if is_.is_dictionary(kind):
        inner = sent_as(kind.value_type)
        return inner if isinstance(inner, str) else _through(inner, kind.value_type)
    if is_.is_boolean(kind):
        return Sent(kind="bool", ddl="NUMBER(1)", convert=_to(pa.int8()))
    if is_.is_integer(kind):
        digits = {8: 3, 16: 5, 32: 10, 64: 20}[kind.bit_width]
        arrow = pa.decimal128(20, 0) if is_.is_uint64(kind) else pa.int64()
        return Sent(kind="integer", ddl=f"NUMBER({digits})", convert=_to(arrow))
    if is_.is_floating(kind):
        ddl = "BINARY_DOUBLE" if is_.is_float64(kind) else "BINARY_FLOAT"
        return Sent(kind="float", ddl=ddl, convert=_to(pa.float64()))
    if is_.is_decimal(kind):
        if kind.precision > 38 or kind.scale < 0:
            return f"{kind} has more digits than Oracle's NUMBER"
        return Sent(
            kind="decimal",
            ddl=f"NUMBER({kind.precision},{kind.scale})",
            convert=_to(pa.decimal128(kind.precision, kind.scale)),
            scale=kind.scale,
        )
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return Sent(kind="text", ddl="CLOB", convert=_to(_TEXT))
    if is_.is_null(kind):
        return Sent(kind="text", ddl="CLOB", convert=lambda v: pa.nulls(len(v), _TEXT))
    if is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind):
        return Sent(kind="binary", ddl="BLOB", convert=_to(pa.large_binary()))
    if is_.is_nested(kind) and not is_.is_union(kind):
        why = json_lines.refusal(kind)
        return why or Sent(kind="json", ddl="CLOB", convert=_json)
    return _moment(kind) or f"{kind} has no counterpart in Oracle"


def _moment(kind: pa.DataType) -> Sent | None:
    is_ = pa.types
    if is_.is_date(kind):
        return Sent(kind="date", ddl="DATE", convert=_to(pa.timestamp("s")))
    if is_.is_timestamp(kind):
        return Sent(kind="timestamp", ddl="TIMESTAMP(6)", convert=_utc)
    if is_.is_duration(kind):
        return Sent(kind="duration", ddl="NUMBER(19)", convert=_microseconds)
    return None


def _to(arrow: pa.DataType) -> Callable[[pa.Array], pa.Array]:
    return lambda values: values if values.type == arrow else values.cast(arrow)


def _through(inner: Sent, kind: pa.DataType) -> Sent:
    def decoded(values: pa.Array) -> pa.Array:
        return inner.convert(values.cast(kind))

    return Sent(kind=inner.kind, ddl=inner.ddl, convert=decoded, scale=inner.scale)


def _microseconds(values: pa.Array) -> pa.Array:
    return values.cast(pa.duration("us")).cast(pa.int64())


def microseconds(values: pa.Array) -> pa.Array:
    return values.cast(pa.timestamp("us", values.type.tz)).cast(pa.int64())


def _utc(values: pa.Array) -> pa.Array:
    """Instants in UTC, which is the session's zone; timestamps without a zone as they are."""
    return microseconds(values).cast(pa.timestamp("us"))


def _json(values: pa.Array) -> pa.Array:
    text = json_lines.as_json(values)
    return pc.if_else(values.is_valid(), text, pa.scalar(None, text.type))


def mismatch(sent: Sent, data_type: str, scale: int | None) -> str:
    """Why a column can't take it, or nothing."""
    if data_type not in _TAKERS[sent.kind]:
        return f"{sent.ddl} can't become {data_type} without loss"
    if sent.kind == "float" and scale == 0 and data_type == "NUMBER":
        return f"{sent.ddl} can't become a whole number without loss"
    if sent.kind == "decimal" and scale is not None and scale < sent.scale:
        return f"{sent.ddl} has more digits behind the point than the column's {scale}"
    return ""
