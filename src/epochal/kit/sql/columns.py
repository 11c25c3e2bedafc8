"""Columns of a table, and the mapping of fields to them by name; types are each database's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Generic, TypeVar

from epochal.errors import Misconfigured, Problems
from epochal.kit.sink_base import cast_hint
from epochal.kit.sql.dialect import UNFIT, Dialect, order_copy
from epochal.kit.sql.modes import WriteMode

if TYPE_CHECKING:
    import pyarrow as pa

    from epochal.kit.sql.table_sink import TableSink

S = TypeVar("S")


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column, as far as every database's catalog describes it."""

    name: str
    is_not_null: bool = False
    has_default: bool = False
    is_numbered: bool = False
    """Whether the server numbers rows that bring no value: identity, AUTO_INCREMENT."""
    is_generated: bool = False

    @property
    def needs_value(self) -> bool:
        return self.is_not_null and not (self.has_default or self.is_numbered or self.is_generated)


C = TypeVar("C", bound=Column)


@dataclass(frozen=True, slots=True, kw_only=True)
class Table(Generic[C]):
    """The same of a table."""

    schema: str
    name: str
    kind: str = "table"
    columns: Mapping[str, C]

    def __str__(self) -> str:
        return f"{self.schema}.{self.name}"


def column_map(
    kind: str,
    columns: Mapping[str, str] | Sequence[str] | None,
    require_name: Callable[[str, str], str],
) -> Mapping[str, str] | None:
    """The option `columns=` as pairs of field and column."""
    if columns is None:
        return None
    pairs = dict(columns) if isinstance(columns, Mapping) else {name: name for name in columns}
    if isinstance(columns, str) or not pairs:
        raise Misconfigured(
            f"{kind}: columns={columns!r}", 'columns={"field": "column"}, or a list of names'
        )
    if len(set(pairs.values())) < len(pairs):
        raise Misconfigured(
            f"{kind}: columns={pairs} fills one column from two fields",
            "name another column for one of them",
        )
    for column in pairs.values():
        require_name(column, "column")
    return pairs


def columns_of(
    fields: Iterable[str],
    there: Collection[str],
    columns: Mapping[str, str] | None,
    mode: WriteMode,
) -> dict[str, str]:
    """The column of each field. Fields that only steer the write need none."""
    names = list(fields)
    if columns is not None:
        return {name: column for name, column in columns.items() if name in names}
    steering = steering_fields(names, mode)
    return {name: name for name in names if name not in steering or name in there}


def steering_fields(fields: Iterable[str], mode: WriteMode) -> frozenset[str]:
    """Fields that decide which row wins or is a delete: written only where a column exists."""
    steering = set(mode.order_by)
    if mode.delete_when is not None:
        fold = str.lower if mode.folds_case else str
        named = {fold(name) for name in names_in(mode.delete_when, mode.quotes)}
        steering |= {name for name in fields if fold(name) in named}
    return frozenset(steering - set(mode.keys))


def names_in(condition: str, quotes: str) -> frozenset[str]:
    """
    The columns that a condition names: neither words within literals and comments, nor keywords,
    functions and types. `quotes` is what the database writes around a name.
    """
    tokens = [
        (found.lastgroup or "", found[0])
        for found in _tokens(quotes).finditer(condition)
        if found.lastgroup != "space"
    ]
    words = {text.upper() for kind, text in tokens if kind == "word"}
    keywords = _KEYWORDS if "CASE" in words else _KEYWORDS - {"END"}
    names = set()
    around = [("", ""), *tokens, ("", "")]
    for before, (kind, text), after in zip(around, around[1:], around[2:], strict=False):
        is_type = before[1] == "::" or before[1].upper() == "AS" or after[0] == "literal"
        if is_type or after[1] in {"(", "."}:
            continue
        if kind == "quoted":
            names.add(text[1:-1].replace(quotes * 2, quotes))
        elif kind == "word" and text.upper() not in keywords:
            names.add(text.lower())
    return frozenset(names)


_KEYWORDS = frozenset(
    {
        *("AND", "AS", "BETWEEN", "CASE", "CAST", "ELSE", "END", "FALSE", "FROM", "IN", "IS"),
        *("LIKE", "NOT", "NULL", "OR", "SELECT", "THEN", "TRUE", "WHEN", "WHERE"),
    }
)


@cache
def _tokens(quotes: str) -> re.Pattern[str]:
    """What conditions are made of; MySQL has its own quotes, and strings with backslashes."""
    is_mysql = quotes == "`"
    literals = (
        [r"'(?:\\.|''|[^'\\])*'", r'"(?:\\.|""|[^"\\])*"']
        if is_mysql
        else [r"[eE]'(?:\\.|''|[^'\\])*'", r"'(?:''|[^'])*'", r"\$(?P<tag>\w*)\$.*?\$(?P=tag)\$"]
    )
    comments = [r"--[^\n]*", r"/\*.*?\*/", *([r"\#[^\n]*"] if is_mysql else [])]
    kinds = {
        "space": "|".join([r"\s+", r"(?i:\bat\s+time\s+zone\b)", *comments]),
        "literal": "|".join(literals),
        "quoted": f"{quotes}(?:{quotes}{quotes}|[^{quotes}])*{quotes}",
        "word": r"[^\W\d][\w$]*",
        "other": r"::|.",
    }
    return re.compile("|".join(f"(?P<{kind}>{found})" for kind, found in kinds.items()), re.DOTALL)


def staged_fields(
    fields: Iterable[str], columns: Mapping[str, str] | None, mode: WriteMode
) -> tuple[str, ...]:
    """The fields that are sent: those that are written, and those that steer the write."""
    names = tuple(fields)
    if columns is None:
        return names
    steering = steering_fields(names, mode)
    return tuple(name for name in names if name in columns or name in steering)


