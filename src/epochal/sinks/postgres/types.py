"""PostgreSQL's types: how they are staged, the casts to columns, and the plan of a write.

A staging column has the natural type of what arrives (`kit.sql.types`); the cast to the column's
own type is part of the statement that applies it. No cast may lose anything: `text::varchar(3)`
would truncate silently, so a string is left to the assignment, which refuses; a double is not taken
by an integer column at all. (A numeric column's own scale rounds, as it does in every INSERT.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa

from epochal.errors import Problems
from epochal.kit.sql import columns
from epochal.kit.sql import types as shared
from epochal.kit.sql.apply import Mapped
from epochal.kit.sql.columns import columns_taking, no_key
from epochal.kit.sql.table_sink import TableSink
from epochal.kit.sql.types import TAKERS, Convert
from epochal.sinks.postgres.dialect import DIALECT

_STRINGS = "S"
"""PostgreSQL's category of text, varchar, char, name and citext."""
_INTEGERS = frozenset({"int2", "int4", "int8"})
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
    return Sent(type=_type(sent), ddl=sent.ddl, convert=sent.convert)


def _type(sent: shared.Sent) -> Type:
    written = sent.ddl.partition("(")[0]
    return Type(
        written=written,
        base=_BASES.get(written, written),
        category=_STRINGS if written == "text" else "",
        scale=sent.scale,
    )


def _array_of(kind: pa.DataType, element: shared.Sent) -> Sent:
    inner = _type(element)
    convert = None
    if element.convert is not None:
        arrow = element.convert(pa.chunked_array([], kind.value_type)).type
        convert = shared.cast_to(pa.list_(arrow))
    type_ = replace(inner, written=f"{inner.written}[]", is_array=True)
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
_TO_TEXT = (
    'give it as a string (select=["cast(x as string) x"]): text is cast to the column\'s type'
)


def cast_between(source: Type, target: Type) -> Cast | Mismatch:  # noqa: PLR0911  one per rule
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
    if target.base not in _takers(source.base):
        return _mismatch(source, target)
    if target.base == "money":
        return Cast(after="::numeric::money")
    return Cast(after=f"::{target.base}") if source.base == "json" else NO_CAST


def _takers(base: str) -> frozenset[str]:
    family = _FAMILIES.get(base)
    return frozenset() if family is None else TAKERS[family].postgres


def _from_text(target: Type) -> Cast:
    # `bit` alone is bit(1), and would cut.
    return Cast(after="::varbit" if target.base == "bit" else f"::{target.written}")


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
    """Whole, valid and on columns only: what ON CONFLICT can use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(columns.Table[Column]):
    oid: int
    has_row_security: bool
    unique: Sequence[UniqueIndex] = ()

    @property
    def quoted(self) -> str:
        return DIALECT.quote(self.schema, self.name)


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
    def mapped(self) -> Mapped:
        is_citext = self.column.type.base == "citext"
        return Mapped(
            field=self.field,
            column=self.column.name,
            is_not_null=self.column.is_not_null,
            cast=(self.cast.before, self.cast.after),
            key_cast=("", f"::{self.column.type.written}") if is_citext else None,
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
        if (one := _planned(name, fields[name], column, table, problems)) is not None
    ]
    if sink.mode == "upsert" and not problems.facts:
        _require_key([taking[key].name for key in sink.write_mode.keys], table, problems)
    problems.raise_if_any(f"{table.kind} {table}")
    return tuple(planned)


def may_go_direct(planned: Sequence[Planned], table: Table) -> bool:
    """A binary COPY into the table itself: the bytes must fit, and COPY knows no row security."""
    return not table.has_row_security and all(
        is_direct(one.source, one.column.type, is_enum=one.column.is_enum) for one in planned
    )


def _planned(
    name: str, source: Type, column: Column, table: Table, problems: Problems
) -> Planned | None:
    if column.is_always_identity:
        problems.add(
            f'column "{column.name}" is GENERATED ALWAYS AS IDENTITY',
            f'leave the field "{name}" out, or ALTER TABLE {table} ALTER COLUMN '
            f'"{column.name}" SET GENERATED BY DEFAULT',
        )
    cast = cast_between(source, column.type)
    if isinstance(cast, Mismatch):
        problems.add(f'field "{name}": {cast.because} (column "{column.name}")', cast.hint)
        return None
    return Planned(field=name, source=source, column=column, cast=cast)


def _require_key(names: Sequence[str], table: Table, problems: Problems) -> None:
    fitting = [one for one in table.unique if set(one.columns) == set(names)]
    written = ", ".join(f'"{name}"' for name in names)
    if not any(one.is_plain and not one.is_exclusion and one.is_immediate for one in fitting):
        unfit = "the one that is there is deferrable, partial or an exclusion constraint"
        problems.add(*no_key(written, str(table), unfit if fitting else ""))
