"""Refused rows on their way to another sink, on every database that sends them.

A module of tests for each database imports these, beside its own fixtures `place` and `families`: a
function that makes a `Family`, in tables and a folder of its own, for each number.
"""

from __future__ import annotations

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from epochal.broker.embedded import broker
from epochal.contract import Task
from epochal.coordinator import Coordinator, Environment, read_state
from epochal.coordinator.rejected_rows import RejectedRows
from epochal.coordinator.targets import described
from epochal.errors import EpochalError, InvariantBroken, TryAgain, Unsettled
from epochal.kit.sql.rejects import SetApart
from epochal.logs import MemoryLog
from epochal.protocol.admission import Start
from epochal.session import Session
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.kafka import Kafka
from epochal.sinks.memory import Memory
from epochal.terms import EpochNumber, Fingerprint, Limits, SinkName
from epochal.testing.crash import Breach, Setting, crash_at_every_call
from epochal.testing.driver import one_after_the_other

SCHEMA = pa.schema([pa.field("id", pa.int64()), pa.field("name", pa.string())])
_attempts = itertools.count(1)
QUICK = Limits(retry_backoff_ms=(1, 5), commit_retry_max_s=5.0, sweep_every_s=0.0)


def rows(*pairs: tuple[int, str]) -> pa.RecordBatch:
    return pa.record_batch(
        {"id": [number for number, _ in pairs], "name": [name for _, name in pairs]}, schema=SCHEMA
    )


class Family(ABC):
    """
    Two tables and what they refuse: 13 by both, and a bad name by the second.

    The first sends it to a third table, the second to a folder.
    """

    good: ClassVar[str]
    bad: ClassVar[str]
    whole: ClassVar[Mapping[str, list[Any]]]
    """What readers of the four see of `mixed`, in the order of declaration."""
    committer: ClassVar[type]

    def __init__(self, place: Any, folder: Path, number: int = 1) -> None:
        self.place = place
        self.folder = folder / f"refused-{number}"
        self.number = number
        self.run = "" if number == 1 else f" {number}"
        """Ends the names of the sinks: ledgers are kept by name."""
        self.make_tables()

    @abstractmethod
    def make_tables(self) -> None: ...

    @abstractmethod
    def sinks(self) -> Sequence[Any]: ...

    @abstractmethod
    def shows(self) -> Sequence[Callable[[], list[Any]]]:
        """What readers of the four see, in the order of declaration."""

    @abstractmethod
    def cut_open_transactions(self) -> None: ...

    @abstractmethod
    def drop_staging_of_the_first(self) -> None: ...

    @abstractmethod
    def let_the_first_take_all(self) -> None: ...

    @property
    def mixed(self) -> tuple[pa.RecordBatch, ...]:
        return rows((1, self.good), (13, self.good)), rows((2, self.bad))

    def taker(self, name: str) -> Files:
        return Files(str(self.folder), name=f"{name}{self.run}", format="jsonl")

    def in_folder(self) -> list[str]:
        if not self.folder.exists():
            return []
        return sorted(row["row"] for row in read_epochs(str(self.folder)).to_table().to_pylist())

    def hidden(self) -> list[str]:
        """What the folder holds beside what a reader reads."""
        return [str(file) for file in self.folder.rglob("*.json*") if "staging" in str(file)]

    @property
    def names(self) -> list[str]:
        return list(self.whole)

    @property
    def nothing(self) -> dict[str, list[Any]]:
        return {name: [] for name in self.whole}

    def seen(self) -> dict[str, list[Any]]:
        return {name: show() for name, show in zip(self.whole, self.shows(), strict=True)}

    def visible(self, sink: SinkName) -> list[dict[str, Any]]:
        return [{"it": value} for value in self.seen()[sink.removesuffix(self.run)]]

    def wanted(self, sink: SinkName) -> list[dict[str, Any]]:
        return [{"it": value} for value in self.whole[sink.removesuffix(self.run)]]


@pytest.fixture
def family(families) -> Family:
    return families(1)


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
        environment=Environment(parallel=one_after_the_other, on_step=watch),
        **more,
    )


def write(opened: Session, *batches: pa.RecordBatch) -> None:
    opened.begin(opened.next_epoch)
    for batch in batches:
        opened.write(batch)
    opened.commit()


def test_refused_rows_arrive_elsewhere_in_the_same_epoch(family):
    log = MemoryLog()
    with session(family, log) as opened:
        write(opened, *family.mixed)
        assert family.seen() == family.whole
        write(opened, rows((3, family.good)))
        first, second, *takers = family.names
        assert read_state(log).last.rows == {first: 1, second: 1, **dict.fromkeys(takers, 0)}
    assert family.place.leftovers() == []


