"""Segments, their index, retention, and readers who wait."""

from __future__ import annotations

import pyarrow as pa
from memory_disk import MemoryDisk
from table import START_MS, Table

from epochal.kafka import batch_reader, batches
from epochal.kafka.batches import Columns
from epochal.kafka.codes import Code
from epochal.kafka.compression import Compression
from epochal.kafka.messages import create_topics, delete_topics, fetch, list_offsets, produce


def table_with(disk: MemoryDisk | None = None, **configs: str) -> Table:
    table = Table(disk, tail_bytes_max=2_000, journal_bytes_max=100_000)
    if "t" not in table.broker.state.topics.by_name:
        wanted = create_topics.CreatableTopic(
            name="t",
            num_partitions=1,
            replication_factor=1,
            configs=[
                create_topics.CreatableTopicConfig(name=key.replace("_", "."), value=value)
                for key, value in configs.items()
            ],
        )
        (made,) = table.ask(create_topics.CreateTopicsRequest(topics=[wanted])).topics
        assert made.error_code == 0, made
    return table


def write(
    table: Table,
    *rows: bytes,
    timestamps_ms: list[int] | None = None,
    compression: Compression = Compression.NONE,
) -> int:
    stamps = None if timestamps_ms is None else pa.array(timestamps_ms, pa.int64())
    columns = Columns(value=pa.array(list(rows), pa.binary()), timestamp_ms=stamps)
    records = b"".join(
        batches.encode(columns, default_timestamp_ms=table.now_ms, compression=compression)
    )
    part = produce.PartitionProduceData(index=0, records=records)
    request = produce.ProduceRequest(
        acks=-1, topic_data=[produce.TopicProduceData(name="t", partition_data=[part])]
    )
    (result,) = table.ask(request).responses[0].partition_responses
    assert result.error_code == 0, result
    return result.base_offset


def fetching(offset: int, **options: int) -> fetch.FetchRequest:
    part = fetch.FetchPartition(
        partition=0, fetch_offset=offset, partition_max_bytes=options.pop("bytes_max", 5_000)
    )
    return fetch.FetchRequest(
        max_bytes=1 << 20, topics=[fetch.FetchTopic(topic="t", partitions=[part])], **options
    )


def read(table: Table, offset: int = 0, bytes_max: int = 5_000) -> list[bytes]:
    rows: list[bytes] = []
    while True:
        (result,) = table.ask(fetching(offset, bytes_max=bytes_max)).responses[0].partitions
        assert result.error_code == 0, result
        found = list(batch_reader.read(result.records or b""))
        if not found:
            return rows
        for batch in found:
            listed = batch.columns()
            pairs = zip(listed["offset"].to_pylist(), listed["value"].to_pylist(), strict=True)
            rows += [value for at, value in pairs if at >= offset]
        offset = found[-1].last_offset + 1


def since(table: Table, timestamp_ms: int) -> tuple[int, int]:
    part = list_offsets.ListOffsetsPartition(partition_index=0, timestamp=timestamp_ms)
    topic = list_offsets.ListOffsetsTopic(name="t", partitions=[part])
    (result,) = table.ask(list_offsets.ListOffsetsRequest(topics=[topic])).topics[0].partitions
    return result.offset, result.timestamp


def test_every_offset_is_found_in_every_segment_also_after_a_restart_without_indexes() -> None:
    table = table_with(segment_bytes="40000")
    rows = []
    for number in range(120):
        batch = [b"%d-%d " % (number, n) + b"." * 300 for n in range(3)]
        assert write(table, *batch) == len(rows)
        rows += batch
    log = next(iter(table.store.logs.values()))
    assert len(log.segments) > 2
    assert any(len(segment.positions) > 1 for segment in log.segments)
    restarts = [table, table_with(table.disk.restarted())]
    bare = table.disk.restarted()
    for path in [path for path in bare.files if path.endswith(".index")]:
        del bare.files[path]
    restarts.append(table_with(bare))
    wrong = table.disk.restarted()
    for path in [path for path in wrong.files if path.endswith(".index")]:
        wrong.files[path] = bytearray(b"\x01" * len(wrong.files[path]))
    restarts.append(table_with(wrong))
    for one in restarts:
        assert read(one) == rows
        for offset in (0, 1, 59, 60, 100, 200, 358, 359):
            assert read(one, offset, bytes_max=10) == rows[offset:]


