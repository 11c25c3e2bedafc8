"""MySQL's types: values as text for LOAD DATA, what columns make of it, and the plan of a write.

A staging column has the type of the column that its field is meant for, so that the server's own
conversion happens once, while rows are loaded, and a value that does not fit is found with its row.
Where MySQL would change a value without a warning (fractions of a second, numbers that it reads as
places in an ENUM, NaN, a NULL that becomes a default), the values are checked before they are sent
(`changed`). Floating point numbers are rounded to what their column keeps, which `check()` reports
(`rounding`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from epochal.arrow_values import scalar
from epochal.errors import Problems
from epochal.kit.sql import columns
from epochal.kit.sql.columns import AS_STRING, columns_taking, no_key, no_order, way_to_cast
from epochal.kit.sql.dialect import order_copy
from epochal.kit.sql.modes import WriteMode
from epochal.kit.sql.table_sink import TableSink
from epochal.kit.sql.types import (
    TAKERS,
    Convert,
    Sent,
    in_utc,
    microseconds,
    not_in_steps,
    sent_to,
)
from epochal.sinks.mysql.dialect import DIALECT

TEXT = pa.large_string()
_MICROS = 6
_MANY = 1000
_WHOLE = frozenset({"tinyint", "smallint", "mediumint", "int", "bigint", "bit"})


def sent_as(kind: pa.DataType) -> Sent | str:
    """How values of this type travel as text, or why they can't."""
    sent = sent_to("mysql", kind)
    return sent if isinstance(sent, str) else sent.then(_TO_TEXT.get(sent.family, _plain))


# Values as text, by Arrow's kernels: no Python per row


def _plain(values: pa.Array) -> pa.Array:
    return values.cast(TEXT)


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
    return pc.if_else(values.is_valid(), text, scalar(None, TEXT)) if values.null_count else text


def _shortest(values: pa.Array) -> pa.Array:
    """The fewest digits that tell a float from all others of its size."""
    return _plain(values.cast(pa.float32()) if pa.types.is_float16(values.type) else values)


_TO_TEXT: Mapping[str, Convert] = {
    "bool": lambda values: _plain(values.cast(pa.int8())),
    # Through double: the digits of a float's own shortest form would be rounded twice.
    "float": lambda values: _plain(values.cast(pa.float64())),
    "timestamp": lambda values: _plain(in_utc(values)),
    "duration": lambda values: _plain(microseconds(values)),
    "text": _escaped,
    "json": _escaped,
    "binary": _hex,
}


# What a column takes


@dataclass(frozen=True, slots=True)
class Mismatch:
    because: str
    hint: str


def load_expression(sent: Sent, data_type: str, written: str, scale: int) -> str | Mismatch | None:
    """What is made of a loaded text `{}` for a column; None where it may be read directly."""
    is_whole = sent.family == "decimal" and sent.scale == 0 and data_type in _WHOLE
    if data_type not in TAKERS[sent.family].mysql and not is_whole:
        return Mismatch(
            f"{sent.ddl} can't become {written} without loss",
            "cast it to a type that the column takes, or keep it as text beside a generated column "
            "that reads it"
            if sent.family == "text"
            else AS_STRING,
        )
    if sent.family == "binary":
        return "UNHEX({})"
    if data_type == "bit":
        return "CAST({} AS UNSIGNED)"
    if sent.family == "float" and data_type == "decimal":
        # From its digits: ROUND of a double computes in doubles, and loses the last ones.
        return (
            "CASE WHEN ABS({0} + 0e0) BETWEEN 1e-13 AND 1e34"
            f" THEN CAST(ROUND(CAST({{0}} AS DECIMAL(65,30)), {scale}) AS CHAR)"
            f" ELSE CAST(ROUND({{0}} + 0e0, {scale}) AS CHAR) END"
        )
    return None


_BITS = {
    "float": "float keeps 24 bits, about 7 digits",
    "double": "double keeps 53 bits, about 16 digits",
}
_EXACT_IN_BITS: Mapping[str, frozenset[str]] = {
    "float": frozenset({"tinyint", "smallint", "float"}),
    "double": frozenset({"tinyint", "smallint", "int", "float", "double"}),
}
"""What columns of so many bits keep as it is."""
_EXACT_DIGITS = {"float": 6, "double": 15}
"""Decimal digits that come back as they were."""