@pytest.mark.parametrize("step", ["rehearsed", "gated", "decided", "committed", "settled"])
def test_whatever_step_a_driver_dies_at_the_refused_rows_arrive_once(family, step):
    log = MemoryLog()
    dies_at = f"committed {family.names[0]}" if step == "committed" else step
    with pytest.raises(Dies), session(family, log, dies_at=dies_at) as opened:
        write(opened, *family.mixed)
    with session(family, log) as opened:
        if opened.next_epoch == 0:
            assert family.seen() == family.nothing
            write(opened, *family.mixed)
    assert family.seen() == family.whole
    assert family.place.leftovers() == []


def test_a_gate_sees_how_many_rows_were_refused(family):
    *_, taker = family.names

    def few(epoch: Any) -> Any:
        return epoch.rows(taker) < 2 or "too many"

    with session(family, MemoryLog(), gates=[few]) as opened:
        with pytest.raises(EpochalError, match="too many"):
            write(opened, *family.mixed)
        assert family.seen() == family.nothing
        write(opened, rows((1, family.good), (2, family.bad)))
    assert [json.loads(row)["id"] for row in family.in_folder()] == [2]
    assert family.place.leftovers() == []


def test_a_lost_connection_after_the_decision_leaves_out_the_same_rows(family):
    def cut(step: str, _epoch: Any) -> None:
        if step == "decided":
            family.cut_open_transactions()

    opened = session(family, MemoryLog())
    opened._coordinator._environment = replace(opened._coordinator._environment, on_step=cut)
    with opened:
        write(opened, *family.mixed)
    assert family.seen() == family.whole
    assert family.place.leftovers() == []


def test_a_removal_whose_reply_is_lost_is_repeated_and_nothing_is_reported_twice(
    family, monkeypatch
):
    real, calls = family.committer.remove_apart, itertools.count()

    def unanswered(committer: Any) -> None:
        had = len(committer.apart) and not committer.apart.is_removed
        real(committer)
        if had and next(calls) < 2:
            committer.apart.is_removed = False
            raise TryAgain("no answer")

    monkeypatch.setattr(family.committer, "remove_apart", unanswered)
    with session(family, MemoryLog()) as opened:
        write(opened, *family.mixed)
    assert next(calls) > 2
    assert family.seen() == family.whole


def test_a_delivery_that_fails_is_tried_again_and_leaves_nothing(family, monkeypatch):
    sinks = family.sinks()
    taker = sinks[0].on_reject
    real, calls = type(taker).writer, itertools.count()

    def writer(sink: Any, task: Any) -> Any:
        made = real(sink, task)
        if sink.name == taker.name and next(calls) == 0:
            made.write(some_row(task.schema))
            made.prepare()
            raise TryAgain("no answer")
        return made

    monkeypatch.setattr(type(taker), "writer", writer)
    with session(family, MemoryLog(), sinks=sinks) as opened:
        write(opened, *family.mixed)
    assert next(calls) == 2
    assert family.seen() == family.whole
    assert family.place.leftovers() == []


def some_row(schema: pa.Schema) -> pa.RecordBatch:
    columns = {
        field.name: pa.array([1 if pa.types.is_integer(field.type) else "x"], field.type)
        for field in schema
    }
    return pa.record_batch(columns, schema=schema)


def test_one_sink_may_get_what_several_refuse(family):
    bad = Memory(name="bad of all")
    sinks = [replace(sink, on_reject=bad) for sink in family.sinks()]
    with session(family, MemoryLog(), sinks=sinks) as opened:
        write(opened, *family.mixed)
    _, _, *refused = family.whole.values()
    assert sorted(row["row"] for row in bad.rows().to_pylist()) == sorted(itertools.chain(*refused))


# Crashes


def settings_of(families: Callable[[int], Family]) -> Callable[[], Setting]:
    numbers = itertools.count(100)

    def fresh() -> Setting:
        family = families(next(numbers))
        log = MemoryLog()
        return Setting(
            log=lambda: log,
            sinks=family.sinks,
            epochs=[[[batch] for batch in family.mixed]],
            schema=SCHEMA,
            visible=family.visible,
            wanted=family.wanted,
            leftovers=lambda: family.place.leftovers() + family.hidden(),
        )

    return fresh


