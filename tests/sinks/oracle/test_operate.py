"""The audit of a table, and what a dropped pipeline leaves, on H2 behind a stand-in."""

from __future__ import annotations

import pytest

STRATEGIES = pytest.mark.parametrize("strategy", ["staged", "prepared"])


@STRATEGIES
def test_only_what_readers_see_is_counted(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.write(0, some(1, 2, 3))
    undecided = life.prepare(some(5, 6), 1)
    assert life.committer.recount().rows == len(orders.rows()) == 3
    life.committer.abort(1, [undecided])


def test_a_table_that_is_changed_in_place_is_not_counted(orders):
    found = orders.life(mode="upsert", keys=["id"]).committer.recount()
    assert found.rows is None
    assert "changes rows in place" in found.because


@STRATEGIES
def test_a_dropped_sink_leaves_its_rows_and_no_ledger(orders, some, strategy):
    life = orders.life(strategy=strategy)
    life.write(0, some(1, 2))
    committer = life.committer
    shown = committer.drop(is_dry_run=True)
    assert len(committer.newest()) == 1
    assert committer.drop(is_dry_run=False) == shown
    assert list(committer.newest()) == []
    assert committer.drop(is_dry_run=False).removed == []
    assert [number for number, _ in orders.rows()] == [1, 2]
    assert orders.leftovers() == []
