"""Types: one table for all databases, from Arrow's types to columns.

One rule holds for all: a value that its column can't hold is refused, never truncated or rounded.

To add a type, add a row to `TYPES`: the Arrow types it stands for, its family, the Arrow type that
is sent, and the natural column in each database. The family decides which other columns take it
(`TAKERS`). A database whose wire format needs another form of the value converts it by family, in
its own `types.py` (MySQL loads text, Oracle binds few Arrow types).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import scalar
from epochal.kit import json_lines

Database: TypeAlias = Literal["postgres", "mysql", "oracle"]
Values: TypeAlias = pa.Array | pa.ChunkedArray
Convert: TypeAlias = Callable[[Values], Values]
is_ = pa.types


class TypeRow(NamedTuple):
    matches: Callable[[pa.DataType], bool]
    family: str
    sent: pa.DataType | Callable[[pa.DataType], pa.DataType] | None
    """The Arrow type that values are converted to before they are sent; None: as they are."""
    postgres: str
    """The column that holds it naturally; empty where there is none."""
    mysql: str
    oracle: str


def _is_text(kind: pa.DataType) -> bool:
    return bool(is_.is_string(kind) or is_.is_large_string(kind))


def _is_bytes(kind: pa.DataType) -> bool:
    return bool(is_.is_binary(kind) or is_.is_large_binary(kind))


def _is_local(kind: pa.DataType) -> bool:
    return bool(is_.is_timestamp(kind) and kind.tz is None)


def _in_us(kind: pa.DataType) -> pa.DataType:
    return pa.timestamp("us", kind.tz)


_20_DIGITS = pa.decimal128(20, 0)
TYPES = (
    # Arrow, family, sent as, PostgreSQL, MySQL, Oracle
    TypeRow(is_.is_boolean, "bool", None, "boolean", "tinyint(1)", "NUMBER(1)"),
    TypeRow(is_.is_int8, "integer", pa.int16(), "smallint", "tinyint", "NUMBER(3)"),
    TypeRow(is_.is_uint8, "integer", pa.int16(), "smallint", "tinyint unsigned", "NUMBER(3)"),
    TypeRow(is_.is_int16, "integer", None, "smallint", "smallint", "NUMBER(5)"),
    TypeRow(is_.is_uint16, "integer", pa.int32(), "integer", "smallint unsigned", "NUMBER(5)"),
    TypeRow(is_.is_int32, "integer", None, "integer", "int", "NUMBER(10)"),
    TypeRow(is_.is_uint32, "integer", pa.int64(), "bigint", "int unsigned", "NUMBER(10)"),
    TypeRow(is_.is_int64, "integer", None, "bigint", "bigint", "NUMBER(20)"),
    TypeRow(is_.is_uint64, "integer", _20_DIGITS, "numeric(20,0)", "bigint unsigned", "NUMBER(20)"),
    TypeRow(is_.is_float16, "float", pa.float32(), "real", "float", "BINARY_FLOAT"),
    TypeRow(is_.is_float32, "float", None, "real", "float", "BINARY_FLOAT"),
    TypeRow(is_.is_float64, "float", None, "double precision", "double", "BINARY_DOUBLE"),
    TypeRow(is_.is_decimal, "decimal", None, "numeric", "decimal", "NUMBER"),
    TypeRow(_is_text, "text", None, "text", "longtext", "CLOB"),
    TypeRow(is_.is_string_view, "text", pa.string(), "text", "longtext", "CLOB"),
    TypeRow(is_.is_null, "text", pa.string(), "text", "longtext", "CLOB"),
    TypeRow(_is_bytes, "binary", None, "bytea", "longblob", "BLOB"),
    TypeRow(is_.is_fixed_size_binary, "binary", pa.binary(), "bytea", "longblob", "BLOB"),
    TypeRow(is_.is_binary_view, "binary", pa.binary(), "bytea", "longblob", "BLOB"),
    TypeRow(is_.is_date, "date", pa.date32(), "date", "date", "DATE"),
    TypeRow(is_.is_time, "time", pa.time64("us"), "time", "time(6)", ""),
    TypeRow(_is_local, "timestamp", _in_us, "timestamp", "datetime(6)", "TIMESTAMP(6)"),
    TypeRow(is_.is_timestamp, "timestamp", _in_us, "timestamptz", "datetime(6)", "TIMESTAMP(6)"),
    TypeRow(is_.is_duration, "duration", pa.duration("us"), "interval", "bigint", "NUMBER(19)"),
    TypeRow(is_.is_interval, "duration", None, "interval", "", ""),
)
NESTED = TypeRow(is_.is_nested, "json", None, "json", "json", "CLOB")
"""Lists, maps and structs, as JSON text; PostgreSQL has arrays for lists of plain values."""


class Takers(NamedTuple):
    """Columns that take a family without loss, or refuse the row that would lose something."""

    postgres: frozenset[str]
    mysql: frozenset[str]
    oracle: frozenset[str]


_PG_NUMBERS = frozenset({"int2", "int4", "int8", "float4", "float8", "numeric", "money"})
_MY_INTEGERS = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint"})
_MY_FLOATS = frozenset({"float", "double"})
_MY_TEXTS = frozenset({"char", "varchar", "tinytext", "text", "mediumtext", "longtext"})
_MY_BYTES = frozenset({"varbinary", "tinyblob", "blob", "mediumblob", "longblob"})
_MY_MOMENTS = frozenset({"datetime", "timestamp"})
_MY_READ_FROM_TEXT = frozenset(
    {"enum", "set", "decimal", "date", "time", "year", "json", "uuid", "inet4", "inet6"}
)
_ORA_NUMBERS = frozenset({"NUMBER", "FLOAT"})
_ORA_ALL_NUMBERS = _ORA_NUMBERS | {"BINARY_FLOAT", "BINARY_DOUBLE"}
_ORA_TEXTS = frozenset({"VARCHAR2", "NVARCHAR2", "CHAR", "NCHAR", "CLOB", "NCLOB"})
_ORA_MOMENTS = frozenset(
    {"DATE", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE", "TIMESTAMP WITH LOCAL TIME ZONE"}
)
_NONE: frozenset[str] = frozenset()
TAKERS: Mapping[str, Takers] = {
    "bool": Takers(
        frozenset({"bool"}), _MY_INTEGERS | {"bit", "decimal"}, _ORA_NUMBERS | {"BOOLEAN"}
    ),
    "integer": Takers(
        _PG_NUMBERS,
        _MY_INTEGERS | _MY_FLOATS | _MY_TEXTS | {"decimal", "bit", "year"},
        _ORA_ALL_NUMBERS,
    ),
    "float": Takers(
        frozenset({"float4", "float8", "numeric"}),
        _MY_FLOATS | _MY_TEXTS | {"decimal"},
        _ORA_ALL_NUMBERS,
    ),
    "decimal": Takers(
        frozenset({"float4", "float8", "numeric", "money"}),
        _MY_FLOATS | _MY_TEXTS | {"decimal"},
        _ORA_ALL_NUMBERS,
    ),
    # PostgreSQL casts text to every type.
    "text": Takers(
        _NONE,
        _MY_INTEGERS | _MY_FLOATS | _MY_TEXTS | _MY_BYTES | _MY_MOMENTS | _MY_READ_FROM_TEXT,
        _ORA_TEXTS | _ORA_NUMBERS | {"JSON"},
    ),
    "binary": Takers(frozenset({"bytea"}), _MY_BYTES | {"binary"}, frozenset({"RAW", "BLOB"})),
    "date": Takers(
        frozenset({"date", "timestamp", "timestamptz"}),
        _MY_MOMENTS | _MY_TEXTS | {"date"},
        _ORA_MOMENTS,
    ),
    "time": Takers(frozenset({"time"}), _MY_TEXTS | {"time"}, _NONE),
    "timestamp": Takers(
        frozenset({"timestamp", "timestamptz"}), _MY_MOMENTS | _MY_TEXTS, _ORA_MOMENTS
    ),
    "duration": Takers(frozenset({"interval"}), _MY_TEXTS | {"bigint", "decimal"}, _ORA_NUMBERS),
    "json": Takers(frozenset({"json", "jsonb"}), _MY_TEXTS | {"json"}, _ORA_TEXTS | {"JSON"}),
}


class _Digits(NamedTuple):
    precision_max: int
    scale_max: int
    has_negative_scale: bool
    type: str


_DECIMALS: Mapping[Database, _Digits] = {
    "postgres": _Digits(38, 38, True, "PostgreSQL's numeric, as it is sent"),
    "mysql": _Digits(65, 30, True, "MySQL's decimal"),
    "oracle": _Digits(38, 38, False, "Oracle's NUMBER"),
}
_NAMES: Mapping[Database, str] = {"postgres": "PostgreSQL", "mysql": "MySQL", "oracle": "Oracle"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How one Arrow type travels to one database."""

    family: str
    ddl: str
    """The column that holds it naturally."""
    scale: int = 0
    """Digits after the point, of a decimal."""
    convert: Convert | None = None
    """What becomes of the values before they are sent; None: they are sent as they are."""

    def then(self, convert: Convert | None) -> Sent:
        """The same, with another conversion after its own."""
        first = self.convert
        if first is None or convert is None:
            return replace(self, convert=first or convert)
        return replace(self, convert=lambda values: convert(first(values)))


