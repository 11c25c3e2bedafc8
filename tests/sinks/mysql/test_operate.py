"""The audit of a table, and what a dropped pipeline leaves in a database."""

from __future__ import annotations

import pytest

from epochal.kit.sink_base import Operable
from epochal.sinks.mysql.dialect import DIALECT
from epochal.terms import Uid

STRATEGIES = pytest.mark.parametrize("strategy", ["staged", "prepared"])
OTHER = Uid("zyxwvuts7654")


def ledger_uids(place):
    return {uid for (uid,) in place.sql(f"SELECT DISTINCT uid FROM {place.meta}.ledger")}


@STRATEGIES
def test_only_what_readers_see_is_counted(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.write(0, some(1, 2, 3), some(4))
    undecided = life.prepare(some(5, 6), 1)
    assert isinstance(life.committer, Operable)
    found = life.committer.recount()
    assert (found.rows, found.is_alone) == (4, False)
    life.committer.abort(1, [undecided])
    orders.sql(f"DELETE FROM {orders.schema}.orders WHERE id = 3")
    assert orders.keep(life.fresh()).committer.recount().rows == len(orders.rows()) == 3


def test_a_table_that_is_changed_in_place_or_not_there_is_not_counted(keyed, some):
    life = keyed.life(mode="upsert", keys=["id"])
    life.write(0, some(1, 2))
    found = life.committer.recount()
    assert found.rows is None
    assert "changes rows in place" in found.because
    absent = keyed.life("nowhere").committer.recount()
    assert absent.rows is None
    assert "there is no table" in absent.because


def dropped(life, *, is_dry_run):
    assert isinstance(life.committer, Operable)
    return list(life.committer.drop(is_dry_run=is_dry_run).removed)


@STRATEGIES
def test_a_dropped_sink_leaves_its_rows_and_no_ledger(orders, some, strategy):
    life = orders.life(strategy=strategy)
    neighbour = orders.keep(life.fresh(uid=OTHER))
    life.write(0, some(1, 2))
    neighbour.write(0, some(3))
    after = orders.keep(life.fresh(generation=2))
    shown = dropped(after, is_dry_run=True)
    # An epoch has two rows of its own, beside its tasks'.
    assert shown[0] == f"3 rows of {orders.meta}.ledger"
    assert shown[1:] == ([f"1 unused table of {orders.staging}"] if strategy == "staged" else [])
    assert ledger_uids(orders) == {life.uid, OTHER}
    assert dropped(after, is_dry_run=False) == shown
    assert ledger_uids(orders) == {OTHER}
    assert dropped(after, is_dry_run=False) == []
    assert [mark.uid for mark in after.committer.newest()] == [OTHER]
    assert [number for number, _ in orders.rows()] == [1, 2, 3]
    assert orders.leftovers() == []


def test_what_never_wrote_a_ledger_has_nothing_to_forget(place):
    assert dropped(place.life(), is_dry_run=False) == []


@pytest.mark.products("mariadb", "mysql")
def test_a_server_that_is_another_or_lost_a_part_of_its_history_is_noticed(place):
    committer = place.life().committer
    known = committer.server()
    assert set(known) >= {"server", "position"}
    assert committer.server_change(known) == ""
    other = {**known, "server": "another"}
    assert "another server answers" in committer.server_change(other)
    ahead = {**known, "position": known["position"] + 10**12}
    assert "its files were put back" in committer.server_change(ahead)


@pytest.mark.products("mysql")
@pytest.mark.parametrize(
    ("before", "now", "are_missing"),
    [
        ("0-1-7,1-2-3", "0-9-8,1-2-3", False),
        ("0-1-7,1-2-3", "0-9-8", True),
        ("0-1-7", "0-1-6", True),
        ("3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5", "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-9", 0),
        ("3e11fa47-71ca-11e1-9e33-c80aa9429562:1-5", "3e11fa47-71ca-11e1-9e33-c80aa9429562:1-4", 1),
    ],
)
def test_transactions_of_the_last_start_that_are_gone_are_found(place, before, now, are_missing):
    assert DIALECT.are_missing(place.sql, before, now) == are_missing