def test_a_crash_at_any_call_leaves_every_row_where_it_belongs_once(families):
    report = crash_at_every_call(settings_of(families), second=False, effects_only=True)
    assert report.runs > 30


def test_the_judge_objects_where_refused_rows_are_not_taken_elsewhere(families, monkeypatch):
    monkeypatch.setattr(RejectedRows, "deliver", lambda *_args, **_named: None)
    with pytest.raises(Breach, match=r"lost 1 rows"):
        crash_at_every_call(settings_of(families), second=False, effects_only=True)


def test_rows_that_are_set_apart_in_memory_only_are_found_out(families, monkeypatch):
    monkeypatch.setattr(SetApart, "removals", lambda _: iter(()))
    with pytest.raises(InvariantBroken, match="which was taken out of staging"):
        crash_at_every_call(settings_of(families), second=False, effects_only=True)


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
        environment=Environment(parallel=one_after_the_other, on_step=watch),
    )
    start = Start(pipeline="family", location="here", sinks=described(sinks))
    made.start(start, {sinks[0].name: SCHEMA})
    return made


def prepared(coordinator: Coordinator, family: Family) -> Any:
    """As Spark's tasks do it: every receipt with a sum of row hashes."""
    first = family.sinks()[0]
    handle = coordinator.identity(first.name).handle(
        EpochNumber(0), partition=0, attempt=next(_attempts)
    )
    handout = coordinator.handout(first.name)
    writer = first.writer(Task(handle=handle, schema=SCHEMA, handout=handout))
    for batch in family.mixed:
        writer.write(batch)
    receipt = writer.prepare()
    return {first.name: (replace(receipt, fingerprint=Fingerprint(receipt.rows, 7)),)}


@pytest.mark.parametrize("is_changed", [False, True])
def test_rows_that_are_written_again_are_refused_as_they_were_or_a_person_is_asked(
    family, is_changed
):
    log, first = MemoryLog(), family.names[0]
    coordinator = coordinator_of(family, log, dies_at="decided")
    coordinator.begin(EpochNumber(0))
    coordinator.preparing()
    with pytest.raises(Dies):
        coordinator.conclude(prepared(coordinator, family))
    coordinator._close()
    family.drop_staging_of_the_first()
    coordinator = coordinator_of(family, log)
    assert list(coordinator.lost) == [first]
    _, _, taker, _ = family.names
    assert family.seen()[taker] == family.whole[taker]
    coordinator.begin(EpochNumber(0))
    if is_changed:
        family.let_the_first_take_all()
        with pytest.raises(Unsettled, match=r"rejects 0 of them now .* 1 were rejected"):
            coordinator.rewrite(prepared(coordinator, family))
        assert family.seen()[first] == []
    else:
        coordinator.rewrite(prepared(coordinator, family))
        assert family.seen()[first] == family.whole[first]
    coordinator.stop()
    assert family.seen()[taker] == family.whole[taker]
    assert family.place.leftovers() == []


def test_refused_rows_may_go_to_a_topic(family):
    with broker() as bootstrap:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("bad", num_partitions=1)])["bad"].result(timeout=30)
        bad = Kafka(bootstrap, topic="bad", key="sink")
        sinks = [replace(family.sinks()[0], on_reject=bad)]
        log = MemoryLog()
        with pytest.raises(Dies), session(family, log, sinks=sinks, dies_at="decided") as opened:
            write(opened, *family.mixed)
        with session(family, log, sinks=sinks) as opened:
            write(opened, rows((3, family.good)))
        rejected = [json.loads(value) for value in _committed(bootstrap, "bad")]
    assert [(one["sink"], json.loads(one["row"])) for one in rejected] == [
        (family.names[0], {"id": 13})
    ]
    assert family.seen()[family.names[0]] == [1, 2, 3]


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


def test_rows_that_exclude_each_other_are_found_too(place):
    place.sql(f"CREATE TABLE {place.schema}.numbers (id bigint PRIMARY KEY)")
    place.sql(f"INSERT INTO {place.schema}.numbers VALUES (3)")
    life = place.life("numbers", on_reject=Memory(name="twice"))
    numbers = pa.table({"id": pa.array([1, 2, 2, 3, 4], pa.int64())})
    life.start(numbers)
    receipt = life.prepare(numbers, 0)
    life.rehearse(0, [receipt])
    life.commit(0, [receipt])
    refused = life.committer.rejected(0).column("row").to_pylist()
    assert [json.loads(row) for row in refused] == [{"id": 2}, {"id": 3}]
    assert place.rows("numbers") == [(1,), (2,), (3,), (4,)]
