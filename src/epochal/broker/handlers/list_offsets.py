"""ListOffsets: the first offset, the last, and the first since a time.

Only the last looks into batches, which is done beside the loop.
"""

from __future__ import annotations

from collections.abc import Callable

from epochal.broker.broker import Call
from epochal.broker.core.partitions import Partition
from epochal.broker.core.state import LEADER_EPOCH
from epochal.broker.record_section import first_since
from epochal.errors import CorruptRecord
from epochal.kafka.codes import Code
from epochal.kafka.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from epochal.kafka.primitives import Malformed, Oversized

VERSIONS = range(1, 9)
_MAX_TIMESTAMP = -3
_EPOCHS_FROM = 4
_COMMITTED = 1


def handle(call: Call, request: ListOffsetsRequest) -> ListOffsetsResponse | None:
    asked = _Asked(call, is_committed=request.isolation_level == _COMMITTED)
    answer = ListOffsetsResponse(
        topics=[
            ListOffsetsTopicResponse(
                name=topic.name,
                partitions=[asked.find(topic.name, part) for part in topic.partitions],
            )
            for topic in request.topics
        ]
    )
    if not asked.searches:
        return answer
    later = call.later()

    def search() -> None:
        for one in asked.searches:
            one()

    def then(_: None) -> None:
        for _number in range(asked.oversized):
            call.broker.limit_reached("unpacked_bytes_max")
        later.answer(answer)

    call.broker.aside(search, then)
    return None


class _Asked:
    """The partitions of one request, and the batches that have to be opened for it."""

    def __init__(self, call: Call, *, is_committed: bool) -> None:
        self._call = call
        self._is_committed = is_committed
        self.searches: list[Callable[[], None]] = []
        """Each opens a batch and fills in its part of the answer; runs beside the loop."""
        self.oversized = 0

    def find(self, topic: str, part: ListOffsetsPartition) -> ListOffsetsPartitionResponse:
        broker = self._call.broker
        answer = ListOffsetsPartitionResponse(partition_index=part.partition_index)
        partition = broker.partition(topic, part.partition_index)
        if partition is None:
            answer.error_code = Code.UNKNOWN_TOPIC_OR_PARTITION
            return answer
        if part.current_leader_epoch > LEADER_EPOCH:
            answer.error_code = Code.UNKNOWN_LEADER_EPOCH
            return answer
        end = partition.stable_end if self._is_committed else partition.end
        match part.timestamp:
            case -1:  # the end
                self._set(answer, -1, end)
            case -2 | -4:  # the start; as nothing is kept elsewhere, the local one too
                self._set(answer, -1, partition.log_start)
            case _:
                try:
                    self._since(answer, partition, part.timestamp, end)
                except CorruptRecord as error:
                    answer.error_code = broker.report_damage(error)
        return answer

    def _set(self, answer: ListOffsetsPartitionResponse, timestamp_ms: int, offset: int) -> None:
        answer.timestamp, answer.offset = timestamp_ms, offset
        if self._call.version >= _EPOCHS_FROM:
            answer.leader_epoch = LEADER_EPOCH

    def _since(
        self,
        answer: ListOffsetsPartitionResponse,
        partition: Partition,
        timestamp_ms: int,
        end: int,
    ) -> None:
        log = self._call.broker.store.logs[partition.number]
        if timestamp_ms == _MAX_TIMESTAMP:
            timestamp_ms = log.latest_timestamp()
        if timestamp_ms < 0:
            return
        start = partition.log_start
        batches = log.since(timestamp_ms, start)
        bytes_max = self._call.broker.settings.unpacked_bytes_max

        def search() -> None:
            try:
                found = (first_since(one, timestamp_ms, start, bytes_max) for one in batches)
                first = next(filter(None, found), None)
            except Malformed as error:
                answer.error_code = Code.CORRUPT_MESSAGE
                self.oversized += isinstance(error, Oversized)
                return
            if first is not None and first[1] < end:
                self._set(answer, *first)

        if batches:
            self.searches.append(search)