def sent_to(database: Database, kind: pa.DataType) -> Sent | str:
    """How values of this type travel, or why they can't."""
    if is_.is_dictionary(kind):
        inner = sent_to(database, kind.value_type)
        if isinstance(inner, str):
            return inner
        return replace(inner, convert=cast_to(kind.value_type)).then(inner.convert)
    for row in TYPES:
        if row.matches(kind) and getattr(row, database):
            return _sent(row, kind, database)
    if is_.is_nested(kind) and not is_.is_union(kind):
        ddl = getattr(NESTED, database)
        return json_lines.refusal(kind) or Sent(family=NESTED.family, ddl=ddl, convert=json_text)
    return f"{kind} has no counterpart in {_NAMES[database]}"


def _sent(row: TypeRow, kind: pa.DataType, database: Database) -> Sent | str:
    if row.family == "decimal":
        return _decimal(getattr(row, database), kind, database)
    arrow = row.sent(kind) if callable(row.sent) else row.sent
    convert = None if arrow in {None, kind} else cast_to(arrow)
    return Sent(family=row.family, ddl=getattr(row, database), convert=convert)


def _decimal(name: str, kind: pa.DataType, database: Database) -> Sent | str:
    limit, scale = _DECIMALS[database], max(kind.scale, 0)
    digits = kind.precision + scale - kind.scale
    is_odd = kind.scale < 0 and not limit.has_negative_scale
    if kind.precision > limit.precision_max or scale > limit.scale_max or is_odd:
        return f"{kind} has more digits than {limit.type}, which ends at {limit[:2]}"
    is_wide = not is_.is_decimal128(kind) and kind.precision <= 38
    convert = cast_to(pa.decimal128(kind.precision, kind.scale)) if is_wide else None
    return Sent(family="decimal", ddl=f"{name}({digits},{scale})", scale=scale, convert=convert)