def test_records_are_found_by_time_in_every_compression() -> None:
    for compression in Compression:
        table = table_with(segment_bytes="3000")
        for number in range(30):
            stamps = [START_MS - 100_000 + number * 100 + n for n in range(5)]
            write(table, *[b"x" * 40] * 5, timestamps_ms=stamps, compression=compression)
        assert since(table, START_MS - 100_000) == (0, START_MS - 100_000)
        assert since(table, START_MS - 100_000 + 1_003) == (53, START_MS - 100_000 + 1_003)
        assert since(table, START_MS - 100_000 + 1_005) == (55, START_MS - 100_000 + 1_100)
        assert since(table, START_MS) == (-1, -1)
        assert since(table, -3) == (149, START_MS - 100_000 + 2_904)


def test_a_topic_may_have_the_brokers_time() -> None:
    table = table_with(message_timestamp_type="LogAppendTime")
    write(table, b"row", timestamps_ms=[5])
    assert since(table, 6) == (0, START_MS)
    assert read(table) == [b"row"]


def test_old_and_surplus_segments_go() -> None:
    table = table_with(segment_bytes="4000", retention_ms="60000")
    for number in range(20):
        write(table, b"%d " % number + b"." * 900)
        table.now_ms += 5_000
        table.broker.now_ms = table.now_ms
    partition = table.broker.partition("t", 0)
    assert partition is not None
    table.broker.clean_up()
    table.tick()
    assert 0 < partition.log_start < 20
    files = [path for path in table.disk.files if path.endswith(".segment")]
    assert len(files) == len(table.store.logs[partition.number].segments)
    (result,) = table.ask(fetching(0)).responses[0].partitions
    assert result.error_code == 1
    kept = read(table, partition.log_start)
    again = table_with(table.disk.restarted())
    assert again.broker.partition("t", 0).log_start == partition.log_start
    assert read(again, partition.log_start) == kept
    topic = table.broker.state.topics.by_name["t"]
    table.broker.state.topics.configure(topic, {"segment.bytes": "4000", "retention.bytes": "1"})
    table.broker.clean_up()
    table.tick()
    assert len(table.store.logs[partition.number].segments) == 1


def test_a_deleted_topic_leaves_nothing_behind() -> None:
    table = table_with()
    for _ in range(5):
        write(table, b"x" * 1_000)
    topics = table.broker.state.topics
    topics.delete(topics.by_name["t"])
    table.tick()
    assert not [path for path in table.disk.files if path.startswith("partitions/")]
    again = table_with(table.disk.restarted())
    assert read(again) == []


def test_a_reader_waits_for_enough_and_is_looked_at_once() -> None:
    table = table_with()
    waiting = table.begin(fetching(0, min_bytes=400, max_wait_ms=1_000))
    write(table, b"x" * 100)
    assert not waiting.is_over
    write(table, b"x" * 300)
    assert waiting.is_over
    (result,) = waiting.message.responses[0].partitions
    assert len(list(batch_reader.read(result.records))) == 2
    assert not table.broker.fetch_waiters._at


def test_a_reader_that_waits_at_a_topic_hears_at_once_that_it_was_deleted() -> None:
    table = table_with()
    write(table, b"x")
    waiting = table.begin(fetching(1, min_bytes=400, max_wait_ms=1 << 30))
    assert not waiting.is_over
    gone = delete_topics.DeleteTopicState(name="t")
    table.ask(delete_topics.DeleteTopicsRequest(topics=[gone]))
    (result,) = waiting.message.responses[0].partitions
    assert result.error_code == Code.UNKNOWN_TOPIC_OR_PARTITION
    assert not table.broker.fetch_waiters._at
