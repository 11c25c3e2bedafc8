"""What becomes of rows: keys, partitions, headers, tombstones, sizes; and what is refused."""

from __future__ import annotations

import json
import os
import pickle
import time

import confluent_kafka
import pyarrow as pa
import pytest
from kafka_broker import Broker, some

from epochal.errors import EpochalError, Misconfigured, RowRejected, TryAgain
from epochal.kafka import batch_reader
from epochal.kafka.cluster import Controller, Leader
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchTopic
from epochal.kafka.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from epochal.kafka.record_headers import HEADERS
from epochal.sinks.kafka import Kafka
from epochal.sinks.kafka import json as as_json
from epochal.terms import EpochNumber


def test_keys_go_where_the_java_client_and_librdkafka_send_them(kafka: Broker) -> None:
    ours, theirs = kafka.topic(partitions=5), kafka.topic(partitions=5)
    keys = [f"key-{number}" for number in range(200)]
    rows = pa.table({"k": keys, "v": keys})
    kafka.life(ours, key="k", value="v").write(0, rows)
    peer = confluent_kafka.Producer(
        {"bootstrap.servers": kafka.bootstrap, "partitioner": "murmur2_random"}
    )
    for key in keys:
        peer.produce(theirs, key=key, value=key)
    assert peer.flush(20) == 0
    assert _partition_by_key(kafka, ours) == _partition_by_key(kafka, theirs)


def _partition_by_key(kafka: Broker, topic: str) -> dict[bytes, int]:
    return {message.key(): message.partition() for message in kafka.messages(topic)}


def test_rows_without_a_key_are_spread_in_full_batches(kafka: Broker) -> None:
    topic = kafka.topic(partitions=3)
    rows = pa.table({"v": ["x" * 1000] * 3000})
    kafka.life(topic, value="v", batch_bytes=100_000).write(0, rows)
    messages = kafka.messages(topic)
    assert len(messages) == 3000
    per_partition = [sum(m.partition() == index for m in messages) for index in range(3)]
    assert min(per_partition) > 500


def test_a_null_value_is_a_tombstone_and_a_null_key_none(kafka: Broker) -> None:
    topic = kafka.topic()
    rows = pa.table({"k": ["a", None], "v": pa.array([None, b"\x00\xff"], pa.binary())})
    kafka.life(topic, key="k", value="v").write(0, rows)
    assert [(m.key(), m.value()) for m in kafka.messages(topic)] == [
        (b"a", None),
        (None, b"\x00\xff"),
    ]


def test_a_row_may_have_its_own_partition_topic_time_and_headers(kafka: Broker) -> None:
    topic, other = kafka.topic(partitions=3), kafka.topic()
    # Not from long ago: a broker deletes records that are older than its retention.
    hour_ago_ms = int(time.time() * 1000) - 3_600_000
    rows = pa.table(
        {
            "v": ["one", "two", "three"],
            "p": pa.array([2, None, 0], pa.int32()),
            "t": [None, None, other],
            "at": pa.array([hour_ago_ms, None, hour_ago_ms + 1], pa.int64()),
            "h": pa.array([[("a", "b")], None, []], pa.map_(pa.string(), pa.string())),
        }
    )
    life = kafka.life(topic, value="v", partition="p", topic_from="t", timestamp="at", headers="h")
    life.write(0, rows)
    found = {message.value(): message for message in kafka.messages(topic)}
    assert found[b"one"].partition() == 2
    assert found[b"one"].timestamp()[1] == hour_ago_ms
    assert found[b"one"].headers() == [("a", b"b")]
    assert found[b"two"].timestamp()[1] > hour_ago_ms + 1
    assert [message.value() for message in kafka.messages(other)] == [b"three"]


@pytest.mark.parametrize(
    ("options", "column", "expected"),
    [
        ({"partition": "c"}, pa.array([-5], pa.int32()), "wants partition -5"),
        ({"partition": "c"}, pa.array([3], pa.int32()), "wants partition 3"),
        ({"partition": "c"}, pa.array([1 << 40], pa.int64()), f"wants partition {1 << 40}"),
        ({"timestamp": "c"}, pa.array([-1], pa.int64()), "before 1970"),
        ({"timestamp": "c"}, pa.array([-1], pa.timestamp("us", "UTC")), "before 1970"),
        (
            {"headers": "c"},
            pa.array([[{"key": None, "value": b"x"}]], HEADERS),
            "header without a key",
        ),
    ],
    ids=str,
)
def test_what_other_clients_refuse_of_a_row_is_refused(
    kafka: Broker, options: dict[str, str], column: pa.Array, expected: str
) -> None:
    life = kafka.life(kafka.topic(partitions=3), value="v", **options)
    with pytest.raises(RowRejected, match=expected):
        life.prepare(0, pa.table({"v": ["x"], "c": column}))


