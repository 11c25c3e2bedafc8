"""Sinks on one server in one transaction, and refused rows on their way to another sink.

`parent` is declared before `child`, whose rows refer to it; each sends what its table refuses to a
sink of its own, one on the same server and one in a folder.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
from kit.sql.refused_rows import *  # noqa: F403  every test there is one of this module, too
from kit.sql.refused_rows import QUICK, Dies, Family, rows, session, write

from epochal.coordinator import read_state
from epochal.errors import Misconfigured, RowRejected, Unsettled
from epochal.logs.memory import MemoryLog
from epochal.sinks.postgres.committer import StagedCommitter

GOOD = "00000000-0000-0000-0000-000000000000"


class ParentAndChild(Family):
    good = GOOD
    bad = "bad"
    whole = {  # noqa: RUF012  nobody changes it
        "parent": [1, 2],
        "child": [1],
        "bad parents": ['{"id":13}'],
        "bad children": [f'{{"id":13,"name":"{GOOD}"}}', '{"id":2,"name":"bad"}'],
    }
    committer = StagedCommitter

    def make_tables(self) -> None:
        place, number = self.place, self.number
        self.parent, self.child, self.refused = (
            f"parent{number}",
            f"child{number}",
            f"bad_parents{number}",
        )
        place.sql(
            f"CREATE TABLE {place.schema}.{self.parent} (id bigint PRIMARY KEY CHECK (id <> 13))"
        )
        place.sql(
            f"CREATE TABLE {place.schema}.{self.child} (parent bigint REFERENCES"
            f" {place.schema}.{self.parent}, name uuid)"
        )

    def sinks(self) -> Sequence[Any]:
        sink = self.place.sink
        bad_parents = sink(
            self.refused, name=f"bad parents{self.run}", create_table="if_missing", pool_min=0
        )
        return [
            sink(
                self.parent,
                name=f"parent{self.run}",
                columns=["id"],
                on_reject=bad_parents,
                pool_min=0,
            ),
            sink(
                self.child,
                name=f"child{self.run}",
                columns={"id": "parent", "name": "name"},
                on_reject=self.taker("bad children"),
                pool_min=0,
            ),
        ]

    def shows(self) -> Sequence[Callable[[], list[Any]]]:
        return self.parents, self.children, self.bad_parents, self.in_folder

    def parents(self) -> list[int]:
        return [number for (number,) in self.place.rows(self.parent)]

    def children(self) -> list[int]:
        return [number for (number, _) in self.place.rows(self.child)]

    def bad_parents(self) -> list[str]:
        place = self.place
        if place.sql(f"SELECT to_regclass('{place.schema}.{self.refused}')") == [(None,)]:
            return []
        return [row for (row,) in place.rows(self.refused, '"row"')]

    def cut_open_transactions(self) -> None:
        self.place.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE state = 'idle in transaction'"
        )

    def drop_staging_of_the_first(self) -> None:
        meta = self.place.meta
        ((staged,),) = self.place.sql(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            f" WHERE n.nspname = '{meta}' AND c.relkind = 'r' AND c.relname <> 'ledger'"
            " AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid"
            " AND a.attname = 'id')"
        )
        self.place.sql(f"DROP TABLE {meta}.{staged}")

    def let_the_first_take_all(self) -> None:
        table = f"{self.place.schema}.{self.parent}"
        self.place.sql(f"ALTER TABLE {table} DROP CONSTRAINT {self.parent}_id_check")


@pytest.fixture
def families(place, tmp_path) -> Callable[[int], Family]:
    return lambda number: ParentAndChild(place, tmp_path, number)


# Together


def test_rows_that_refer_to_each_other_arrive_in_one_transaction(family):
    with session(family, MemoryLog()) as opened:
        write(opened, rows((1, GOOD), (2, GOOD)))
    stamps = {
        stamp
        for table in (family.parent, family.child)
        for (stamp,) in family.place.sql(f"SELECT xmin::text FROM {family.place.schema}.{table}")
    }
    assert (family.parents(), family.children(), len(stamps)) == ([1, 2], [1, 2], 1)
    assert family.place.leftovers() == []


def test_a_refused_child_takes_its_parents_with_it_and_is_named(family):
    sinks = [replace(sink, on_reject="fail") for sink in family.sinks()]
    with session(family, MemoryLog(), sinks=sinks) as opened:
        with pytest.raises(RowRejected, match=r'child\d? refuses partition 0, row \{"id":2,'):
            write(opened, rows((1, GOOD), (2, "bad")))
        assert (family.parents(), family.children()) == ([], [])
        write(opened, rows((1, GOOD)))
    assert (family.parents(), family.children()) == ([1], [1])
    assert family.place.leftovers() == []


def test_a_sink_added_later_shares_from_its_first_epoch_on(family):
    log = MemoryLog()
    parent, child = family.sinks()
    with session(family, log, sinks=[parent]) as opened:
        write(opened, rows((1, GOOD)))
    with session(family, log, sinks=[parent, child]) as opened:
        write(opened, rows((2, GOOD)))
    assert (family.parents(), family.children()) == ([1, 2], [2])


def test_a_decision_from_before_a_sink_was_added_is_carried_out_without_it(family):
    log = MemoryLog()
    parent, child = family.sinks()
    with pytest.raises(Dies), session(family, log, sinks=[parent], dies_at="decided") as opened:
        write(opened, rows((1, GOOD)))
    with session(family, log, sinks=[parent, child]) as opened:
        assert (family.parents(), family.children()) == ([1], [])
        write(opened, rows((2, GOOD)))
    assert (family.parents(), family.children()) == ([1, 2], [2])


def test_what_one_sink_committed_alone_in_an_earlier_release_is_not_applied_again(family):
    log = MemoryLog()
    with pytest.raises(Dies), session(family, log, dies_at="decided") as opened:
        write(opened, rows((1, GOOD)))
    decision = read_state(log).unsettled
    parent = family.sinks()[0]
    who = opened._coordinator.identity(parent.name)
    alone = parent.committer(who, QUICK)
    alone.commit(decision.epoch, decision.receipts["parent"])
    alone.close()
    assert (family.parents(), family.children()) == ([1], [])
    session(family, log).close()
    assert (family.parents(), family.children()) == ([1], [1])


def test_rows_of_one_that_are_lost_keep_the_others_waiting(family):
    log = MemoryLog()
    with pytest.raises(Dies), session(family, log, dies_at="decided") as opened:
        write(opened, rows((1, GOOD)))
    place = family.place
    (child,) = [str(r.handle) for r in read_state(log).unsettled.receipts["child"]]
    staged = [
        name
        for name in place.leftovers()
        if place.sql(f"SELECT obj_description('{place.meta}.{name}'::regclass) LIKE '{child},%'")
        == [(True,)]
    ]
    place.sql(f"DROP TABLE {place.meta}.{staged[0]}")
    with pytest.raises(Unsettled, match="child threw its prepared"):
        session(family, log).begin(0)
    assert read_state(log).done >= {"bad children", "bad parents"}
    assert "parent" not in read_state(log).done
    assert (family.parents(), family.children()) == ([], [])


# Refused rows


def test_refused_rows_are_told_with_their_reasons(family):
    with session(family, MemoryLog()) as opened:
        write(opened, *family.mixed)
    ((sink, epoch, sqlstate, reason),) = family.place.sql(
        f"SELECT sink, epoch, sqlstate, reason FROM {family.place.schema}.{family.refused}"
    )
    assert (sink, epoch, sqlstate) == ("parent", 0, "23514")
    assert "violates check constraint" in reason


def test_a_sink_for_refused_rows_takes_all_of_them_or_is_refused_itself(family):
    parent, child = family.sinks()
    for taker, why in [
        (replace(child, on_reject="fail", where="id > 1"), "where="),
        (child, "would refuse"),
        (replace(parent, on_reject="fail", table=family.child), "two sinks share"),
    ]:
        with pytest.raises(Misconfigured, match=why):
            session(family, MemoryLog(), sinks=[replace(parent, on_reject=taker)])
    taker = replace(child, name="wrong table", on_reject="fail", columns=None)
    with pytest.raises(Misconfigured, match="no column"):
        session(family, MemoryLog(), sinks=[replace(parent, on_reject=taker)])
