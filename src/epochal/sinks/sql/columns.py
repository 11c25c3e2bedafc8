"""Which field is meant for which column, by name alone. Types are each database's own affair."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from epochal.errors import Misconfigured
from epochal.sinks.sql.modes import WriteMode


@dataclass(slots=True)
class Problems:
    """All that is wrong is told at once, each with its way out."""

    facts: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def add(self, fact: str, hint: str) -> None:
        self.facts.append(fact)
        if hint not in self.hints:
            self.hints.append(hint)

    def raise_if_any(self, where: str) -> None:
        if self.facts:
            raise Misconfigured(f"{where}: " + "; ".join(self.facts), "; ".join(self.hints))


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
    """Which column each field is meant for. What only steers the write needs none."""
    names = list(fields)
    if columns is not None:
        return {name: column for name, column in columns.items() if name in names}
    steering = steering_fields(names, mode)
    return {name: name for name in names if name not in steering or name in there}


def steering_fields(fields: Iterable[str], mode: WriteMode) -> frozenset[str]:
    """Fields that say which row wins or which is a delete: written only where a column is there."""
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
    """What must travel: the fields that are written, and those that steer the write."""
    names = tuple(fields)
    if columns is None:
        return names
    steering = steering_fields(names, mode)
    return tuple(name for name in names if name in columns or name in steering)


def created_columns(
    fields: Iterable[str], columns: Mapping[str, str] | None, mode: WriteMode
) -> dict[str, str]:
    """Fields that a table of our making gets a column for, and its name."""
    names = list(fields)
    if columns is not None:
        return {name: column for name, column in columns.items() if name in names}
    only_steers = steering_fields(names, mode) if mode.delete_when else ()
    return {name: name for name in names if name not in only_steers or name in mode.order_by}


def missing_columns(
    fields: Iterable[str],
    there: Collection[str],
    columns: Mapping[str, str] | None,
    mode: WriteMode,
) -> dict[str, str]:
    """Fields, by name, whose column the table does not have."""
    wanted = columns_of(fields, there, columns, mode)
    return {name: column for name, column in wanted.items() if column not in there}


def require_arriving(
    fields: Collection[str], columns: Mapping[str, str] | None, mode: WriteMode, problems: Problems
) -> None:
    """Every field that an option names must arrive."""
    for name in (*(columns or ()), *mode.keys, *mode.order_by):
        if name not in fields:
            problems.add(f'no field "{name}" arrives', f"the fields are {', '.join(fields)}")


def missing_column(name: str, column: str, there: Iterable[str]) -> tuple[str, str]:
    """The fact and the way out, where a column is not there."""
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
