"""PostgreSQL's types: how they are staged, the casts to columns, and the plan of a write.

A staging column has the natural type of what arrives (`kit.sql.types`); the cast to the column's
own type is part of the statement that applies it. No cast may cut: `text::varchar(3)` would, so
casts go to types without a length, and the assignment after them refuses. A double is not taken by
an integer column at all. Columns that keep fewer digits than arrive round as in every INSERT, which
`check()` reports (`rounding`).

A key is compared before it is assigned: it is cast to exactly what its column keeps, length, scale
and collation included, so that two keys which the column keeps as one are one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from epochal.errors import Problems
from epochal.kit.sql import columns
from epochal.kit.sql import types as shared
from epochal.kit.sql.apply import Mapped
from epochal.kit.sql.columns import AS_STRING, columns_taking, no_key, no_order, way_to_cast
from epochal.kit.sql.table_sink import TableSink
from epochal.kit.sql.types import TAKERS, Convert
from epochal.sinks.postgres.dialect import DIALECT

_TYPMOD_MIN = 4
"""The catalog adds it to the length, or precision and scale, of strings and numbers."""
_MANY = 1000
_STRINGS = "S"
"""PostgreSQL's category of text, varchar, char, name and citext."""
_INTEGERS = frozenset({"int2", "int4", "int8"})
_FLOATS = frozenset({"float4", "float8"})
_CUTTING = frozenset({"name", "char"})
"""Types of the catalog's own, which cut whatever is too long; `char` is not `character`."""
_SIZED = frozenset({"bpchar", "varchar", "bit", "varbit"})
"""Types with a length that a cast cuts to, where an assignment refuses."""
_EXACT_IN_BITS: Mapping[str, frozenset[str]] = {
    "float4": frozenset({"int2", "float4"}),
    "float8": frozenset({"int2", "int4", "float4", "float8"}),
    "vector": frozenset({"int2", "float4"}),
    "halfvec": frozenset(),
}
"""What columns of so many bits keep as it is."""
_EXACT_DIGITS = {"float4": 6, "float8": 15}
"""Decimal digits that come back as they were."""
_MOMENTS = frozenset({"time", "timetz", "timestamp", "timestamptz", "interval"})
_FAMILIES = {
    **dict.fromkeys(("int2", "int4", "int8"), "integer"),
    **dict.fromkeys(("float4", "float8"), "float"),
    "bool": "bool",
    "numeric": "decimal",
    "bytea": "binary",
    "date": "date",
    "time": "time",
    "timestamp": "timestamp",
    "timestamptz": "timestamp",
    "interval": "duration",
    "json": "json",
}
"""The family of a staged type; a staging table is read back from the catalog."""
_BASES = {
    "boolean": "bool",
    "smallint": "int2",
    "integer": "int4",
    "bigint": "int8",
    "real": "float4",
    "double precision": "float8",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Type:
    """A type as the server's catalog has it, domains resolved to what they are made of."""

    written: str
    """As SQL writes it, without a length or precision."""
    full: str
    """The same with both."""
    base: str
    """`typname` under all domains; of an array, its element's."""
    category: str = ""
    is_array: bool = False
    typmod: int = -1
    """Length, precision or fields, as the catalog keeps them; below 0 without."""
    collation: str = ""
    """Quoted; empty where it is the database's own."""
    is_unseen: bool = False
    """Whether it has operators of its own, which the session's search_path does not find."""

    @property
    def digits(self) -> tuple[int, int] | None:
        """Precision and scale of a numeric that has them."""
        if self.typmod < _TYPMOD_MIN:
            return None
        number = self.typmod - _TYPMOD_MIN
        return number >> 16, ((number & 0x7FF) ^ 1024) - 1024

    @property
    def second_digits(self) -> int:
        """Digits of a second that a time, a timestamp or an interval keeps."""
        kept = self.typmod & 0xFFFF
        return 6 if self.typmod < 0 or kept == 0xFFFF else kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """How one Arrow type travels: the staging column, and what becomes of the values first."""

    type: Type
    ddl: str
    convert: Convert | None = None


def sent_as(kind: pa.DataType) -> Sent | str:
    """How values of this type travel, or why they can't. Lists of plain values are arrays."""
    if _is_list(kind) and not (
        pa.types.is_null(kind.value_type) or pa.types.is_dictionary(kind.value_type)
    ):
        element = shared.sent_to("postgres", kind.value_type)
        if not isinstance(element, str) and element.family != "json":
            return _array_of(kind, element)
    sent = shared.sent_to("postgres", kind)
    if isinstance(sent, str):
        return sent
    if pa.types.is_interval(kind):
        sent = sent.then(_in_microseconds)
    return Sent(type=_type(sent), ddl=sent.ddl, convert=sent.convert)


_MONTH_DAY_NANO = np.dtype([("months", "<i4"), ("days", "<i4"), ("nanoseconds", "<i8")])


def _in_microseconds(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Intervals as they are; `pa.ArrowInvalid` where one is finer than PostgreSQL's."""
    for chunk in values.chunks:
        parts = np.frombuffer(chunk.buffers()[1], _MONTH_DAY_NANO)[chunk.offset :][: len(chunk)]
        if (parts["nanoseconds"] % 1000).any():
            raise pa.ArrowInvalid("an interval has nanoseconds, and PostgreSQL's microseconds")
    return values


def _type(sent: shared.Sent) -> Type:
    written, _, numbers = sent.ddl.partition("(")
    typmod = -1
    if numbers:
        precision, scale = map(int, numbers.rstrip(")").split(","))
        typmod = (precision << 16 | scale) + _TYPMOD_MIN
    return Type(
        written=written,
        full=sent.ddl,
        base=_BASES.get(written, written),
        category=_STRINGS if written == "text" else "",
        typmod=typmod,
    )


def _array_of(kind: pa.DataType, element: shared.Sent) -> Sent:
    inner = _type(element)
    convert = None
    if element.convert is not None:
        arrow = element.convert(pa.chunked_array([], kind.value_type)).type
        convert = shared.cast_to(pa.list_(arrow))
    type_ = replace(inner, written=f"{inner.written}[]", full=f"{inner.full}[]", is_array=True)
    return Sent(type=type_, ddl=f"{element.ddl}[]", convert=convert)


def _is_list(kind: pa.DataType) -> bool:
    is_ = pa.types
    return bool(is_.is_list(kind) or is_.is_large_list(kind) or is_.is_fixed_size_list(kind))


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


def cast_between(source: Type, target: Type) -> Cast | Mismatch:  # noqa: PLR0911  one per rule
    """How a staged value becomes the column's own type, or why it must not."""
    if source.is_array:
        return _array_cast(source, target)
    if target.is_array:
        return _from_text(target) if source.base == "text" else _mismatch(source, target)
    if target.base in _CUTTING or _has_fields(target):
        return Mismatch(f"{target.full} cuts what it can't hold", "alter the column")
    if source.full == target.full and source.base == target.base:
        return NO_CAST
    if target.category == _STRINGS:
        return _mismatch(source, target) if source.base == "bytea" else NO_CAST
    if source.base == "text":
        return _from_text(target)
    if source.base == "numeric" and target.base in _INTEGERS:
        return NO_CAST if _scale(source) == 0 else _mismatch(source, target)
    if target.base not in _takers(source.base):
        return _mismatch(source, target)
    if target.base == "money":
        return Cast(after="::numeric::money")
    if target.base == "numeric" and source.base in _FLOATS:
        # The cast of its own keeps 6 or 15 digits; the text has all that tell a value from others.
        return Cast(after="::text::numeric")
    return Cast(after=f"::{target.base}") if source.base == "json" else NO_CAST


def _has_fields(target: Type) -> bool:
    """Whether it is `interval hour to minute` or another that keeps some fields only."""
    return target.base == "interval" and target.typmod >= 0 and target.typmod >> 16 != 0x7FFF


def _takers(base: str) -> frozenset[str]:
    family = _FAMILIES.get(base)
    return frozenset() if family is None else TAKERS[family].postgres


def _from_text(target: Type) -> Cast:
    if not target.is_array and target.base in _DROPPED:
        # The second cast is reached by what is to be refused, and fails with the text.
        kept, dropped = _DROPPED[target.base]
        fails = f"(x || ' has {dropped}')::{target.written}"
        return Cast(
            before=f"(SELECT CASE WHEN {kept} THEN x::{target.written} ELSE {fails} END"
            " FROM (SELECT ",
            after=") q(x))",
        )
    return Cast(after=f"::{target.written}")


_DROPPED = {
    "date": ("x::timestamp = x::date", "a time of day"),
    "time": ("x !~ '[+-]'", "a date or a zone"),
    "timestamp": ("x::timestamptz AT TIME ZONE 'UTC' = x::timestamp", "another zone than UTC"),
}
"""Text of which a cast would drop a part: which is taken whole, and what the rest has."""


def _array_cast(source: Type, target: Type) -> Cast | Mismatch:
    if not target.is_array:
        if target.base in {"json", "jsonb"}:
            return Cast(before=f"to_{target.base}(", after=")")
        if target.base in {"vector", "halfvec"} and source.base in TAKERS["integer"].postgres:
            return Cast(after=f"::{target.written}")
        return _mismatch(source, target)
    inner = cast_between(_element(source), _element(target))
    if isinstance(inner, Mismatch):
        return _mismatch(source, target)
    steps = inner.after.split("::")[1:]
    return Cast(after="".join(f"::{step}[]" for step in steps))


def _element(array: Type) -> Type:
    return replace(
        array,
        written=array.written.removesuffix("[]"),
        full=array.full.removesuffix("[]"),
        is_array=False,
    )


def _mismatch(source: Type, target: Type) -> Mismatch:
    return Mismatch(f"{source.written} can't become {target.full} without loss", AS_STRING)


def key_cast(cast: Cast, target: Type) -> tuple[str, str]:
    """What surrounds a staged key, so that it is compared as its column keeps it."""
    before, after = cast.before, f"{cast.after}::{target.written}"
    if target.typmod >= 0 and target.base not in _SIZED:
        after += f"::{target.full}"
    elif target.typmod >= 0 and not target.is_array:
        # As an assignment does it: what is too long is refused, where a cast would cut.
        before, after = f'pg_catalog."{target.base}"({before}', f"{after}, {target.typmod}, false)"
    return before, f"{after} COLLATE {target.collation}" if target.collation else after


def rounding(source: Type, target: Type) -> str:
    """How a column may round what arrives; empty where it keeps every value as it is."""
    keeps = {
        "float4": f"{target.full} keeps 24 bits, about 7 digits",
        "vector": f"{target.full} keeps 24 bits, about 7 digits",
        "halfvec": f"{target.full} keeps 11 bits, about 3 digits",
        "float8": f"{target.full} keeps 53 bits, about 16 digits",
        "numeric": f"{target.full} rounds to its scale",
        "money": "money rounds to its smallest unit",
    }
    if target.base in _EXACT_IN_BITS:
        is_kept = source.base in _EXACT_IN_BITS[target.base] or (
            source.base == "numeric"
            and source.digits is not None
            and source.digits[0] <= _EXACT_DIGITS.get(target.base, 0)
        )
    elif target.base in {"numeric", "money"}:
        digits = (0, 2) if target.base == "money" else target.digits
        is_kept = digits is None or _scale(source) <= digits[1]
    elif target.base in _MOMENTS:
        is_kept = source.base == "date" or target.second_digits == 6
    else:
        is_kept = True
    return "" if is_kept else keeps.get(target.base, f"{target.full} rounds the second")


def _scale(source: Type) -> int:
    """Digits behind the point that may arrive."""
    if source.base in _INTEGERS:
        return 0
    return source.digits[1] if source.base == "numeric" and source.digits else _MANY


# Straight into the table, without staging: the bytes must be those of the column's own type


_ARROW_OF = {
    "int2": pa.int16(),
    "int4": pa.int32(),
    "int8": pa.int64(),
    "float4": pa.float32(),
    "float8": pa.float64(),
}
_SAME_BYTES = {
    "text": frozenset({"text", "varchar", "bpchar", "citext", "json", "xml"}),
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
        # A double that is too large for a real would become infinity here; the server refuses it.
        is_narrowed = (source.base, target.base) == ("float8", "float4")
        return (source.base in _INTEGERS) == (target.base in _INTEGERS) and not is_narrowed
    if source.base == "text" and is_enum:
        return True
    return target.base in _SAME_BYTES.get(source.base, ())


def arrow_of(target: Type) -> pa.DataType | None:
    """The Arrow type whose bytes the column reads, where numbers must be widened or narrowed."""
    return None if target.is_array else _ARROW_OF.get(target.base)


def create_as(sent: Sent) -> str:
    """The type of a column that is made for this field: JSON is kept in its indexed form."""
    return "jsonb" if sent.ddl == "json" else sent.ddl


# The plan of a write: the table, and which field goes into which of its columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(columns.Column):
    type: Type
    is_enum: bool = False
    is_always_identity: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class UniqueIndex:
    name: str
    columns: Sequence[str]
    is_exclusion: bool
    is_immediate: bool
    is_plain: bool
    """Whole, valid, on columns only and of no partition alone: what ON CONFLICT can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(columns.Table[Column]):
    oid: int
    takes_copies: bool
    """Whether COPY writes what INSERT would: it knows no views, rules and row security."""
    unique: Sequence[UniqueIndex] = ()

    @property
    def quoted(self) -> str:
        return DIALECT.quote(self.schema, self.name)

    @property
    def may_collide(self) -> bool:
        """Whether rows of two attempts can meet in a key; the keys below a view are not known."""
        return self.kind == "view" or bool(self.unique)


def from_json(given: Mapping[str, Any]) -> Table:
    """The table as a task is given it."""
    columns = {
        name: Column(**{**column, "type": Type(**column["type"])})
        for name, column in given["columns"].items()
    }
    unique = [UniqueIndex(**one) for one in given["unique"]]
    return Table(**{**given, "columns": columns, "unique": unique})


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One field that is written, and the column that takes it."""

    field: str
    source: Type
    column: Column
    cast: Cast

    @property
    def rounding(self) -> str:
        """For `check()`: how the column may round the field."""
        return rounding(self.source, self.column.type)

    @property
    def mapped(self) -> Mapped:
        return Mapped(
            field=self.field,
            column=self.column.name,
            is_not_null=self.column.is_not_null,
            cast=(self.cast.before, self.cast.after),
            key_cast=key_cast(self.cast, self.column.type),
        )


def sent_fields(schema: pa.Schema, sink: TableSink) -> dict[str, Sent]:
    return columns.sent_fields(schema, sink, DIALECT, lambda field: sent_as(field.type))


def plan(fields: Mapping[str, Type], table: Table, sink: TableSink) -> tuple[Planned, ...]:
    """How these fields are written to this table, or `Misconfigured` with everything against it."""
    problems = Problems()
    taking = columns_taking(fields, table, sink, problems)
    planned = [
        one
        for name, column in taking.items()
        if (one := _planned(name, fields[name], column, sink, problems)) is not None
    ]
    for key in set(sink.write_mode.keys) & taking.keys():
        if taking[key].type.is_array and taking[key].type.full.startswith("character varying("):
            problems.add(
                f'key "{key}": elements of {taking[key].type.full} may lose blanks once they are '
                "stored, which a comparison before that can't know",
                "a key of another type, text[] for example",
            )
        if taking[key].type.is_unseen:
            problems.add(
                f'key "{key}": {taking[key].type.full} is not on the search_path, and would be '
                "compared as another type",
                "session_sql=['SET search_path = …'], or ALTER ROLE … SET search_path = …",
            )
    for one in planned:
        if one.field == sink.write_mode.newer and not _keeps_order(one.source, one.column.type):
            problems.add(*no_order(one.field, one.column.name, one.column.type.full))
    if sink.write_mode.needs_unique_key and not problems.facts:
        _require_key([taking[key].name for key in sink.write_mode.keys], table, problems)
    problems.raise_if_any(f"{table.kind} {table}")
    return tuple(planned)


_NUMERIC = frozenset({"int2", "int4", "int8", "float4", "float8", "numeric"})
_DATED = frozenset({"date", "timestamp", "timestamptz"})


def _keeps_order(source: Type, target: Type) -> bool:
    """Whether the column orders values as they arrive."""
    alike = (_NUMERIC, _DATED, _SAME_BYTES["text"])
    return source.base == target.base or any({source.base, target.base} <= one for one in alike)


def may_go_direct(planned: Sequence[Planned], table: Table) -> bool:
    """A binary COPY into the table itself: the bytes must fit."""
    return table.takes_copies and all(
        is_direct(one.source, one.column.type, is_enum=one.column.is_enum) for one in planned
    )


def _planned(
    name: str, source: Type, column: Column, sink: TableSink, problems: Problems
) -> Planned | None:
    if column.is_always_identity and not sink.write_mode.only_compares(name):
        problems.add(
            f'column "{column.name}" is GENERATED ALWAYS AS IDENTITY',
            f'leave the field "{name}" out, or ALTER TABLE {sink.table} ALTER COLUMN '
            f'"{column.name}" SET GENERATED BY DEFAULT',
        )
    cast = cast_between(source, column.type)
    if isinstance(cast, Mismatch):
        hint = way_to_cast(name, cast.hint)
        problems.add(f'field "{name}": {cast.because} (column "{column.name}")', hint)
        return None
    return Planned(field=name, source=source, column=column, cast=cast)


def _require_key(names: Sequence[str], table: Table, problems: Problems) -> None:
    fitting = [one for one in table.unique if set(one.columns) == set(names)]
    written = ", ".join(f'"{name}"' for name in names)
    if not any(one.is_plain and not one.is_exclusion and one.is_immediate for one in fitting):
        unfit = (
            "the one that is there is deferrable, partial, of a partition alone or an exclusion "
            "constraint"
        )
        problems.add(*no_key(written, str(table), unfit if fitting else ""))
