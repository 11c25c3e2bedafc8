"""Sinks on one MariaDB server in one transaction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest
from kit.sql.refused_rows import Family, rows, session, write
from kit.sql.shared_transactions import *  # noqa: F403  every test there is one of this module, too
from kit.sql.shared_transactions import ParentAndChild
from sinks.life import Life

from epochal.logs import MemoryLog
from epochal.terms import EpochNumber

pytestmark = pytest.mark.products("mariadb", "mysql")


class OnMariaDB(ParentAndChild):
    good = "ok"
    bad = "too long"
    refused_child = r"child\d?, epoch 0, partition 0, row 1 \{.id.: 2,"
    whole = {  # noqa: RUF012  nobody changes it
        "parent": [1, 2],
        "child": [1],
        "bad parents": ['{"id": 13}'],
        "bad children": ['{"id": 13, "name": "ok"}', '{"id": 2, "name": "too long"}'],
    }

    def make_tables(self) -> None:
        schema = self.place.schema
        self.place.sql(
            f"CREATE TABLE {schema}.{self.parent} (id bigint PRIMARY KEY, CHECK (id <> 13))"
        )
        self.place.sql(
            f"CREATE TABLE {schema}.{self.child} (parent bigint, name varchar(3),"
            f" FOREIGN KEY (parent) REFERENCES {schema}.{self.parent} (id))"
        )

    def bad_parents(self) -> list[str]:
        place = self.place
        there = place.sql(f"SHOW TABLES FROM {place.schema} LIKE '{self.refused}'")
        return [row for (row,) in place.rows(self.refused, "`row`")] if there else []

    def cut_open_transactions(self) -> None:
        raise NotImplementedError

    def drop_staging_of_the_first(self) -> None:
        raise NotImplementedError

    def let_the_first_take_all(self) -> None:
        raise NotImplementedError


@pytest.fixture
def families(place, tmp_path) -> Callable[[int], Family]:
    return lambda number: OnMariaDB(place, tmp_path, number)


def test_refused_rows_of_both_arrive_elsewhere(family):
    with session(family, MemoryLog()) as opened:
        write(opened, *family.mixed)
    assert family.seen() == family.whole
    assert family.place.leftovers() == []


def test_a_driver_of_fewer_sinks_ends_the_transaction_that_a_dead_one_left_open(family):
    """The dead driver's session holds a lock per sink: it is found by the one that is left."""
    sinks = [replace(sink, on_reject="fail") for sink in family.sinks()]
    lives = [family.place.keep(Life(sink=sink)) for sink in sinks]
    table = pa.Table.from_batches([rows((1, family.good))])
    for life in lives:
        life.start(table)
    receipts = {life.sink.name: [life.prepare(table, 0)] for life in lives}
    shared = lives[0].committer.share([life.committer for life in lives])
    shared.rehearse(EpochNumber(0), receipts)
    family.place.sql(f"INSERT INTO {family.place.schema}.{family.parent} VALUES (2)")
    child = family.place.keep(lives[1].fresh(generation=2))
    child.start(table)
    later = pa.table({"id": [2], "name": [family.good]})
    child.write(0, later)
    assert (family.parents(), family.children()) == ([2], [2])
