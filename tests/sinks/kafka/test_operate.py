"""`recount` and `drop`: the audit of a topic, and what a dropped pipeline leaves in a cluster."""

from __future__ import annotations

from typing import Any

import confluent_kafka
import pyarrow as pa
import pytest
from kafka_broker import Broker, Life, some

from epochal.kafka import batch_reader
from epochal.kafka.cluster import Leader
from epochal.kafka.messages.delete_records import (
    DeleteRecordsPartition,
    DeleteRecordsRequest,
    DeleteRecordsTopic,
)
from epochal.kafka.messages.list_groups import ListGroupsRequest
from epochal.kit.sink_base import Operable, Recount
from epochal.terms import Uid

OTHER = Uid("zyxwvuts7654")


def recount(life: Life) -> Recount:
    assert isinstance(life.committer, Operable)
    return life.committer.recount()


def others_produce(kafka: Broker, topic: str, count: int, *, within: str | None = None) -> None:
    """A writer that is not ours: plain, or in a transaction of its own."""
    named = {} if within is None else {"transactional.id": within}
    settings = {"bootstrap.servers": kafka.bootstrap, **named}
    producer = confluent_kafka.Producer(settings)
    if within is not None:
        producer.init_transactions(30)
        producer.begin_transaction()
    for number in range(count):
        producer.produce(topic, b'{"id":%d}' % number)
    if within is not None:
        producer.commit_transaction(30)
        # InitProducerId waits for the markers of the committed transaction.
        confluent_kafka.Producer(settings).init_transactions(30)
    producer.flush(30)


def delete_before(kafka: Broker, topic: str, offset: int) -> None:
    wanted = DeleteRecordsTopic(
        name=topic, partitions=[DeleteRecordsPartition(partition_index=0, offset=offset)]
    )
    request = DeleteRecordsRequest(topics=[wanted], timeout_ms=10_000)
    answer = kafka.client.ask(request, Leader(topic, 0))
    assert answer.topics[0].partitions[0].error_code == 0


def test_what_is_counted_is_what_readers_of_committed_records_see(kafka: Broker) -> None:
    topic = kafka.topic(partitions=3)
    life = kafka.life(topic, key="id")
    assert recount(life).rows == 0
    for epoch in range(3):
        life.write(epoch, some(*range(epoch * 10, epoch * 10 + 5)), some(100 + epoch), first=True)
    life.abort(3, life.prepare(3, some(7, 8, 9), first=True))
    life.write(3, some(55), first=True)
    found = recount(kafka.keep(life.fresh()))
    assert (found.rows, found.is_alone) == (len(kafka.ids(topic)), True)
    assert found.rows == 19


def test_records_of_others_are_distinguished(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    life.write(0, some(1, 2))
    others_produce(kafka, topic, 3)
    others_produce(kafka, topic, 4, within="another-producer")
    kafka.life(topic, uid=OTHER).write(0, some(1, 2, 3, 4, 5))
    sibling = kafka.life(topic, name="second")
    sibling.write(0, some(6))
    assert len(kafka.ids(topic)) == 15
    assert (recount(life).rows, recount(life).is_alone) == (2, True)
    assert recount(sibling).rows == 1


def test_rows_that_choose_their_topic_are_not_counted_as_lost(kafka: Broker) -> None:
    topic, other = kafka.topic(), kafka.topic()
    life = kafka.life(topic, value="v", topic_from="t")
    life.write(0, pa.table({"v": ["here", "there"], "t": [topic, other]}))
    found = recount(life)
    assert found.rows is None
    assert "topic_from" in found.because


def test_records_of_forgotten_producers_are_counted_in_and_that_is_reported(
    kafka: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    life.write(0, some(1, 2))
    others_produce(kafka, topic, 4, within="gone-by-now")
    # As a week later: no broker lists an expired id.
    monkeypatch.setattr("epochal.sinks.kafka.operate._transactional_ids", lambda _: {})
    found = recount(life)
    assert (found.rows, found.is_alone) == (6, False)
    assert "no longer know" in found.because


def test_a_committed_record_behind_an_open_transaction_is_counted(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    life.write(0, some(1), first=True)
    in_the_way = kafka.life(topic, uid=OTHER)
    left_open = in_the_way.prepare(0, some(100))
    life.write(1, some(2, 3), first=True)
    assert kafka.ids(topic) == [1], "readers wait"
    found = recount(life)
    assert found.rows == 3
    assert "makes readers of 1 partitions wait" in found.because
    in_the_way.abort(0, left_open)
    assert kafka.ids(topic) == [1, 2, 3]
    assert "holds" not in recount(life).because


def test_what_retention_has_cut_can_not_be_compared(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    life.write(0, some(1, 2, 3))
    delete_before(kafka, topic, 2)
    found = recount(life)
    assert found.rows is None
    assert "retention removed" in found.because


def test_gaps_that_compaction_leaves_are_noticed(kafka: Broker, monkeypatch: Any) -> None:
    topic = kafka.topic()
    life = kafka.life(topic)
    life.write(0, some(1, 2, 3))
    life.write(1, some(4))
    monkeypatch.setattr("epochal.kafka.batch_reader.read", without_the_first_batch())
    found = recount(life)
    assert found.rows is None
    assert "compaction removed" in found.because


def without_the_first_batch() -> Any:
    """A broker compacts when it likes to: here, as its answer would be afterwards."""
    whole = batch_reader.read
    return lambda records: (batch for batch in whole(records) if batch.base_offset)


def ledgers(kafka: Broker, life: Life) -> set[str]:
    answers = [kafka.client.ask(ListGroupsRequest(), node) for node in kafka.client.nodes()]
    named = {group.group_id for answer in answers for group in answer.groups}
    return {name for name in named if life.identity.uid in name}


def test_a_dropped_sink_leaves_its_rows_and_no_ledger(kafka: Broker) -> None:
    topic = kafka.topic()
    life = kafka.life(topic, uid=Uid("dropdropdrop"))
    neighbour = kafka.life(topic, uid=OTHER)
    life.write(0, some(1, 2))
    neighbour.write(0, some(3))
    committer = kafka.keep(life.fresh()).committer
    assert isinstance(committer, Operable)
    shown = committer.drop(is_dry_run=True)
    groups = sorted(ledgers(kafka, life))
    assert shown.removed == [f"the consumer group {group}" for group in groups]
    assert "brokers forget it" in shown.kept
    assert committer.drop(is_dry_run=False) == shown
    assert ledgers(kafka, life) == set()
    assert [mark.uid for mark in committer.newest()] == [OTHER], "another life is remembered"
    assert committer.drop(is_dry_run=False).removed == []
    assert kafka.ids(topic) == [1, 2, 3]
    assert kafka.open_transactions(life.identity.uid) == []
