"""What the modes for change streams mean on every database, judged against row-by-row SQL.

A module of tests for each database imports these, beside its own fixtures `place` and `some`.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pytest

from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.memory import Memory

EPOCHS = 6
OTHERS = 3
"""The epoch that another driver commits."""
TASKS = 2
ROWS = 8
KEYS = 5


@dataclass(frozen=True)
class Change:
    id: int
    name: str
    version: int | None
    op: str


def table_of(rows: Sequence[Change]) -> pa.Table:
    return pa.table(
        {
            "id": pa.array([row.id for row in rows], pa.int64()),
            "name": pa.array([row.name for row in rows], pa.string()),
            "version": pa.array([row.version for row in rows], pa.int64()),
            "op": pa.array([row.op for row in rows], pa.string()),
        }
    )


def rows_of(*rows: tuple) -> pa.Table:
    return table_of([Change(*row) for row in rows])


def make(place: Any, table: str = "orders") -> None:
    place.sql(
        f"CREATE TABLE {place.schema}.{table} (id bigint PRIMARY KEY, name varchar(99),"
        " version bigint, gone varchar(9) DEFAULT 'no')"
    )


def epochs(seed: int) -> list[list[list[Change]]]:
    """Every version once, in any order: some arrive an epoch or more too late."""
    chance = random.Random(seed)
    versions = list(range(EPOCHS * TASKS * ROWS))
    for at in range(len(versions)):
        other = min(len(versions) - 1, at + chance.randrange(2 * TASKS * ROWS))
        versions[at], versions[other] = versions[other], versions[at]

    def change() -> Change:
        version = versions.pop()
        op = chance.choice("uuud")
        return Change(chance.randint(1, KEYS), f"n{version}", version, op)

    return [[[change() for _ in range(ROWS)] for _ in range(TASKS)] for _ in range(EPOCHS)]


class RowByRow:
    """The same by simple statements, one row after the other."""

    def __init__(self, place: Any, options: dict[str, Any]) -> None:
        self.place = place
        self.table = f"{place.schema}.expected"
        self.options = options
        self.buried: dict[int, int] = {}
        make(place, "expected")

    def apply(self, rows: Iterable[Change]) -> None:
        is_first = self.options["mode"] == "insert_new"
        winners: dict[int, Change] = {}
        for row in sorted(rows, key=lambda row: row.version, reverse=is_first):
            winners[row.id] = row
        for row in winners.values():
            self._apply(row)

    def _apply(self, row: Change) -> None:
        found = self.place.sql(f"SELECT version FROM {self.table} WHERE id = {row.id}")
        if found and "newer" in self.options and found[0][0] >= row.version:
            return
        if row.op == "d" and "delete_when" in self.options:
            self._delete(row)
            return
        if self._is_buried(row):
            return
        self.buried.pop(row.id, None)
        if found and self.options["mode"] != "insert_new":
            self._run(
                f"UPDATE {self.table} SET name = '{row.name}', version = {row.version},"
                f" gone = 'no' WHERE id = {row.id}"
            )
        elif not found and self.options["mode"] != "update":
            self._run(
                f"INSERT INTO {self.table} (id, name, version)"
                f" VALUES ({row.id}, '{row.name}', {row.version})"
            )

    def _delete(self, row: Change) -> None:
        if "tombstones" in self.options:
            self.buried[row.id] = max(row.version, self.buried.get(row.id, row.version))
        if "delete_as" not in self.options:
            self._run(f"DELETE FROM {self.table} WHERE id = {row.id}")
            return
        version = f", version = {row.version}" if "newer" in self.options else ""
        self._run(f"UPDATE {self.table} SET gone = 'yes'{version} WHERE id = {row.id}")

    def _is_buried(self, row: Change) -> bool:
        return self.buried.get(row.id, -1) >= row.version

    def _run(self, statement: str) -> None:
        self.place.sql(statement)


COLUMNS = ["id", "name", "version"]
NEWER: dict[str, Any] = {"mode": "upsert", "keys": "id", "newer": "version"}
DELETES: dict[str, Any] = {"delete_when": "op = 'd'"}
SOFT: dict[str, Any] = {**DELETES, "delete_as": {"gone": "'yes'"}}
UPDATE: dict[str, Any] = {"mode": "update", "keys": "id"}
MODES: dict[str, dict[str, Any]] = {
    "newer": NEWER,
    "newer, deletes": {**NEWER, **DELETES},
    "newer, soft deletes": {**NEWER, **SOFT},
    "newer, tombstones": {**NEWER, **DELETES, "tombstones": "{schema}.buried"},
    "newer, soft deletes, tombstones": {**NEWER, **SOFT, "tombstones": "{schema}.buried"},
    "newer, unchanged": {**NEWER, "skip_unchanged": True},
    "soft deletes": {"mode": "upsert", "keys": "id", "order_by": "version", **SOFT},
    "insert_new": {"mode": "insert_new", "keys": "id", "order_by": "version"},
    "update": {**UPDATE, "order_by": "version"},
    "update, newer, deletes": {**UPDATE, "newer": "version", **DELETES},
    "update, newer, soft deletes": {**UPDATE, "newer": "version", **SOFT},
    "update, unchanged": {**UPDATE, "order_by": "version", "skip_unchanged": True},
}


def options_of(place: Any, name: str) -> dict[str, Any]:
    options = dict(MODES[name])
    if "delete_when" not in options:
        options["columns"] = COLUMNS
    if "tombstones" in options:
        options["tombstones"] = options["tombstones"].format(schema=place.schema)
    return options


@pytest.mark.parametrize("name", MODES)
def test_a_change_stream_leaves_what_row_by_row_sql_leaves(place, name):
    judge_stream(place, name)


def write_by_two(place: Any, life: Any, epoch: int, *tasks: pa.Table) -> Any:
    """One driver rehearses and dies; the next one carries the decision out, and then again."""
    receipts = [life.prepare(rows, epoch, number) for number, rows in enumerate(tasks)]
    life.rehearse(epoch, receipts)
    life.close()
    other = place.keep(life.fresh(generation=2))
    for _ in range(2):
        other.commit(epoch, receipts)
    return other


def judge_stream(place: Any, name: str) -> None:
    make(place)
    options = options_of(place, name)
    expected = RowByRow(place, options)
    for table in ("orders", "expected"):
        place.sql(
            f"INSERT INTO {place.schema}.{table} (id, name, version) VALUES (1, 'old', 5),"
            " (2, 'old', 40), (99, 'other', 1)"
        )
    life = place.life(**options)
    for epoch, tasks in enumerate(epochs(seed=7)):
        if epoch == OTHERS:
            life = write_by_two(place, life, epoch, *map(table_of, tasks))
        else:
            life.write(epoch, *map(table_of, tasks))
        expected.apply(row for rows in tasks for row in rows)
        assert place.rows("orders") == place.rows("expected"), f"epoch {epoch}"
        if "tombstones" in options:
            assert dict(place.rows("buried", "id, version")) == expected.buried
    assert place.leftovers() == []


def test_the_judge_objects_where_older_rows_are_written(place):
    """Upserts without `newer`: what arrives too late wins."""
    make(place)
    expected = RowByRow(place, NEWER)
    life = place.life(mode="upsert", keys="id", order_by="version", columns=COLUMNS)
    for epoch, tasks in enumerate(epochs(seed=7)):
        life.write(epoch, *map(table_of, tasks))
        expected.apply(row for rows in tasks for row in rows)
    assert place.rows("orders") != place.rows("expected")


def test_a_null_version_is_older_than_any_other(place):
    make(place)
    place.sql(f"INSERT INTO {place.schema}.orders (id, name) VALUES (1, 'a'), (2, 'b')")
    life = place.life(**NEWER, **DELETES)
    life.write(0, rows_of((1, "null", None, "u"), (2, "one", 1, "u"), (3, "new", None, "u")))
    assert place.rows(columns="id, name") == [(1, "a"), (2, "one"), (3, "new")]
    life.write(1, rows_of((2, "null", None, "u"), (1, "", None, "d"), (3, "", 1, "d")))
    assert place.rows(columns="id, name") == [(1, "a"), (2, "one")]


def test_a_late_row_brings_no_deleted_one_back(place):
    make(place)
    life = place.life(**NEWER, **DELETES, tombstones=f"{place.schema}.buried")
    life.write(0, rows_of((1, "a", 1, "u"), (2, "never seen", 9, "d")))
    life.write(1, rows_of((1, "", 5, "d")))
    life.write(2, rows_of((1, "late", 4, "u"), (2, "late", 8, "u")))
    assert place.rows(columns="id") == []
    life.write(3, rows_of((1, "later", 6, "u")))
    assert place.rows(columns="id, name") == [(1, "later")]
    assert place.rows("buried", "id, version") == [(2, 9)]


def test_a_row_that_comes_back_is_not_deleted_any_more(place):
    make(place)
    life = place.life(**NEWER, **SOFT)
    life.write(0, rows_of((1, "a", 1, "u")))
    life.write(1, rows_of((1, "", 2, "d")))
    assert place.rows() == [(1, "a", 2, "yes")]
    life.write(2, rows_of((1, "again", 3, "u")))
    assert place.rows() == [(1, "again", 3, "no")]


def test_keys_that_are_left_out_are_counted(place):
    make(place)
    place.sql(f"INSERT INTO {place.schema}.orders (id, name) VALUES (1, 'first')")
    life = place.life(mode="insert_new", keys="id", name="new", columns=["id", "name"])
    life.write(0, rows_of((1, "second", 1, "u"), (2, "two", 1, "u")))
    assert (place.rows(columns="id, name"), life.committer.left_out) == (
        [(1, "first"), (2, "two")],
        1,
    )
    life = place.life(**UPDATE, name="update", columns=["id", "name"])
    life.write(0, rows_of((1, "changed", 1, "u"), (3, "missed", 1, "u"), (4, "missed", 1, "u")))
    assert (place.rows(columns="id, name"), life.committer.left_out) == (
        [(1, "changed"), (2, "two")],
        2,
    )


def test_updates_that_miss_may_be_refused_or_go_elsewhere(place):
    make(place)
    place.sql(f"INSERT INTO {place.schema}.orders (id, name) VALUES (1, 'first')")
    rows = rows_of((1, "changed", 1, "u"), (3, "missed", 1, "u"), (4, "", 1, "d"))
    strict = {**UPDATE, **DELETES, "on_miss": "reject", "columns": ["id", "name"]}
    with pytest.raises(RowRejected, match=r"(?i)1 row whose key \(id\) is not in the table"):
        place.life(**strict, name="fails").write(0, rows)
    assert place.rows(columns="id, name") == [(1, "first")]
    life = place.life(**strict, name="sends", on_reject=Memory(name="missed"))
    life.write(0, rows)
    (rejected,) = life.committer.rejected(0).to_pylist()
    assert '"missed"' in rejected["row"]
    assert place.rows(columns="id, name") == [(1, "changed")]


def test_complete_replaces_all_rows_also_by_none(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(99))")
    place.sql(f"INSERT INTO {place.schema}.orders VALUES (9, 'old')")
    life = place.life(mode="complete")
    assert life.sink.output_modes == {"complete"}
    life.write(0, some(1, 2), some(3))
    assert place.rows(columns="id") == [(1,), (2,), (3,)]
    life.write(1, some(2, name="again"), some())
    assert place.rows() == [(2, "again2")]
    with pytest.raises(RowRejected, match=r'"id": ?7'):
        life.write(2, some(7, 8), some(7))
    assert place.rows() == [(2, "again2")]
    life.write(2, some(), some())
    assert place.rows() == []


def test_rows_that_others_refer_to_stop_a_complete_epoch_with_that_reason(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(99))")
    place.sql(f"INSERT INTO {place.schema}.orders VALUES (1, 'a')")
    place.sql(
        f"CREATE TABLE {place.schema}.items (order_id bigint,"
        f" FOREIGN KEY (order_id) REFERENCES {place.schema}.orders (id))"
    )
    place.sql(f"INSERT INTO {place.schema}.items VALUES (1)")
    with pytest.raises(RowRejected, match="foreign key") as raised:
        place.life(mode="complete").write(0, some(1, 2))
    assert '"id"' not in raised.value.message
    assert place.rows() == [(1, "a")]


def test_a_table_is_made_with_the_types_and_options_that_are_declared(place, some):
    life = place.life(
        mode="upsert",
        keys="id",
        create_table="if_missing",
        types={"name": "varchar(3) NOT NULL"},
        table_options=place.hashed,
    )
    life.write(0, some(1, 2))
    assert place.rows() == [(1, "n1"), (2, "n2")]
    with pytest.raises(RowRejected):
        life.write(1, some(3, name="too long"))
    with pytest.raises(Misconfigured, match="create_table='never'"):
        place.sink(table_options=place.hashed)


def test_what_the_table_lacks_for_a_mode_is_reported_with_the_way_out(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(99),"
        " must varchar(9) NOT NULL)"
    )
    rows = rows_of((1, "a", 1, "u"))
    with pytest.raises(Misconfigured, match='newer="version" has no column'):
        place.life(**UPDATE, newer="version", columns=["id", "name"], name="a").start(rows)
    for column, fact in {
        "nowhere": 'there is no column "nowhere"',
        "must": '"must" is NOT NULL without a default',
        "name": '"name" is also filled by a field',
    }.items():
        life = place.life(**UPDATE, delete_when="op = 'd'", delete_as={column: "1"}, name=column)
        with pytest.raises(Misconfigured, match=f"delete_as: .*{fact}"):
            life.start(rows)
    place.sql(f"ALTER TABLE {place.schema}.orders ADD COLUMN version varchar(9)")
    with pytest.raises(Misconfigured, match=r"orders values otherwise|can't become"):
        place.life(**UPDATE, newer="version", columns=COLUMNS, name="b").start(rows)
