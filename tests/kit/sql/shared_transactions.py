"""Sinks on one server in one transaction.

`parent` is declared before `child`, whose rows refer to it; each sends what its table refuses to a
sink of its own, one on the same server and one in a folder. A module of tests for each database
imports these, beside a fixture `families` that makes its own `ParentAndChild`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
from kit.sql.refused_rows import QUICK, Dies, Family, rows, session, write

from epochal.coordinator import read_state
from epochal.errors import RowRejected
from epochal.kit.sql.staged import StagedSqlCommitter
from epochal.logs import MemoryLog


@pytest.fixture
def family(families) -> Family:
    return families(1)


class ParentAndChild(Family):
    """The child's column `parent` is a foreign key."""

    committer = StagedSqlCommitter
    refused_child: ClassVar[str]
    """The error for a child whose name is bad."""

    def __init__(self, place: Any, folder: Any, number: int = 1) -> None:
        self.parent, self.child = f"parent{number}", f"child{number}"
        self.refused = f"bad_parents{number}"
        super().__init__(place, folder, number)

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
        raise NotImplementedError


def test_rows_that_refer_to_each_other_arrive_together(family):
    with session(family, MemoryLog()) as opened:
        write(opened, rows((1, family.good), (2, family.good)))
    assert (family.parents(), family.children()) == ([1, 2], [1, 2])
    assert family.place.leftovers() == []


def test_a_refused_child_takes_its_parents_with_it_and_is_named(family):
    sinks = [replace(sink, on_reject="fail") for sink in family.sinks()]
    with session(family, MemoryLog(), sinks=sinks) as opened:
        with pytest.raises(RowRejected, match=family.refused_child):
            write(opened, rows((1, family.good), (2, family.bad)))
        assert (family.parents(), family.children()) == ([], [])
        write(opened, rows((1, family.good)))
    assert (family.parents(), family.children()) == ([1], [1])
    assert family.place.leftovers() == []


def test_a_sink_added_later_shares_from_its_first_epoch_on(family):
    log = MemoryLog()
    parent, child = family.sinks()
    with session(family, log, sinks=[parent]) as opened:
        write(opened, rows((1, family.good)))
    with session(family, log, sinks=[parent, child]) as opened:
        write(opened, rows((2, family.good)))
    assert (family.parents(), family.children()) == ([1, 2], [2])


def test_a_decision_from_before_a_sink_was_added_is_carried_out_without_it(family):
    log = MemoryLog()
    parent, child = family.sinks()
    with pytest.raises(Dies), session(family, log, sinks=[parent], dies_at="decided") as opened:
        write(opened, rows((1, family.good)))
    with session(family, log, sinks=[parent, child]) as opened:
        assert (family.parents(), family.children()) == ([1], [])
        write(opened, rows((2, family.good)))
    assert (family.parents(), family.children()) == ([1, 2], [2])


def test_what_one_sink_committed_alone_is_not_applied_again(family):
    log = MemoryLog()
    with pytest.raises(Dies), session(family, log, dies_at="decided") as opened:
        write(opened, rows((1, family.good)))
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
        write(opened, rows((1, family.good)))
    (child,) = read_state(log).unsettled.receipts["child"]
    family.place.drop_staged(child.handle)
    with session(family, log) as opened:
        assert read_state(log).done >= {"bad children", "bad parents"}
        assert "parent" not in read_state(log).done
        assert (family.parents(), family.children()) == ([], [])
        opened.begin(0)
        opened.write(rows((1, family.good)))
        opened.commit()
    assert (family.parents(), family.children()) == ([1], [1])
