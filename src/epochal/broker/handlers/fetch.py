"""Fetch: read batches, or wait until there are some.

Fetch sessions are not kept: every answer has session 0, so clients send whole requests.
"""

from __future__ import annotations

from typing import cast

from epochal.broker.broker import Broker, Call, Later
from epochal.broker.core.state import LEADER_EPOCH
from epochal.broker.fetch_waiters import FetchWaiter
from epochal.errors import CorruptRecord
from epochal.kafka.codes import Code
from epochal.kafka.messages.fetch import (
    AbortedTransaction,
    FetchableTopicResponse,
    FetchPartition,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from epochal.kafka.primitives import Records

VERSIONS = range(4, 13)
_COMMITTED = 1


def handle(call: Call, request: FetchRequest) -> FetchResponse | None:
    if request.session_id:
        return FetchResponse(error_code=Code.FETCH_SESSION_ID_NOT_FOUND)
    reading = _Reading(call.broker, request)
    answer = reading.answer()
    if reading.is_enough or request.max_wait_ms <= 0:
        return answer
    _wait(call.broker, reading, request, call.later())
    return None


class _Reading:
    """Reads all partitions of a request once."""

    def __init__(self, broker: Broker, request: FetchRequest) -> None:
        self._broker = broker
        self._request = request
        self._left = min(request.max_bytes, broker.settings.fetch_bytes_max)
        self.is_committed = request.isolation_level == _COMMITTED
        self.size = 0
        self.is_failed = False
        self.places: dict[int, int] = {}
        """Partition numbers and offsets, for waiting."""

    @property
    def is_enough(self) -> bool:
        return self.is_failed or self.size >= self._request.min_bytes or not self.places

    def answer(self) -> FetchResponse:
        return FetchResponse(
            responses=[
                FetchableTopicResponse(
                    topic=topic.topic,
                    partitions=[self._read(topic.topic, part) for part in topic.partitions],
                )
                for topic in self._request.topics
            ]
        )

    def _read(  # noqa: PLR0911  a line for each refusal
        self, topic: str, part: FetchPartition
    ) -> PartitionData:
        partition = self._broker.partition(topic, part.partition)
        if partition is None:
            return self._failed(part, Code.UNKNOWN_TOPIC_OR_PARTITION)
        if part.current_leader_epoch > LEADER_EPOCH:
            return self._failed(part, Code.UNKNOWN_LEADER_EPOCH)
        start = part.fetch_offset
        if not partition.log_start <= start <= partition.end:
            return self._failed(part, Code.OFFSET_OUT_OF_RANGE)
        self.places[partition.number] = start
        stable = partition.stable_end
        end = stable if self.is_committed else partition.end
        found = PartitionData(
            partition_index=part.partition,
            high_watermark=partition.end,
            last_stable_offset=stable,
            log_start_offset=partition.log_start,
            aborted_transactions=[] if self.is_committed else None,
            records=b"",
        )
        if start >= end or (self._left <= 0 and self.size):
            return found
        limit = min(part.partition_max_bytes, self._left)
        log = self._broker.store.logs[partition.number]
        try:
            data, before = log.answer(start, end, limit)
        except CorruptRecord as error:
            return self._failed(part, self._broker.report_damage(error))
        if self.size and len(data) > self._left:
            # Only the first partition with anything may go beyond the limit.
            return found
        found.records = cast("Records", data)  # or bytes of a file, which the connection sends
        self.size += len(data)
        self._left -= len(data)
        if self.is_committed and partition.aborted:
            found.aborted_transactions = [
                AbortedTransaction(producer_id=gone.producer_id, first_offset=gone.first_offset)
                for gone in partition.aborted_between(start, min(before, end))
            ]
        return found

    def _failed(self, part: FetchPartition, code: Code) -> PartitionData:
        self.is_failed = True
        return PartitionData(
            partition_index=part.partition,
            error_code=code,
            high_watermark=-1,
            last_stable_offset=-1,
            log_start_offset=-1,
            aborted_transactions=[] if self.is_committed else None,
            records=b"",
        )


def _wait(broker: Broker, reading: _Reading, request: FetchRequest, later: Later) -> None:
    def look_again() -> None:
        if not later.is_over:
            later.answer(_Reading(broker, request).answer())

    waiter = FetchWaiter(
        reading.places,
        request.min_bytes - reading.size,
        look_again,
        is_committed=reading.is_committed,
    )
    broker.fetch_waiters.add(waiter)

    def give_up() -> None:
        broker.fetch_waiters.remove(waiter)
        look_again()

    later.after(request.max_wait_ms, give_up, lambda: broker.fetch_waiters.remove(waiter))
