"""Sinks on one server in one transaction, and refused rows on their way to another sink.

`parent` is declared before `child`, whose rows refer to it; each sends what its table refuses to a
sink of its own, one on the same server and one in a folder.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from epochal.broker.embedded import broker
from epochal.contract import Limits, Task
from epochal.coordinator import Coordinator, Surroundings, read_state
from epochal.coordinator.rejecting import Deliveries
from epochal.coordinator.starting import described
from epochal.errors import (
    EpochalError,
    InvariantBroken,
    Misconfigured,
    RowRejected,
    TryAgain,
    Unsettled,
)
from epochal.logs.memory import MemoryLog
from epochal.protocol.admission import Start
from epochal.session import Session
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.kafka import Kafka
from epochal.sinks.memory import Memory
from epochal.sinks.postgres.committer import StagedCommitter
from epochal.sinks.postgres.rejects import SetApart
from epochal.terms import EpochNumber, Fingerprint, SinkName
from epochal.testing.crash import Setting, crash_at_every_call
from epochal.testing.driver import one_after_the_other
from epochal.testing.judge import Breach

GOOD = "00000000-0000-0000-0000-000000000000"
SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
QUICK = Limits(retry_backoff_ms=(1, 5), commit_retry_max_s=5.0, sweep_every_s=0.0)


def rows(*pairs: tuple[int, str]) -> pa.RecordBatch:
    return pa.record_batch(
        {"id": [number for number, _ in pairs], "name": [name for _, name in pairs]}, schema=SCHEMA
    )


MIXED = (rows((1, GOOD), (13, GOOD)), rows((2, "bad")))
"""13 is refused by the parent's check, and so by the child's foreign key; 2 by the child alone."""
PARENTS, CHILDREN = [1, 2], [1]
REFUSED_BY_PARENT = ['{"id":13}']
REFUSED_BY_CHILD = [f'{{"id":13,"name":"{GOOD}"}}', '{"id":2,"name":"bad"}']


class Family:
    """The tables of one run, and what their readers see."""

    def __init__(self, place: Any, folder: Path, number: int = 1) -> None:
        self.place = place
        self.folder = folder / f"bad-children-{number}"
        self.run = "" if number == 1 else f" {number}"
        """Ends the names of the sinks, as ledgers go by them."""
        self.parent, self.child, self.bad = (
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

    def sinks(self, **options: Any) -> Sequence[Any]:
        sink = self.place.sink
        bad_parents = sink(
            self.bad, name=f"bad parents{self.run}", create_table="if_missing", pool_min=0
        )
        bad_children = Files(str(self.folder), name=f"bad children{self.run}", format="jsonl")
        return [
            sink(
                self.parent,
                name=f"parent{self.run}",
                columns=["id"],
                on_reject=bad_parents,
                pool_min=0,
                **options,
            ),
            sink(
                self.child,
                name=f"child{self.run}",
                columns={"id": "parent", "name": "name"},
                on_reject=bad_children,
                pool_min=0,
                **options,
            ),
        ]

    def visible(self, sink: SinkName) -> list[dict[str, Any]]:
        shows = {
            "parent": self.parents,
            "child": self.children,
            "bad parents": self.bad_parents,
            "bad children": self.bad_children,
        }
        return [{"it": value} for value in shows[sink.removesuffix(self.run)]()]

    def parents(self) -> list[int]:
        return [number for (number,) in self.place.rows(self.parent)]

    def children(self) -> list[int]:
        return [number for (number, _) in self.place.rows(self.child)]

    def bad_parents(self) -> list[str]:
        there = self.place.sql(f"SELECT to_regclass('{self.place.schema}.{self.bad}')")
        return [] if there == [(None,)] else [row for (row,) in self.place.rows(self.bad, '"row"')]

    def bad_children(self) -> list[str]:
        if not self.folder.exists():
            return []
        return sorted(row["row"] for row in read_epochs(str(self.folder)).to_table().to_pylist())

    def seen(self) -> tuple[Any, ...]:
        return self.parents(), self.children(), self.bad_parents(), self.bad_children()

    def hidden(self) -> list[str]:
        """What the folder holds beside what a reader reads."""
        return [str(file) for file in self.folder.rglob("*.json*") if "staging" in str(file)]


WHOLE = (PARENTS, CHILDREN, REFUSED_BY_PARENT, REFUSED_BY_CHILD)
NOTHING: tuple[Any, ...] = ([], [], [], [])


@pytest.fixture
def family(place, tmp_path) -> Family:
    return Family(place, tmp_path)


class Dies(Exception):
    """The driver is gone."""


def session(family: Family, log: MemoryLog, *, dies_at: str = "", **more: Any) -> Session:
    def watch(step: str, _epoch: Any) -> None:
        if step == dies_at:
            raise Dies(step)

    sinks = more.pop("sinks", None) or family.sinks()
    return Session(
        "family",
        sinks=sinks,
        log=log,
        schema=SCHEMA,
        limits=QUICK,
        around=Surroundings(together=one_after_the_other, watch=watch),
        **more,
    )


def write(opened: Session, *batches: pa.RecordBatch) -> None:
    opened.begin(opened.next_epoch)
    for batch in batches:
        opened.write(batch)
    opened.commit()


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


def test_refused_rows_arrive_elsewhere_in_the_same_epoch_with_their_reasons(family):
    log = MemoryLog()
    with session(family, log) as opened:
        write(opened, *MIXED)
        assert family.seen() == WHOLE
        write(opened, rows((3, GOOD)))
        assert read_state(log).last.rows == {
            "parent": 1,
            "child": 1,
            "bad parents": 0,
            "bad children": 0,
        }
    told = family.place.sql(
        f"SELECT sink, epoch, sqlstate, reason FROM {family.place.schema}.{family.bad}"
    )
    ((sink, epoch, sqlstate, reason),) = told
    assert (sink, epoch, sqlstate) == ("parent", 0, "23514")
    assert "violates check constraint" in reason
    assert family.place.leftovers() == []


@pytest.mark.parametrize("step", ["rehearsed", "gated", "decided", "committed parent", "settled"])
def test_whatever_step_a_driver_dies_at_the_refused_rows_arrive_once(family, step):
    log = MemoryLog()
    with pytest.raises(Dies), session(family, log, dies_at=step) as opened:
        write(opened, *MIXED)
    with session(family, log) as opened:
        if opened.next_epoch == 0:
            assert family.seen() == NOTHING
            write(opened, *MIXED)
    assert family.seen() == WHOLE
    assert family.place.leftovers() == []


def test_a_gate_sees_how_many_rows_were_refused(family):
    def few(epoch: Any) -> Any:
        return epoch.rows("bad children") < 2 or "too many bad children"

    with session(family, MemoryLog(), gates=[few]) as opened:
        with pytest.raises(EpochalError, match="too many bad children"):
            write(opened, *MIXED)
        assert family.seen() == NOTHING
        write(opened, rows((1, GOOD), (2, "bad")))
    assert family.bad_children() == ['{"id":2,"name":"bad"}']
    assert family.place.leftovers() == []


def test_a_lost_connection_after_the_decision_leaves_out_the_same_rows(family):
    place = family.place

    def cut(step: str, _epoch: Any) -> None:
        if step == "decided":
            place.sql(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE state = 'idle in transaction'"
            )

    opened = session(family, MemoryLog())
    opened._coordinator._around = replace(opened._coordinator._around, watch=cut)
    with opened:
        write(opened, *MIXED)
    assert family.seen() == WHOLE
    assert place.leftovers() == []


def test_a_removal_whose_reply_is_lost_is_made_again_and_nothing_is_told_twice(family, monkeypatch):
    real, calls = StagedCommitter.remove_apart, itertools.count()

    def unanswered(committer: StagedCommitter) -> None:
        had = len(committer.apart) and not committer.apart.is_removed
        real(committer)
        if had and next(calls) < 2:
            committer.apart.is_removed = False
            raise TryAgain("no answer")

    monkeypatch.setattr(StagedCommitter, "remove_apart", unanswered)
    with session(family, MemoryLog()) as opened:
        write(opened, *MIXED)
    assert next(calls) > 2
    assert family.seen() == WHOLE


def test_a_delivery_that_fails_is_tried_again_and_leaves_nothing(family, monkeypatch):
    sinks = family.sinks()
    taker = sinks[0].on_reject
    real, calls = type(taker).writer, itertools.count()

    def writer(sink: Any, task: Any) -> Any:
        made = real(sink, task)
        if sink.name == taker.name and next(calls) == 0:
            made.write(
                next(iter(pa.Table.from_pylist([], task.schema).to_batches()), None)
                or made_of(task)
            )
            made.prepare()
            raise TryAgain("no answer")
        return made

    def made_of(task: Any) -> pa.RecordBatch:
        columns = {
            field.name: pa.array([1 if pa.types.is_integer(field.type) else "x"], field.type)
            for field in task.schema
        }
        return pa.record_batch(columns, schema=task.schema)

    monkeypatch.setattr(type(taker), "writer", writer)
    with session(family, MemoryLog(), sinks=sinks) as opened:
        write(opened, *MIXED)
    assert next(calls) == 2
    assert family.seen() == WHOLE
    assert family.place.leftovers() == []


def test_one_sink_may_get_what_several_refuse(family):
    bad = Memory(name="bad of all")
    sinks = [replace(sink, on_reject=bad) for sink in family.sinks()]
    with session(family, MemoryLog(), sinks=sinks) as opened:
        write(opened, *MIXED)
    assert sorted(row["row"] for row in bad.rows().to_pylist()) == sorted(
        REFUSED_BY_PARENT + REFUSED_BY_CHILD
    )


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


# Crashes


def settings_at(place: Any, folder: Path) -> Callable[[], Setting]:
    numbers = itertools.count(100)

    def fresh() -> Setting:
        family = Family(place, folder, next(numbers))
        log = MemoryLog()
        wanted = {
            "parent": PARENTS,
            "child": CHILDREN,
            "bad parents": REFUSED_BY_PARENT,
            "bad children": REFUSED_BY_CHILD,
        }
        return Setting(
            log=lambda: log,
            sinks=family.sinks,
            epochs=[[[MIXED[0]], [MIXED[1]]]],
            schema=SCHEMA,
            visible=family.visible,
            wanted=lambda sink: [{"it": one} for one in wanted[sink.removesuffix(family.run)]],
            leftovers=lambda: place.leftovers() + family.hidden(),
        )

    return fresh


def test_a_crash_at_any_call_leaves_every_row_where_it_belongs_once(place, tmp_path):
    report = crash_at_every_call(settings_at(place, tmp_path), second=False, effects_only=True)
    assert report.runs > 30


def test_the_judge_objects_where_refused_rows_are_not_taken_elsewhere(place, tmp_path, monkeypatch):
    monkeypatch.setattr(Deliveries, "deliver", lambda *_args, **_named: None)
    with pytest.raises(Breach, match=r"bad parents.* lost 1 rows"):
        crash_at_every_call(settings_at(place, tmp_path), second=False, effects_only=True)


def test_rows_that_are_set_apart_in_memory_only_are_found_out(place, tmp_path, monkeypatch):
    monkeypatch.setattr(SetApart, "removals", lambda _: iter(()))
    with pytest.raises(InvariantBroken, match="which was taken out of staging"):
        crash_at_every_call(settings_at(place, tmp_path), second=False, effects_only=True)


# Written again, and other targets


def coordinator_of(family: Family, log: MemoryLog, dies_at: str = "") -> Coordinator:
    def watch(step: str, _epoch: Any) -> None:
        if step == dies_at:
            raise Dies(step)

    sinks = family.sinks()[:1]
    made = Coordinator(
        log=log,
        sinks=sinks,
        limits=QUICK,
        around=Surroundings(together=one_after_the_other, watch=watch),
    )
    start = Start(pipeline="family", location="here", sinks=described(sinks))
    made.start(start, {"parent": SCHEMA})
    return made


def prepared(coordinator: Coordinator, family: Family, *batches: pa.RecordBatch) -> Any:
    """As Spark's tasks do it: every receipt with a sum of row hashes."""
    parent = family.sinks()[0]
    handle = coordinator.identity(parent.name).handle(
        EpochNumber(0), partition=0, attempt=coordinator.record
    )
    writer = parent.writer(Task(handle=handle, schema=SCHEMA))
    for batch in batches:
        writer.write(batch)
    receipt = writer.prepare()
    return {parent.name: (replace(receipt, fingerprint=Fingerprint(receipt.rows, 7)),)}


