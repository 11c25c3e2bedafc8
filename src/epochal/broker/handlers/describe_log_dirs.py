"""DescribeLogDirs: the data folder, and how large each partition in it is."""

from __future__ import annotations

from collections.abc import Iterator

from epochal.broker.broker import Call
from epochal.broker.core.topics import Topic
from epochal.kafka.messages.describe_log_dirs import (
    DescribeLogDirsPartition,
    DescribeLogDirsRequest,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)

VERSIONS = range(1, 6)


def handle(call: Call, request: DescribeLogDirsRequest) -> DescribeLogDirsResponse:
    store = call.broker.store
    total, usable = store.space()
    here = DescribeLogDirsResult(
        log_dir=store.folder,
        topics=[_result(call, topic, indexes) for topic, indexes in _asked(call, request)],
        total_bytes=total,
        usable_bytes=usable,
    )
    return DescribeLogDirsResponse(results=[here])


def _asked(call: Call, request: DescribeLogDirsRequest) -> Iterator[tuple[Topic, list[int]]]:
    topics = call.broker.state.topics.by_name
    if request.topics is None:
        yield from ((topic, list(range(len(topic.partitions)))) for topic in topics.values())
        return
    for asked in request.topics:
        topic = topics.get(asked.topic)
        if topic is not None:
            yield topic, [index for index in asked.partitions if index < len(topic.partitions)]


def _result(call: Call, topic: Topic, indexes: list[int]) -> DescribeLogDirsTopic:
    logs = call.broker.store.logs
    return DescribeLogDirsTopic(
        name=topic.name,
        partitions=[
            DescribeLogDirsPartition(
                partition_index=index, partition_size=logs[topic.partitions[index].number].size
            )
            for index in indexes
            if index >= 0
        ],
    )
