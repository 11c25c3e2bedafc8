"""Types, both ways round: how Arrow's travel as text, and which column takes which.

A staging column has the type of the column that its field is meant for, so that the server's own
conversion happens once, while rows are loaded, and a value that does not fit is found with its row.
One rule holds: what the column can't hold is refused, never cut. Where MySQL would cut without a
word (fractions of a second, NaN, a NULL that becomes a default), the values are looked at before
they leave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.kit import json_lines

TEXT = pa.large_string()
ToText: TypeAlias = Callable[[pa.Array], pa.Array]

_INTEGERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})
_TEXTS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext"})
_BYTES = frozenset({"binary", "varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_CHOSEN = frozenset({"enum", "set"})
_MOMENTS = frozenset({"datetime", "timestamp"})
_FLOATS = frozenset({"float", "double"})
_TAKERS: dict[str, frozenset[str]] = {
    "bool": _INTEGERS | {"bit", "decimal"},
    "integer": _INTEGERS | _FLOATS | _TEXTS | {"decimal", "bit", "year"},
    "float": _FLOATS | _TEXTS | {"decimal"},
    "decimal": _FLOATS | _TEXTS | {"decimal"},
    "text": _INTEGERS
    | _FLOATS
    | _TEXTS
    | _CHOSEN
    | _MOMENTS
    | {"decimal", "date", "time", "year", "json", "uuid", "inet4", "inet6"}
    | (_BYTES - {"binary"}),
    "binary": _BYTES,
    "date": _MOMENTS | _TEXTS | {"date"},
    "time": _TEXTS | {"time"},
    "timestamp": _MOMENTS | _TEXTS,
    "duration": _TEXTS | {"bigint", "decimal"},
    "json": _TEXTS | {"json"},
}
"""Which columns take which values without loss, or refuse the row that would lose something."""
_SCALE_MAX = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How one Arrow type travels."""

    kind: str
    """The family that decides which columns take it."""
    ddl: str
    """The column that holds it naturally."""
    to_text: ToText
    scale: int = 0


def sent_as(kind: pa.DataType) -> Sent | str:  # noqa: PLR0911  one line a family of types
    """How values of this type travel, or why they can't."""
    is_ = pa.types
    if is_.is_dictionary(kind):
        inner = sent_as(kind.value_type)
        return inner if isinstance(inner, str) else _through(inner, kind.value_type)
    if is_.is_boolean(kind):
        return Sent(kind="bool", ddl="tinyint(1)", to_text=_bool)
    if is_.is_integer(kind):
        return Sent(kind="integer", ddl=_integer_ddl(kind), to_text=_plain)
    if is_.is_floating(kind):
        # Through double: the digits of a float's own shortest form would be rounded twice.
        ddl = "double" if is_.is_float64(kind) else "float"
        return Sent(kind="float", ddl=ddl, to_text=lambda v: _plain(v.cast(pa.float64())))
    if is_.is_decimal(kind):
        return _decimal(kind)
    if is_.is_string(kind) or is_.is_large_string(kind) or is_.is_string_view(kind):
        return Sent(kind="text", ddl="longtext", to_text=_escaped)
    if is_.is_null(kind):
        return Sent(kind="text", ddl="longtext", to_text=lambda v: pa.nulls(len(v), TEXT))
    if is_.is_binary(kind) or is_.is_large_binary(kind) or is_.is_fixed_size_binary(kind):
        return Sent(kind="binary", ddl="longblob", to_text=_hex)
    if is_.is_nested(kind) and not is_.is_union(kind):
        why = json_lines.refusal(kind)
        return why or Sent(kind="json", ddl="json", to_text=_json)
    return _moment(kind) or f"{kind} has no counterpart in MySQL"


def _moment(kind: pa.DataType) -> Sent | None:
    is_ = pa.types
    if is_.is_date(kind):
        return Sent(kind="date", ddl="date", to_text=lambda v: _plain(v.cast(pa.date32())))
    if is_.is_time(kind):
        return Sent(kind="time", ddl="time(6)", to_text=lambda v: _plain(v.cast(pa.time64("us"))))
    if is_.is_timestamp(kind):
        return Sent(kind="timestamp", ddl="datetime(6)", to_text=_timestamp)
    if is_.is_duration(kind):
        return Sent(kind="duration", ddl="bigint", to_text=lambda v: _plain(microseconds(v)))
    return None