# Conversions that several databases need


def cast_to(arrow: pa.DataType) -> Convert:
    return lambda values: values if values.type == arrow else values.cast(arrow)


def json_text(values: Values) -> Values:
    if isinstance(values, pa.ChunkedArray):
        return pa.chunked_array([json_text(chunk) for chunk in values.chunks], pa.large_string())
    text = json_lines.as_json(values)
    return pc.if_else(values.is_valid(), text, scalar(None, text.type))


def microseconds(values: Values) -> Values:
    """Timestamps, times and durations as whole microseconds; finer ones are refused."""
    if is_.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", values.type.tz))
    elif is_.is_duration(values.type):
        values = values.cast(pa.duration("us"))
    else:
        values = values.cast(pa.time64("us"))
    return values.cast(pa.int64())


def in_utc(values: Values) -> Values:
    """Instants in UTC, which is the session's zone; timestamps without a zone as they are."""
    return microseconds(values).cast(pa.timestamp("us"))


def not_in_steps(counted: Values, step: int) -> Values:
    """Which of these numbers are no multiples of a step."""
    # Arrow has no remainder: whole steps, times the step, give the value back or don't.
    size = scalar(step, counted.type)
    return pc.not_equal(pc.multiply(pc.divide(counted, size), size), counted)


_FIRST_DAY, _LAST_DAY = -719_162, 2_932_896
"""Of the years 1 to 9999, counted from 1970."""


def outside_years(moments: Values) -> Values:
    """Which of these dates or timestamps are not within the years 1 to 9999."""
    if is_.is_date(moments.type):
        counted, per_day = moments.cast(pa.date32()).cast(pa.int32()).cast(pa.int64()), 1
    else:
        counted, per_day = microseconds(moments), 86_400_000_000
    first = scalar(_FIRST_DAY * per_day, counted.type)
    after = scalar((_LAST_DAY + 1) * per_day, counted.type)
    return pc.or_(pc.less(counted, first), pc.greater_equal(counted, after))