def test_a_row_may_be_as_large_as_its_own_topic_allows(kafka: Broker) -> None:
    topic, large = kafka.topic(), kafka.topic(max_message_bytes="3000000")
    life = kafka.life(topic, value="v", topic_from="t", compression="none")
    life.write(0, pa.table({"v": ["x" * 2_000_000], "t": [large]}))
    assert [len(message.value()) for message in kafka.messages(large)] == [2_000_000]
    for name, limit in ((large, 3_000_000), (topic, 1_048_588)):
        with pytest.raises(RowRejected, match=f"{name} takes {limit} bytes"):
            life.prepare(1, pa.table({"v": ["x" * 4_000_000], "t": [name]}))


def test_partitions_that_were_added_to_the_topic_of_a_row_are_used(kafka: Broker) -> None:
    """Also by a worker that has written to it before: keys must meet in one partition."""
    topic, other = kafka.topic(), kafka.topic()
    rows = pa.table({"k": [f"key-{n}" for n in range(50)], "t": [other] * 50})
    life = kafka.life(topic, key="k", value="k", topic_from="t")
    life.write(0, rows)
    kafka.add_partitions(other, 4)
    life.write(1, rows)
    assert {message.partition() for message in kafka.messages(other)} == {0, 1, 2, 3}


@pytest.mark.parametrize("kind", ["gzip", "snappy", "lz4", "zstd"])
def test_compressed_rows_are_read_by_others(kafka: Broker, kind: str) -> None:
    topic = kafka.topic()
    kafka.life(topic, compression=kind).write(0, some(*range(500)))
    assert kafka.ids(topic) == list(range(500))


def test_many_batches_keep_their_order_and_their_rows(kafka: Broker) -> None:
    topic = kafka.topic(partitions=2)
    life = kafka.life(topic, key="name", value=as_json("id"), batch_bytes=4_000)
    rows = pa.table({"id": list(range(20_000)), "name": [f"k{n % 7}" for n in range(20_000)]})
    life.write(0, rows)
    messages = kafka.messages(topic)
    assert sorted(json.loads(m.value())["id"] for m in messages) == list(range(20_000))
    by_key: dict[bytes, list[int]] = {}
    for message in sorted(messages, key=lambda one: (one.partition(), one.offset())):
        by_key.setdefault(message.key(), []).append(json.loads(message.value())["id"])
    assert all(numbers == sorted(numbers) for numbers in by_key.values())


def test_what_fills_no_batch_waits_for_more(kafka: Broker) -> None:
    topic = kafka.topic(partitions=2)
    life = kafka.life(topic, key="id", value="v", batch_bytes=20_000)
    rows = pa.table({"id": list(range(3000)), "v": ["x" * 60] * 3000})
    writer = life.writer(rows, 0, handout=life.begin(0))
    for batch in rows.to_batches(max_chunksize=150):
        writer.write(batch)
    receipt = writer.prepare()
    life.rehearse(0, [receipt])
    life.commit(0, [receipt])
    assert len(kafka.messages(topic)) == 3000
    for partition in (0, 1):
        *full, _ = _batch_counts(kafka, topic, partition)
        assert min(full) > 190, "20,000 bytes are some 200 rows"


def _batch_counts(kafka: Broker, topic: str, partition: int) -> list[int]:
    """How many rows each batch of a partition has."""
    wanted = FetchPartition(partition=partition, fetch_offset=0, partition_max_bytes=1 << 24)
    request = FetchRequest(max_bytes=1 << 24, topics=[FetchTopic(topic=topic, partitions=[wanted])])
    (part,) = kafka.client.ask(request, Leader(topic, partition)).responses[0].partitions
    return [batch.count for batch in batch_reader.read(part.records) if not batch.is_control]


def test_a_row_that_waits_for_company_does_not_hold_memory_for_ever(kafka: Broker) -> None:
    """It keeps the batch that it came in: a rare key must not wait until its rows fill one."""
    topic = kafka.topic(partitions=2)
    life = kafka.life(topic, partition="p", value="v", batch_bytes=20_000, buffer_bytes=50_000)
    rows = pa.table({"v": ["x" * 100] * 100, "p": pa.array([1] + [0] * 99, pa.int32())})
    writer = life.writer(rows, 0, handout=life.begin(0))
    for _ in range(10):
        writer.write(rows.to_batches()[0])
    writer._sender.finish()
    sent = [message.partition() for message in kafka.messages(topic, committed=False)]
    assert sent.count(1) >= 6
    writer.abort()
    assert kafka.messages(topic) == []