def _integer_ddl(kind: pa.DataType) -> str:
    names = {8: "tinyint", 16: "smallint", 32: "int", 64: "bigint"}
    suffix = " unsigned" if pa.types.is_unsigned_integer(kind) else ""
    return names[kind.bit_width] + suffix


def _decimal(kind: pa.DataType) -> Sent | str:
    scale = max(kind.scale, 0)
    if scale > _SCALE_MAX or kind.precision > 65:
        return f"{kind} has more digits than MySQL's decimal, which ends at (65, {_SCALE_MAX})"
    width = kind.precision + scale - kind.scale
    return Sent(kind="decimal", ddl=f"decimal({width},{scale})", to_text=_plain, scale=scale)


def _through(inner: Sent, kind: pa.DataType) -> Sent:
    def decoded(values: pa.Array) -> pa.Array:
        return inner.to_text(values.cast(kind))

    return Sent(kind=inner.kind, ddl=inner.ddl, to_text=decoded, scale=inner.scale)


# Values as text, by Arrow's kernels: no Python a row


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(TEXT)


def _bool(values: pa.Array) -> pa.Array:
    return values.cast(pa.int8()).cast(TEXT)


def microseconds(values: pa.Array) -> pa.Array:
    """Moments, times and durations as whole microseconds; finer ones refuse."""
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz))
    elif pa.types.is_duration(values.type):
        values = values.cast(pa.duration("us"))
    else:
        values = values.cast(pa.time64("us"))
    return values.cast(pa.int64())


def _timestamp(values: pa.Array) -> pa.Array:
    """Instants in UTC, which is the session's zone; timestamps without a zone as they are."""
    return _plain(microseconds(values).cast(pa.timestamp("us")))


def _json(values: pa.Array) -> pa.Array:
    text = json_lines.as_json(values)
    return _escaped(pc.if_else(values.is_valid(), text, pa.scalar(None, text.type)))


def _escaped(values: pa.Array) -> pa.Array:
    text = values.cast(TEXT)
    if not pc.any(pc.match_substring_regex(text, r"[\\\t\n\x00]")).as_py():
        return text
    for raw, written in (("\\", "\\\\"), ("\t", "\\t"), ("\n", "\\n"), ("\0", "\\0")):
        text = pc.replace_substring(text, raw, written)
    return text


_HEX = np.array([f"{byte:02X}".encode() for byte in range(256)], dtype="S2").view(np.uint16)


def _hex(values: pa.Array) -> pa.Array:
    """Every byte as two digits: raw bytes would be read as text of the file's character set."""
    values = pa.concat_arrays([values.cast(pa.large_binary())])
    offsets = np.frombuffer(values.buffers()[1], np.int64)[
        values.offset : values.offset + len(values) + 1
    ]
    data = values.buffers()[2]
    whole = (
        np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
    )
    used = whole[offsets[0] : offsets[-1]] if len(offsets) else whole[:0]
    digits = _HEX[used].tobytes()
    text = pa.Array.from_buffers(
        TEXT,
        len(values),
        [None, pa.py_buffer(((offsets - offsets[:1]) * 2).tobytes()), pa.py_buffer(digits)],
    )
    return pc.if_else(values.is_valid(), text, pa.scalar(None, TEXT)) if values.null_count else text


# What a column takes


@dataclass(frozen=True, slots=True)
class Mismatch:
    because: str
    hint: str


def load_expression(sent: Sent, data_type: str, written: str, scale: int) -> str | Mismatch | None:
    """What is made of a loaded text `{}` for a column; None where it may be read directly."""
    whole = sent.kind == "decimal" and sent.scale == 0 and data_type in _INTEGERS | {"bit"}
    if data_type not in _TAKERS[sent.kind] and not whole:
        return Mismatch(
            f"{sent.ddl} can't become {written} without loss",
            'give it as a string (select=["cast(x as string) x"]): the server reads it as the '
            "column's own type",
        )
    if sent.kind == "binary":
        return "UNHEX({})"
    if data_type == "bit":
        return "CAST({} AS UNSIGNED)"
    if sent.kind == "float" and data_type == "decimal":
        return f"ROUND({{}} + 0e0, {scale})"
    return None