def rounding(sent: Sent, column: Column) -> str:
    """How a column may round what arrives; empty where it keeps or refuses every value."""
    kind, natural = column.data_type, re.split(r"[( ]", sent.ddl, maxsplit=1)[0]
    has_scale = kind in _BITS and "," in column.ddl
    if has_scale and sent.family not in {"bool", "integer"}:
        return f"{column.ddl} rounds to its scale"
    if kind in _BITS and natural not in _EXACT_IN_BITS[kind]:
        digits = int(re.findall(r"\d+", sent.ddl)[0]) if sent.family == "decimal" else _MANY
        return "" if digits <= _EXACT_DIGITS[kind] else _BITS[kind]
    if sent.family == "float" and kind == "decimal":
        return f"{column.ddl} rounds to its scale"
    return ""


def changed(sent: Sent, column: Column, values: pa.Array) -> Iterator[tuple[pa.Array, str]]:
    """Values that the server would change without a warning, and the reason."""
    kind, written = column.data_type, f'column "{column.name}" is {column.ddl}'
    is_cut = kind in {"datetime", "timestamp", "time"} and column.scale < _MICROS
    if sent.family in {"timestamp", "time"} and is_cut:
        steps = not_in_steps(microseconds(values), 10 ** (_MICROS - column.scale))
        yield steps, f"{written}, which would truncate the second"
    if sent.family in {"integer", "decimal"} and kind == "bit":
        yield pc.match_substring_regex(values.cast(TEXT), "^-"), f"{written}, which has no sign"
    if sent.family == "integer" and kind == "year":
        yield pc.less(values, scalar(100, values.type)), f"{written}, and adds a century"
    if sent.family == "binary" and kind == "binary":
        lengths = pc.binary_length(values.cast(pa.large_binary()))
        wanted = scalar(int(re.findall(r"\d+", column.ddl)[0]), lengths.type)
        yield pc.less(lengths, wanted), f"{written}, which would fill it up with zeros"
    if sent.family == "text":
        for pattern, why in _changed_texts(kind, column):
            yield pc.match_substring_regex(values.cast(TEXT), pattern), f"{written}, {why}"
        if kind in {"enum", "set"}:
            text = values.cast(TEXT)
            members = "|".join(re.escape(one) for one in _members(column.ddl))
            is_number = pc.match_substring_regex(text, r"^\s*\d+\s*$")
            is_member = pc.match_substring_regex(text, f"^(?:{members})$")
            why = "which reads a number as the place of a member"
            yield pc.and_(is_number, pc.invert(is_member)), f"{written}, {why}"


def _changed_texts(kind: str, column: Column) -> Iterator[tuple[str, str]]:
    """Patterns of text that a column of this kind would change."""
    if kind in {"datetime", "timestamp", "time"}:
        yield rf"\.\d{{{column.scale}}}\d*[1-9]", "which would truncate the second"
    if kind in _WHOLE:
        yield r"\.\d*[1-9]|[eE]-", "which would round it"
    if kind == "year":
        yield r"^.{0,3}$|^.{5,}$|\D", "which takes four digits as they are"


def _members(ddl: str) -> list[str]:
    """Of an ENUM or SET."""
    return [one.replace("''", "'") for one in re.findall(r"'((?:[^']|'')*)'", ddl)]


# The plan of a write: the table, and which field goes into which of its columns