def sent_fields(
    schema: pa.Schema,
    sink: TableSink,
    dialect: Dialect,
    sent_as: Callable[[pa.Field], S | str],
) -> dict[str, S]:
    """How each field of these rows travels, by its name; `Misconfigured` where one can't."""
    sent: dict[str, S] = {}
    problems = Problems()
    for field_ in schema:
        how = sent_as(field_)
        if isinstance(how, str):
            problems.add(
                f'field "{field_.name}": {how}', "cast it to another type, or leave it out: select="
            )
        else:
            name = dialect.names.require(field_.name, "field")
            sent[name.upper() if dialect.names.folds else name] = how

    def folded(names: Iterable[str]) -> set[str]:
        return {name.lower() for name in names} if sink.folds_case else set(names)

    ours = (*dialect.own_columns, *UNFIT, *map(order_copy, range(len(sink.write_mode.order_by))))
    if len(folded(schema.names)) < len(schema.names) or folded(ours) & folded(schema.names):
        problems.add(
            f"two fields have one name{' (in any case)' if sink.folds_case else ''}, or one has a "
            f"name that is taken ({', '.join(ours)}): {', '.join(schema.names)}",
            "rename it in select=",
        )
    if not sent and not problems.facts:
        problems.add("no field arrives: there is nothing to write", "name some in select=")
    problems.raise_if_any(sink.table)
    return {name: sent[name] for name in staged_fields(sent, sink.column_map, sink.write_mode)}


def columns_taking(
    fields: Collection[str], table: Table[C], sink: TableSink, problems: Problems
) -> dict[str, C]:
    """The column that takes each field; what is wrong by name goes to `problems`."""
    mode = sink.write_mode
    for name in (*(sink.column_map or ()), *mode.keys, *mode.order_by):
        if name not in fields:
            problems.add(f'no field "{name}" arrives', f"the fields are {', '.join(fields)}")
    taking: dict[str, C] = {}
    for name, wanted in columns_of(fields, table.columns, sink.column_map, mode).items():
        column = table.columns.get(wanted)
        if column is None:
            problems.add(*_missing(name, wanted, table.columns))
            continue
        if column.is_generated and not mode.only_compares(name):
            problems.add(
                f'column "{wanted}" is generated by the server',
                f'leave the field "{name}" out (select=, or columns=)',
            )
        taking[name] = column
    filled = {column.name for column in taking.values()}
    if mode.mode != "update":
        _require_filled(table, filled, problems)
    _require_marks(table, filled, mode, problems)
    if mode.newer is not None and mode.newer not in taking and not problems.facts:
        problems.add(
            f'newer="{mode.newer}" has no column: the table would not know how old a row is',
            "ALTER TABLE … ADD COLUMN, or evolve='add_columns' with columns=",
        )
    # A problem of its own where no other explains it.
    if not problems.facts and any(key not in taking for key in mode.keys):
        problems.add(
            f"keys {', '.join(mode.keys)} are not all written", "name them in columns= too"
        )
    return taking


def _require_filled(table: Table[C], filled: Collection[str], problems: Problems) -> None:
    for column in table.columns.values():
        if column.needs_value and column.name not in filled:
            problems.add(
                f'column "{column.name}" is NOT NULL without a default, and no field fills it',
                "add a field for it with select=, or give the column a default",
            )


def _require_marks(
    table: Table[C], filled: Collection[str], mode: WriteMode, problems: Problems
) -> None:
    """The columns of `delete_as`: a row that is written has their defaults."""
    for name in mode.delete_as:
        column = table.columns.get(name)
        if column is None:
            problems.add(f'delete_as: there is no column "{name}"', "ALTER TABLE … ADD COLUMN")
        elif name in filled:
            problems.add(
                f'delete_as: column "{name}" is also filled by a field',
                "leave the field out (select=, or columns=): deletes alone write this column",
            )
        elif column.needs_value:
            problems.add(
                f'delete_as: column "{name}" is NOT NULL without a default, which a row that is '
                "not deleted needs",
                "give the column a default",
            )


def no_order(field: str, column: str, type_: str) -> tuple[str, str]:
    """The fact and the way out, where a column orders values otherwise than their field."""
    return (
        f'newer="{field}": the column "{column}" is {type_}, which orders values otherwise than '
        "they arrive",
        "a column of the field's own type; for text one that compares bytes (COLLATE … _bin)",
    )


def no_key(keys: str, table: str, because: str = "") -> tuple[str, str]:
    """The fact and the way out, where no unique index says which row an upsert means."""
    because = because or "there is no primary key or unique index on exactly these columns"
    return (
        f"an upsert by {keys} can't tell which row is meant: {because}",
        f"ALTER TABLE {table} ADD PRIMARY KEY ({keys}), or mode='replace'",
    )


def _missing(name: str, column: str, there: Iterable[str]) -> tuple[str, str]:
    """The fact and the way out, where a column does not exist."""
    alike = [known for known in there if known.lower() == column.lower()]
    way_out = (
        f'columns={{"{name}": "{alike[0]}"}}: names are taken exactly as they are written'
        if alike
        else "ALTER TABLE … ADD COLUMN, evolve='add_columns', or leave the field out with select="
    )
    return f'there is no column "{column}"', way_out


AS_STRING = "give it as a string, which the server reads as the column's own type"
"""The hint for a value that only text becomes without loss."""


def way_to_cast(field: str, hint: str) -> str:
    """A hint for a type that does not fit, with the cast where it asks for one."""
    return f"{hint}: {cast_hint(field, 'string')}" if hint == AS_STRING else hint


def require_choice(kind: str, option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise Misconfigured(f"{kind}: {option}={value!r}", f"one of {', '.join(known)}")
