"""Random epochs with keys and values of many column types, against the same rows one by one.

The reference inserts each row into a table of one row, so that every value is what the column keeps
of it, and then deletes and inserts by what that table holds. `check_epochs` is called by a test of
each database, with its own columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

BOUNDED = settings(
    max_examples=15,
    deadline=None,
    print_blob=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
"""Some seconds; a failure prints what replays it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A column, what arrives for it, and some values that it keeps as few others."""

    ddl: str
    arrow: pa.DataType
    literal: Callable[[Any], str]
    """The value in SQL, of the type in which it arrives."""
    values: Sequence[Any]

    def __repr__(self) -> str:
        return f"{self.arrow} -> {self.ddl}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Epochs:
    """A table, and epochs of tasks of rows: key, value, order, whether it is a delete."""

    mode: str
    key: Column
    value: Column
    epochs: Sequence[Sequence[Sequence[tuple[Any, Any, int, bool]]]]


def epochs(keys: Sequence[Column], values: Sequence[Column]) -> st.SearchStrategy[Epochs]:
    return st.sampled_from(keys).flatmap(
        lambda key: st.sampled_from(values).flatmap(lambda value: _epochs(key, value))
    )


def _epochs(key: Column, value: Column) -> st.SearchStrategy[Epochs]:
    row = st.tuples(
        st.sampled_from(key.values),
        st.none() | st.sampled_from(value.values),
        st.booleans(),
    )
    tasks = st.lists(st.lists(row, min_size=1, max_size=4), min_size=1, max_size=2)

    def numbered(drawn: list[list[tuple[Any, Any, bool]]], order: Sequence[int]) -> list[list[Any]]:
        numbers = iter(order)
        return [[(k, v, next(numbers), gone) for k, v, gone in task] for task in drawn]

    one = st.builds(numbered, tasks, st.permutations(range(8)))
    return st.builds(
        lambda mode, all_: Epochs(mode=mode, key=key, value=value, epochs=all_),
        st.sampled_from(["upsert", "replace"]),
        st.lists(one, min_size=1, max_size=3),
    )


def check_epochs(place: Any, given: Epochs, number: int, same: str) -> None:
    """`same` compares two values, nulls included, of `{0}` and `{1}`."""
    key, value = given.key, given.value
    tables = {name: f"{place.schema}.{name}{number}" for name in ("orders", "wanted", "row_")}
    for name, table in tables.items():
        unique = "" if name == "row_" else " PRIMARY KEY"
        place.sql(f"CREATE TABLE {table} (id {key.ddl}{unique}, v {value.ddl})")
    life = place.life(
        f"orders{number}", mode=given.mode, keys="id", order_by="n", delete_when="gone = 1"
    )
    try:
        for epoch, tasks in enumerate(given.epochs):
            life.write(epoch, *(_rows(given, task) for task in tasks))
            for row in sorted((row for task in tasks for row in task), key=lambda row: row[2]):
                _one_by_one(place, given, tables, row)
            assert _differing(place, tables, same) == [], given
    finally:
        life.close()


def _rows(given: Epochs, task: Sequence[tuple[Any, Any, int, bool]]) -> pa.Table:
    keys, values, order, gone = zip(*task, strict=True)
    return pa.table(
        {
            "id": pa.array(keys, given.key.arrow),
            "v": pa.array(values, given.value.arrow),
            "n": pa.array(order, pa.int32()),
            "gone": pa.array(map(int, gone), pa.int32()),
        }
    )


def _one_by_one(
    place: Any, given: Epochs, tables: Mapping[str, str], row: tuple[Any, Any, int, bool]
) -> None:
    key, value, _, gone = row
    literal = "NULL" if value is None else given.value.literal(value)
    place.sql(f"DELETE FROM {tables['row_']}")
    place.sql(f"INSERT INTO {tables['row_']} VALUES ({given.key.literal(key)}, {literal})")
    place.sql(f"DELETE FROM {tables['wanted']} WHERE id = (SELECT id FROM {tables['row_']})")
    if not gone:
        place.sql(f"INSERT INTO {tables['wanted']} SELECT * FROM {tables['row_']}")


def _differing(place: Any, tables: Mapping[str, str], same: str) -> list[tuple[Any, ...]]:
    """Rows of either table that the other has not: keys that are equal may be written apart."""
    one, other = tables["orders"], tables["wanted"]
    return [
        row
        for left, right in ((one, other), (other, one))
        for row in place.sql(
            f"SELECT '{left}', l.* FROM {left} l WHERE NOT EXISTS"
            f" (SELECT 1 FROM {right} r WHERE r.id = l.id AND {same.format('r.v', 'l.v')})"
        )
    ]
