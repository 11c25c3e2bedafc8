"""Columns of a table, and the mapping of fields to them by name; types are each database's own."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from epochal.errors import Misconfigured, Problems
from epochal.kit.sql.dialect import UNFIT, Dialect
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
        raise Misconfigured(f"{kind}: columns={pairs} fills one column from two fields")
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
    steering = {name for name in mode.order_by if name not in mode.keys}
    if mode.delete_when is not None:
        steering |= {
            name
            for name in fields
            if name not in mode.keys
            and re.search(
                rf"(?<!\w){re.escape(name)}(?!\w)",
                mode.delete_when,
                re.IGNORECASE if mode.folds_case else re.NOFLAG,
            )
        }
    return frozenset(steering)


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

    ours = (*dialect.own_columns, *UNFIT)
    if len(folded(schema.names)) < len(schema.names) or folded(ours) & folded(schema.names):
        problems.add(
            f"two fields have one name{' (in any case)' if sink.folds_case else ''}, or one has a "
            f"name of ours ({', '.join(ours)}): {', '.join(schema.names)}",
            "rename it in select=",
        )
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
        if column.is_generated:
            problems.add(
                f'column "{wanted}" is generated by the server',
                f'leave the field "{name}" out (select=, or columns=)',
            )
        taking[name] = column
    _require_filled(table, {column.name for column in taking.values()}, problems)
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


def require_choice(kind: str, option: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise Misconfigured(f"{kind}: {option}={value!r}", f"one of {', '.join(known)}")