def test_a_row_that_is_too_large_is_named_before_it_is_sent(kafka: Broker) -> None:
    topic = kafka.topic(max_message_bytes="20000")
    life = kafka.life(topic, key="k", value="v")
    rows = pa.table({"k": ["small", "large"], "v": ["x", "y" * 50_000]})
    handout = life.begin(0)
    writer = life.writer(rows, 0, handout=handout)
    (batch,) = rows.to_batches()
    with pytest.raises(RowRejected, match=r"b?'large'.*20000"):
        writer.write(batch)
    writer.abort()
    assert kafka.messages(topic) == []
    assert not kafka.open_transactions(life.identity.tag)


def shrink(kafka: Broker, topic: str, message_bytes_max: int) -> None:
    """Somebody changes what a topic takes, behind the back of a driver that has asked before."""
    config = AlterableConfig(
        name="max.message.bytes", config_operation=0, value=str(message_bytes_max)
    )
    resource = AlterConfigsResource(resource_type=2, resource_name=topic, configs=[config])
    request = IncrementalAlterConfigsRequest(resources=[resource])
    (done,) = kafka.client.ask(request, Controller()).responses
    assert done.error_code == 0, done.error_message


@pytest.mark.parametrize(
    ("values", "kind", "expected"),
    [
        (["x" * 5000], RowRejected, "a row with the key b?'key' takes 5"),
        (["x" * 100] * 50, Misconfigured, "a batch of 50 rows"),
    ],
    ids=["one row", "many rows"],
)
def test_a_batch_that_a_broker_refuses_as_too_large_is_reported_with_the_way_out(
    kafka: Broker, values: list[str], kind: type[EpochalError], expected: str
) -> None:
    topic = kafka.topic()
    life = kafka.life(topic, key="k", value="v")
    rows = pa.table({"k": ["key"] * len(values), "v": values})
    handout = life.begin(0)
    shrink(kafka, topic, 2000)
    writer = life.writer(rows, 0, handout=handout)
    for batch in rows.to_batches():
        writer.write(batch)
    with pytest.raises(kind, match=expected) as caught:
        writer.prepare()
    assert "max.message.bytes" in caught.value.hint or "batch_bytes=" in caught.value.hint
    writer.abort()
    assert kafka.messages(topic) == []
    assert not kafka.open_transactions(life.identity.tag)


@pytest.mark.parametrize("kind", ["gzip", "snappy", "lz4", "zstd"])
def test_rows_that_compression_makes_longer_still_fit(kafka: Broker, kind: str) -> None:
    limit = 200_000
    topic = kafka.topic(max_message_bytes=str(limit))
    life = kafka.life(topic, value="v", compression=kind)
    halves = [os.urandom((limit - 61) // 2 - 36) for _ in range(2)]
    whole = os.urandom(limit - 61 - 36)
    life.write(0, pa.table({"v": pa.array([*halves, whole], pa.binary())}))
    assert sorted(message.value() for message in kafka.messages(topic)) == sorted([*halves, whole])


def test_a_partition_that_is_not_there_rejects_its_row(kafka: Broker) -> None:
    life = kafka.life(kafka.topic(partitions=2), value="v", partition="p")
    rows = pa.table({"v": ["x"], "p": pa.array([5], pa.int32())})
    with pytest.raises(RowRejected, match="partition 5"):
        life.prepare(0, rows)


def test_partitions_that_are_added_are_used_by_all_tasks_of_an_epoch(kafka: Broker) -> None:
    topic = kafka.topic(partitions=1)
    life = kafka.life(topic, key="id")
    life.write(0, some(*range(20)))
    kafka.add_partitions(topic, 4)
    life.write(1, some(*range(20, 40)))
    assert {message.partition() for message in kafka.messages(topic)} == {0}
    life.committer._limits_read_s = float("-inf")
    life.write(2, some(*range(40, 80)), some(*range(80, 120)))
    assert {message.partition() for message in kafka.messages(topic)} == {0, 1, 2, 3}
    assert kafka.ids(topic) == list(range(120))


def checked(life, rows: pa.Table) -> None:
    life.committer.check(rows.schema)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"key": "nothing"}, "none of the columns id, name"),
        ({"value": "nothing"}, "none of the columns id, name"),
        ({"value": as_json("nothing")}, "none of the columns id, name"),
        ({"partition": "name"}, "partition must be an integer"),
        ({"timestamp": "name"}, "timestamp must be"),
        ({"headers": "name"}, "headers must be"),
        ({"topic_from": "id"}, "topic_from must be text"),
        ({"key": "id", "order_by": "id"}, "order_by= sorts on Spark"),
    ],
    ids=str,
)
def test_columns_that_do_not_fit_are_refused_at_the_start(kafka: Broker, options, expected) -> None:
    life = kafka.life(kafka.topic(), **options)
    with pytest.raises(Misconfigured, match=expected):
        checked(life, some(1))


