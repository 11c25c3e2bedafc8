"""Segments, their index, retention, and readers who wait."""

from __future__ import annotations

import pyarrow as pa
import pytest
from memory_disk import MemoryDisk
from table import START_MS, Table

from epochal.broker.broker import Broker
from epochal.broker.core.entries import SlotTaken
from epochal.broker.core.settings import Settings
from epochal.broker.storage.store import Store
from epochal.kafka import batch_reader, batches
from epochal.kafka.batches import Columns
from epochal.kafka.codes import Code
from epochal.kafka.compression import Compression
from epochal.kafka.messages import create_topics, delete_topics, fetch, list_offsets, produce
from epochal.kafka.messages import delete_records as deleting


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


def test_a_topic_with_the_brokers_time_takes_producers_whose_clock_is_ahead() -> None:
    ahead_ms = START_MS + 86_400_000
    table = table_with(message_timestamp_type="LogAppendTime")
    write(table, b"row", timestamps_ms=[ahead_ms])
    assert since(table, START_MS) == (0, START_MS)
    with pytest.raises(AssertionError, match="too far in the future"):
        write(table_with(), b"row", timestamps_ms=[ahead_ms])


def test_a_time_is_looked_up_from_the_start_of_the_log_on() -> None:
    table = table_with()
    write(table, b"a", b"b", b"c", timestamps_ms=[START_MS - 300, START_MS - 100, START_MS - 200])
    write(table, b"d", timestamps_ms=[START_MS - 50])
    assert since(table, START_MS - 150) == (1, START_MS - 100)
    delete_records(table, 2)
    assert since(table, 0) == (2, START_MS - 200)
    assert since(table, START_MS - 150) == (3, START_MS - 50)
    for _ in range(5):
        write(table, b"." * 900, timestamps_ms=[START_MS])  # the first ones go to a segment
    assert since(table, 0) == (2, START_MS - 200)
    delete_records(table, 3)
    assert since(table, 0) == (3, START_MS - 50)


def delete_records(table: Table, offset: int) -> None:
    part = deleting.DeleteRecordsPartition(partition_index=0, offset=offset)
    request = deleting.DeleteRecordsRequest(
        topics=[deleting.DeleteRecordsTopic(name="t", partitions=[part])]
    )
    (result,) = table.ask(request).topics[0].partitions
    assert result.error_code == 0, result


def test_old_records_go_from_memory_too_and_those_without_a_time_stay() -> None:
    table = table_with(retention_ms="60000")
    write(table, b"old", timestamps_ms=[START_MS - 70_000])
    write(table, b"new", timestamps_ms=[START_MS - 50_000])
    log = next(iter(table.store.logs.values()))
    assert not log.segments
    table.broker.clean_up()
    table.tick()
    partition = table.broker.partition("t", 0)
    assert partition is not None
    assert partition.log_start == 1
    assert [end_offset for end_offset, _, _ in log.in_memory()] == [2]
    again = table_with(table.disk.restarted())
    assert read(again, 1) == [b"new"]
    again.pass_time(60_000)
    again.broker.clean_up()
    again.tick()
    assert again.broker.partition("t", 0).log_start == 2
    write(again, b"timeless", timestamps_ms=[-1])
    again.broker.clean_up()
    again.tick()
    assert read(again, 2) == [b"timeless"]


def test_a_segment_ends_by_time_so_that_retention_can_take_it() -> None:
    table = table_with(segment_ms="60000")
    for minute in range(6):
        for _ in range(3):
            write(table, b"." * 900, timestamps_ms=[START_MS + minute * 40_000])
    log = next(iter(table.store.logs.values()))
    assert len(log.segments) == 3
    assert len(read(table)) == 18


def test_a_batch_that_is_deleted_in_its_own_tick_is_still_known_after_a_crash() -> None:
    table = table_with()

    def send(sequence: int, size: int) -> int:
        who = batches.Producer(producer_id=7, producer_epoch=0, base_sequence=sequence)
        rows = Columns(value=pa.array([b"." * size], pa.binary()))
        encoded = batches.encode(rows, default_timestamp_ms=START_MS, producer=who)
        part = produce.PartitionProduceData(index=0, records=b"".join(encoded))
        topic = produce.TopicProduceData(name="t", partition_data=[part])
        request = produce.ProduceRequest(acks=-1, topic_data=[topic])
        (result,) = table.ask(request, tick=False).responses[0].partition_responses
        assert result.error_code == 0, Code(result.error_code)
        return int(result.base_offset)

    assert send(0, 10) == 0
    partition = table.broker.partition("t", 0)
    assert partition is not None
    table.broker.state.move_log_start(partition, 1)
    assert send(1, 3_000) == 1  # more than is kept in memory
    table.tick()
    table = table_with(table.disk.restarted())
    assert send(0, 10) == 0
    assert send(2, 10) == 2


def test_what_little_a_partition_has_in_memory_goes_with_the_snapshot() -> None:
    """A file for each of thousands of partitions would have to be synced: that takes seconds."""
    table = table_with()
    write(table, b"one")
    for _ in range(2):
        table.store.roll(table.broker.state.known())
        assert not [path for path in table.disk.files if path.endswith(".segment")]
        table = table_with(table.disk.restarted())
        assert read(table) == [b"one"]
    write(table, b"." * 3_000)  # both go to a segment
    assert len(next(iter(table.store.logs.values())).segments) == 1
    write(table, b"three")
    for _ in range(2):
        assert read(table) == [b"one", b"." * 3_000, b"three"]
        table = table_with(table.disk.restarted())


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


def test_a_member_knows_its_slot_again_and_keeps_old_claims_once() -> None:
    disk = MemoryDisk()

    def opened() -> Store:
        store = Store(disk)
        Broker(Settings(), store, START_MS, is_member=True)
        return store

    claims = list(range(1, 50_000, 10))
    first = SlotTaken(49_991, 7, 5_000, "ab" * 16, "holder", claims)
    store = opened()
    store.keep([], b"", first)
    size = sum(map(len, disk.files.values()))
    for number in range(1, 100):
        store.keep([], b"", first._replace(number=first.number + number, crc=number))
    assert sum(map(len, disk.files.values())) < 2 * size
    again = opened()
    assert again.position == first._replace(number=50_090, crc=99)
    taken_over = SlotTaken(50_091, 8, 5_001, "cd" * 16, "another", [*claims, 50_091])
    again.keep([], b"", taken_over)
    again.keep([], b"", taken_over._replace(number=50_092, crc=9))
    assert opened().position == taken_over._replace(number=50_092, crc=9)