@dataclass(frozen=True, slots=True, kw_only=True)
class Column(columns.Column):
    data_type: str
    """`varchar`, without a length."""
    ddl: str
    """The whole type, character set and collation included."""
    scale: int = 0
    """Digits after the point, of a decimal; of a moment, of its seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(columns.Table[Column]):
    is_transactional: bool
    engine: str
    unique: Mapping[str, Sequence[str]]
    """
    Unique indexes and their columns; one on an expression, or on the first characters of a column,
    has an empty name in it.
    """

    @property
    def quoted(self) -> str:
        return DIALECT.quote(self.schema, self.name)

    def unique_hit_by(self, written: frozenset[str]) -> dict[str, Sequence[str]]:
        """
        Unique indexes that rows with these columns can meet another row in.

        Not those with a column that we leave to the server, and that it numbers or leaves null: a
        generated one it computes from what is written.
        """

        def is_never_equal(name: str) -> bool:
            column = self.columns.get(name)
            if column is None or name in written or column.is_generated:
                return False
            return column.is_numbered or not (column.is_not_null or column.has_default)

        return {
            name: columns
            for name, columns in self.unique.items()
            if not any(map(is_never_equal, columns))
        }

    def may_collide(self, written: frozenset[str]) -> bool:
        """Whether rows of two attempts can meet in a key; the keys below a view are not known."""
        return self.kind == "view" or bool(self.unique_hit_by(written))


def from_json(given: Mapping[str, Any]) -> Table:
    """The table as a task is given it."""
    columns = {name: Column(**column) for name, column in given["columns"].items()}
    return Table(**{**given, "columns": columns})


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """One field that travels, and the column that takes it, if there is one."""

    field: str
    arrives_as: str
    """The name of the field, of which this may be a copy."""
    sent: Sent
    column: Column | None
    expression: str | None = None
    """What is made of the loaded text, where it is not read directly."""

    @property
    def rounding(self) -> str:
        """For `check()`: how the column may round the field."""
        return "" if self.column is None else rounding(self.sent, self.column)

    @property
    def staging_ddl(self) -> str:
        if self.column is not None:
            return self.column.ddl
        # Compared by its bytes: no column gives a collation.
        is_text = self.sent.ddl == "longtext"
        collation = " CHARACTER SET utf8mb4 COLLATE utf8mb4_bin" if is_text else ""
        return f"{self.sent.ddl}{collation}"


def sent_fields(schema: pa.Schema, sink: TableSink) -> dict[str, Sent]:
    return columns.sent_fields(schema, sink, DIALECT, lambda field: sent_as(field.type))


def plan(sent: Mapping[str, Sent], table: Table, sink: TableSink) -> tuple[Planned, ...]:
    """How these fields are written to this table, or `Misconfigured` with everything against it."""
    problems = Problems()
    taking = columns_taking(sent, table, sink, problems)
    planned = [_planned(name, how, taking.get(name), problems) for name, how in sent.items()]
    planned += [
        replace(_planned(name, sent[name], None, problems), field=order_copy(number))
        for number, name in enumerate(sink.write_mode.order_by)
        if name in taking and not _keeps_order(sent[name], taking[name])
    ]
    newer = sink.write_mode.newer
    if newer is not None and newer in taking and not _is_version(sent[newer], taking[newer]):
        problems.add(*no_order(newer, taking[newer].name, taking[newer].ddl))
    if not problems.facts:
        columns = {name: column.name for name, column in taking.items()}
        require_key(table, columns, sink.write_mode, problems)
    problems.raise_if_any(f"{table.kind} {table}")
    return tuple(planned)


def _planned(name: str, sent: Sent, column: Column | None, problems: Problems) -> Planned:
    if column is None:
        natural = "UNHEX({})" if sent.family == "binary" else None
        return Planned(field=name, arrives_as=name, sent=sent, column=None, expression=natural)
    expression = load_expression(sent, column.data_type, column.ddl, column.scale)
    if isinstance(expression, Mismatch):
        hint = way_to_cast(name, expression.hint)
        problems.add(f'field "{name}": {expression.because} (column "{column.name}")', hint)
        expression = None
    if sent.family == "float" and column.data_type not in _BITS:
        sent = replace(sent, convert=_shortest)
    return Planned(field=name, arrives_as=name, sent=sent, column=column, expression=expression)


_ORDERED: Mapping[str, frozenset[str]] = {
    "bool": _WHOLE | {"decimal"},
    "integer": _WHOLE | {"decimal"},
    "duration": _WHOLE | {"decimal"},
    "decimal": frozenset({"decimal"}),
    "float": frozenset({"double"}),
    "date": frozenset({"date", "datetime", "timestamp"}),
    "timestamp": frozenset({"datetime", "timestamp"}),
    "time": frozenset({"time"}),
    "binary": TAKERS["binary"].mysql,
}
"""Columns in which values of a family have the order that they arrive with."""


def _keeps_order(sent: Sent, column: Column) -> bool:
    return column.data_type in _ORDERED.get(sent.family, ())


def _is_version(sent: Sent, column: Column) -> bool:
    """Whether values compare in the column as they arrive; text arrives as bytes."""
    is_bytes = sent.family == "text" and column.ddl.endswith("_bin")
    return is_bytes or _keeps_order(sent, column)


def require_key(
    table: Table, columns: Mapping[str, str], mode: WriteMode, problems: Problems
) -> None:
    """Whether unique indexes say which row an upsert of fields to these columns means."""
    if not mode.needs_unique_key:
        return
    names = [columns.get(key, key) for key in mode.keys]
    written = ", ".join(DIALECT.quote(name) for name in names)
    hit = table.unique_hit_by(frozenset(columns.values()))
    fitting = [index for index, parts in hit.items() if set(parts) == set(names)]
    others = [index for index in hit if index not in fitting]
    if not fitting:
        problems.add(*no_key(written, table.quoted))
    elif others:
        problems.add(
            f"an upsert by {written} is ambiguous: ON DUPLICATE KEY UPDATE would also change rows "
            f"that are equal by the unique index {others[0]}",
            "mode='replace', which refuses such rows by name; or drop the other index",
        )