def test_nested_columns_are_values_as_json_only(kafka: Broker) -> None:
    rows = pa.table({"id": [1], "tags": [["a"]]})
    checked(kafka.life(kafka.topic()), rows)
    with pytest.raises(Misconfigured, match="no plain text"):
        checked(kafka.life(kafka.topic(), value="tags"), rows)


def test_a_cluster_that_can_not_be_reached_is_reported(kafka: Broker) -> None:
    sink = Kafka("127.0.0.1:1", topic="t", options={"request.timeout.ms": "500"})
    life = kafka.keep(type(kafka.life("t"))(sink=sink))
    with pytest.raises(TryAgain, match="no broker can be reached"):
        checked(life, some(1))


def test_a_timeout_beyond_the_brokers_is_refused(kafka: Broker) -> None:
    life = kafka.life(kafka.topic(), transaction_timeout_s=1e6)
    with pytest.raises(Misconfigured, match="don't allow a transaction of 1000000 s"):
        checked(life, some(1))


def test_the_brokers_are_asked_what_they_allow(kafka: Broker) -> None:
    abilities = kafka.life(kafka.topic()).committer.check(some(1).schema)
    found = {ability.name: ability for ability in abilities}
    assert found["time to decide"].granted
    assert "900 s" in found["time to decide"].because
    assert found["clearing up"].granted


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kafka.acks": "1"}, "exactly-once needs all"),
        ({"kafka.enable.idempotence": "false"}, "exactly-once needs true"),
        ({"kafka.transactional.id": "mine"}, "transactional_id_prefix"),
        ({"kafka.bootstrap.server": "x:1"}, "known here"),
        ({"kafka.batch.size": "many"}, "a number"),
        ({"kafka.security.protocol": "TLS"}, "one of PLAINTEXT"),
        ({"kafka.ssl.truststore.type": "JKS"}, "PEM"),
    ],
    ids=str,
)
def test_settings_that_break_the_promise_or_are_unknown_are_refused(options, expected) -> None:
    with pytest.raises(Misconfigured) as caught:
        Kafka("b:9092", topic="t", options=options)
    assert expected in str(caught.value)


def test_settings_by_the_names_of_spark_are_taken_and_secrets_stay_hidden() -> None:
    jaas = 'org.apache.kafka…ScramLoginModule required username="etl" password="hunter2";'
    sink = Kafka(
        "b1:9092, b2:9092",
        topic="t",
        options={
            "kafka.security.protocol": "SASL_SSL",
            "kafka.sasl.mechanism": "SCRAM-SHA-256",
            "kafka.sasl.jaas.config": jaas,
            "kafka.compression.type": "zstd",
            "kafka.batch.size": "2000",
            "kafka.transaction.timeout.ms": "60000",
        },
    )
    again = pickle.loads(pickle.dumps(sink))
    assert again.bootstrap == "b1:9092,b2:9092"
    assert (again.compression, again.batch_bytes, again.transaction_timeout_s) == ("zstd", 2000, 60)
    settings = again.server.settings
    assert (settings.username, settings.mechanism) == ("etl", "SCRAM-SHA-256")
    assert settings.password.reveal() == "hunter2"
    for expected in (repr(again), str(again.describe()), repr(again.server), *again.grants()):
        assert "hunter2" not in expected


def test_grants_name_what_the_sink_touches() -> None:
    sink = Kafka("b:9092", topic="orders", transactional_id_prefix="shop-", commit_offsets="lag")
    expected = "\n".join(sink.grants("User:etl"))
    for part in ("--topic orders", "--transactional-id shop-epochal-", "--group lag", "User:etl"):
        assert part in expected


def test_ids_and_groups_begin_with_the_prefix(kafka: Broker) -> None:
    life = kafka.life(kafka.topic(), transactional_id_prefix="shop-")
    receipts = life.prepare(0, some(1))
    assert kafka.open_transactions("shop-epochal-") == [str(receipts[0].token["transactional_id"])]
    (found,) = life.committer.in_doubt()
    assert found.handle == receipts[0].handle
    life.abort(0, receipts)


def test_a_handout_is_needed(kafka: Broker) -> None:
    life = kafka.life(kafka.topic())
    with pytest.raises(EpochalError, match="got no handout"):
        life.writer(some(1), EpochNumber(0), handout=None)
