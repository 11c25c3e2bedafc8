"""A decided Kafka transaction of a dead driver: shown, protected, finished from elsewhere."""

from __future__ import annotations

import pyarrow as pa
import pytest
from confluent_kafka import Consumer
from confluent_kafka.admin import AdminClient, NewTopic

from epochal import Kafka, Limits
from epochal.contract import Begin, Task
from epochal.coordinator.journal import newest_record
from epochal.coordinator.targets import identity_of
from epochal.errors import Refused
from epochal.reports import resolve
from epochal.reports.doctor import diagnose
from epochal.reports.drop import drop
from epochal.reports.recover import plan_recovery, recover
from epochal.reports.verify import verify
from epochal.testing import broker


@pytest.fixture
def on_kafka(shop):
    with broker() as bootstrap:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("orders", 1)])["orders"].result(30)
        shop.orders = Kafka(bootstrap, topic="orders", name="orders")
        yield shop


def read(shop) -> list[bytes]:
    consumer = Consumer(
        {
            "bootstrap.servers": shop.orders.bootstrap,
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
        }
    )
    consumer.subscribe(["orders"])
    found = []
    try:
        while (message := consumer.poll(20)) is not None and message.error() is None:
            found.append(message.value())
    finally:
        consumer.close()
    return found


def test_a_decided_transaction_is_never_aborted_by_hand_and_is_finished_from_elsewhere(on_kafka):
    driver = on_kafka.die("decided")
    diagnosis = diagnose(on_kafka.opened).sinks[0]
    (found,) = diagnosis.found
    assert found.verdict in {"commit", "judged after the commit"}
    assert "committed records" in found.blocks
    for dry_run in (True, False):
        with pytest.raises(Refused, match="nothing there may be aborted"):
            resolve.abort(
                on_kafka.opened, sink="orders", name=found.name, by="ann", dry_run=dry_run
            )
    assert read(on_kafka) == []
    recover(on_kafka.opened)
    assert read(on_kafka) == [b'{"id":0}', b'{"id":1}']
    assert plan_recovery(on_kafka.opened).steps[1:] == ["nothing is in doubt"]
    driver._coordinator.stop()


def test_an_undecided_transaction_is_aborted_by_recovery(on_kafka):
    driver = on_kafka.die("prepared")
    assert "abort 1 attempt on orders that no decision names" in recover(on_kafka.opened).steps
    assert diagnose(on_kafka.opened).sinks[0].found == []
    assert read(on_kafka) == []
    driver._coordinator.stop()


def write_beside_the_log(shop, epoch) -> None:
    """What no driver may do: an epoch that is committed, and that no decision names."""
    identity = identity_of(newest_record(shop.log).record.state, "orders")
    committer = shop.orders.committer(identity, Limits())
    rows = pa.table({"id": pa.array([7], pa.int64())})
    handle = identity.handle(epoch, partition=0, attempt=99)
    task = Task(handle=handle, schema=rows.schema, handout=committer.begin(Begin(epoch=epoch)))
    writer = shop.orders.writer(task)
    writer.write(rows.to_batches()[0])
    committer.commit(epoch, [writer.prepare()])
    committer.close()


def test_a_topic_is_counted_and_an_undecided_record_is_found(on_kafka):
    on_kafka.run(epochs=3, rows=2)
    assert not verify(on_kafka.opened).differs
    write_beside_the_log(on_kafka, 3)
    report = verify(on_kafka.opened)
    assert report.differs
    assert report.sinks[0].differences == ["1 row too many: 6 decided, 7 visible"]


def test_a_dropped_pipeline_starts_afresh_on_the_same_topic(on_kafka):
    on_kafka.run(epochs=2, rows=1)
    driver = on_kafka.die("prepared")
    report = drop(on_kafka.opened, dry_run=False)
    prepared, *ledger = report.sinks["orders"]
    assert prepared.startswith("epochal-")
    assert [one.startswith("the consumer group") for one in ledger] == [True, True]
    assert "transactional id" in report.left["orders"]
    assert on_kafka.log.numbers() == []
    assert read(on_kafka) == [b'{"id":0}', b'{"id":0}']
    on_kafka.run(epochs=1, rows=1)
    driver._coordinator.stop()