@pytest.mark.parametrize("is_changed", [False, True])
def test_rows_that_are_written_again_are_refused_as_they_were_or_a_person_is_asked(
    family, is_changed
):
    log, place = MemoryLog(), family.place
    first = coordinator_of(family, log, dies_at="decided")
    first.begin(EpochNumber(0))
    first.preparing()
    with pytest.raises(Dies):
        first.conclude(prepared(first, family, *MIXED))
    first.leave()
    (staged,) = [name for (name,) in place.sql(_STAGED.format(place.meta))]
    place.sql(f"DROP TABLE {place.meta}.{staged}")
    second = coordinator_of(family, log)
    assert list(second.lost) == ["parent"]
    assert family.bad_parents() == REFUSED_BY_PARENT
    second.begin(EpochNumber(0))
    if is_changed:
        check = f"{family.parent}_id_check"
        place.sql(f"ALTER TABLE {place.schema}.{family.parent} DROP CONSTRAINT {check}")
        with pytest.raises(Unsettled, match=r"refuses 0 of them now .* 1 were refused"):
            second.rewrite(prepared(second, family, *MIXED))
        assert family.parents() == []
    else:
        second.rewrite(prepared(second, family, *MIXED))
        assert family.parents() == PARENTS
    second.stop()
    assert family.bad_parents() == REFUSED_BY_PARENT
    assert place.leftovers() == []


_STAGED = (
    "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
    " WHERE n.nspname = '{}' AND c.relkind = 'r' AND c.relname <> 'ledger'"
    " AND EXISTS (SELECT FROM pg_attribute a WHERE a.attrelid = c.oid AND a.attname = 'id')"
)


def test_refused_rows_may_go_to_a_topic(family):
    with broker() as bootstrap:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("bad", num_partitions=1)])["bad"].result(timeout=30)
        bad = Kafka(bootstrap, topic="bad", key="sink")
        sinks = [replace(family.sinks()[0], on_reject=bad)]
        log = MemoryLog()
        with pytest.raises(Dies), session(family, log, sinks=sinks, dies_at="decided") as opened:
            write(opened, *MIXED)
        with session(family, log, sinks=sinks) as opened:
            write(opened, rows((3, GOOD)))
        told = [json.loads(value) for value in _committed(bootstrap, "bad")]
    assert [(one["sink"], one["row"]) for one in told] == [("parent", '{"id":13}')]
    assert family.parents() == [1, 2, 3]


def _committed(bootstrap: str, topic: str) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    values = []
    while (message := consumer.poll(30)) is not None and message.error() is None:
        values.append(message.value())
    consumer.close()
    return values
