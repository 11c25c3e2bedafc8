"""`BatchSender`: batches of one transaction, several under way per partition, with acks=all.

Batches of a partition have sequence numbers; a broker appends them only in order, and each once. So
a batch without an answer is sent again unchanged, and is appended once:

    sent       0  1  2       1 fails: its leader has moved
    answered   0             2 is refused (out of order) or, if 1 did arrive, appended
    then       wait for 2 as well; ask for the leader; send 1, wait, send 2, wait
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, RowRejected, TryAgain
from epochal.kafka import batches
from epochal.kafka.batches import Columns, Producer
from epochal.kafka.client import Ask, Client, UnknownTopic
from epochal.kafka.cluster import Coordinator, Leader
from epochal.kafka.codes import Code
from epochal.kafka.compression import Compression
from epochal.kafka.connection import Pending
from epochal.kafka.errors import MAY_HAVE_HAPPENED, error_for, is_transient
from epochal.kafka.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from epochal.sinks.kafka.errors import ENDED, require_ongoing, require_rights
from epochal.sinks.kafka.receipts import WITNESSES_MAX, OpenTransaction, Witness

_UNDER_WAY_MAX = 5
"""A broker remembers this many batches of a producer, and knows a repetition only of those."""
_V1_PRODUCE_MAX = 11
_ACKS_ALL = -1


@dataclass(slots=True)
class _Batch:
    request: ProduceRequest
    count: int
    description: str
    """Which rows these are, for messages."""
    pending: Pending[ProduceResponse] | None


class _Queue:
    """The batches of one partition that are not acknowledged yet, the oldest first."""

    def __init__(self) -> None:
        self.sequence = 0
        self.under_way: deque[_Batch] = deque()
        self.last_offset = -1


class BatchSender:
    """Sends the rows of one transaction. For one thread."""

    def __init__(
        self,
        client: Client,
        txn: OpenTransaction,
        *,
        compression: Compression,
        batch_bytes_max: int,
        limit_of: Callable[[str], int],
    ) -> None:
        """`limit_of`: what a topic accepts. Asked for batches above `batch_bytes_max`."""
        self._client = client
        self._txn = txn
        self._compression = compression
        self._batch_bytes_max = batch_bytes_max
        self._limit_of = limit_of
        self._queues: dict[Leader, _Queue] = {}
        self.opened_s: float | None = None
        """When the first request of the transaction was sent, by `time.monotonic`."""
        self.bytes = 0

    @property
    def partitions(self) -> int:
        return len(self._queues)

    def join(self, targets: set[Leader]) -> None:
        """Add partitions to the transaction; in the newer protocol the first batch does that."""
        new = sorted(targets - self._queues.keys(), key=lambda one: (one.topic, one.partition))
        if not new:
            return
        if self.opened_s is None:
            self.opened_s = time.monotonic()
        if not self._txn.is_v2:
            self._add(new)
        for target in new:
            self._queues[target] = _Queue()

    def send(self, target: Leader, rows: Columns) -> None:
        """Send one batch. Waits only if too many batches of its partition are under way."""
        queue = self._queues[target]
        while len(queue.under_way) >= _UNDER_WAY_MAX:
            self._settle(target, queue)
        parts = batches.encode(
            rows,
            default_timestamp_ms=int(time.time() * 1000),
            compression=self._compression,
            producer=Producer(
                producer_id=self._txn.producer_id,
                producer_epoch=self._txn.producer_epoch,
                base_sequence=queue.sequence,
                is_transactional=True,
            ),
        )
        records = b"".join(parts)
        description = _describe(rows, len(records))
        if len(records) > self._batch_bytes_max:
            limit = self._limit_of(target.topic)
            if len(records) > limit:
                raise _too_large(target, description, len(rows), f"{limit} bytes")
        self.bytes += len(records)
        request = ProduceRequest(
            transactional_id=self._txn.transactional_id,
            acks=_ACKS_ALL,
            timeout_ms=30_000,
            topic_data=[
                TopicProduceData(
                    name=target.topic,
                    partition_data=[PartitionProduceData(index=target.partition, records=records)],
                )
            ],
        )
        queue.sequence = batches.next_sequence(queue.sequence, len(rows))
        pending = self._submitted(target, request)
        queue.under_way.append(_Batch(request, len(rows), description, pending))

    def finish(self) -> list[Witness]:
        """Wait for every acknowledgement. Returns the offsets of a few rows."""
        for target, queue in self._queues.items():
            while queue.under_way:
                self._settle(target, queue)
        return [
            Witness(target.topic, target.partition, queue.last_offset)
            for target, queue in self._queues.items()
            if queue.last_offset >= 0
        ][:WITNESSES_MAX]

    def drain(self) -> None:
        """Wait until nothing is under way any more, whatever the answers are."""
        for queue in self._queues.values():
            for batch in queue.under_way:
                self._await(batch)

    def _ask(self, target: Leader, request: ProduceRequest) -> Ask[ProduceResponse]:
        return Ask(
            request=request,
            to=target,
            is_repeatable=True,
            code_of=lambda answer: _result(answer).error_code,
            version_max=None if self._txn.is_v2 else _V1_PRODUCE_MAX,
        )

    def _submitted(
        self, target: Leader, request: ProduceRequest
    ) -> Pending[ProduceResponse] | None:
        try:
            return self._client.submit(self._ask(target, request))
        except (TryAgain, OutcomeUnknown, UnknownTopic):
            # Asked again when its answer is awaited, with time for a topic that is new.
            self._client.forget(target)
            return None

    def _settle(self, target: Leader, queue: _Queue) -> None:
        """Wait for the oldest batch of a partition; if it failed, resend all in order."""
        if self._take_answer(target, queue):
            return
        for later in list(queue.under_way)[1:]:
            self._await(later)
        self._client.forget(target)
        while queue.under_way:
            first = queue.under_way[0]
            first.pending = None
            result = _result(self._resend(target, first))
            self._require_appended(target, first, result)
            self._acknowledged(queue, result)

    def _take_answer(self, target: Leader, queue: _Queue) -> bool:
        first = queue.under_way[0]
        if first.pending is None:
            return False
        try:
            result = _result(first.pending.result())
        except (TryAgain, OutcomeUnknown):
            return False
        if is_transient(result.error_code) or result.error_code in MAY_HAVE_HAPPENED:
            return False
        self._require_appended(target, first, result)
        self._acknowledged(queue, result)
        return True

    def _await(self, batch: _Batch) -> None:
        """Wait for a batch behind a failed one; it is sent again whatever the answer is."""
        if batch.pending is None:
            return
        try:
            batch.pending.wait()
        except EpochalError:
            return

    def _resend(self, target: Leader, batch: _Batch) -> ProduceResponse:
        (answer,) = self._client.ask_all([self._ask(target, batch.request)])
        if isinstance(answer, EpochalError):
            # The attempt fails here, and its transaction is aborted.
            raise TryAgain(answer.message, answer.hint) from answer
        return answer

    def _acknowledged(self, queue: _Queue, result: PartitionProduceResponse) -> None:
        batch = queue.under_way.popleft()
        if result.error_code == Code.NONE and result.base_offset >= 0:
            queue.last_offset = result.base_offset + batch.count - 1

    def _require_appended(
        self, target: Leader, batch: _Batch, result: PartitionProduceResponse
    ) -> None:
        code = result.error_code
        # A sequence number that the broker knows: the first answer was lost, the rows are there.
        if code in (Code.NONE, Code.DUPLICATE_SEQUENCE_NUMBER):
            return
        require_rights(code, topic=("Write", target.topic))
        if code in (Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE):
            raise _too_large(target, batch.description, batch.count, "less")
        about = f"writing to {target.topic}-{target.partition}"
        if code in ENDED:
            require_ongoing(code, self._txn, about)
        error = error_for(code, about, result.error_message)
        if isinstance(error, OutcomeUnknown):
            raise TryAgain(error.message, error.hint)
        raise error

    def _add(self, targets: list[Leader]) -> None:
        txn = self._txn
        topics: dict[str, list[int]] = {}
        for target in targets:
            topics.setdefault(target.topic, []).append(target.partition)
        request = AddPartitionsToTxnRequest(
            v3_and_below_transactional_id=txn.transactional_id,
            v3_and_below_producer_id=txn.producer_id,
            v3_and_below_producer_epoch=txn.producer_epoch,
            v3_and_below_topics=[
                AddPartitionsToTxnTopic(name=topic, partitions=indexes)
                for topic, indexes in topics.items()
            ],
        )
        answer = self._client.ask(
            request, Coordinator(txn.transactional_id), is_repeatable=True, code_of=_first_error
        )
        require_rights(_first_error(answer), topic=("Write", ", ".join(topics)))
        require_ongoing(_first_error(answer), txn, f"adding {', '.join(topics)} to the transaction")


def _describe(rows: Columns, size: int) -> str:
    if len(rows) > 1:
        return f"a batch of {len(rows)} rows takes {size} bytes"
    key = "" if rows.key is None else f" with the key {rows.key[0].as_py()!r}"
    return f"a row{key} takes {size} bytes as a record"


def _too_large(target: Leader, description: str, count: int, limit: str) -> EpochalError:
    """With several rows, no row is too large: the sink does not know the limit of the topic."""
    fact = f"{description}, and {target.topic} takes {limit}"
    if count > 1:
        return Misconfigured(
            fact,
            "a smaller batch_bytes=, or the right DescribeConfigs on the topic",
        )
    return RowRejected(
        fact, "max.message.bytes of the topic, compression=, or leave such rows out: where="
    )


def _result(answer: ProduceResponse) -> PartitionProduceResponse:
    return answer.responses[0].partition_responses[0]


def _first_error(answer: AddPartitionsToTxnResponse) -> int:
    """The first code that is not the echo of another partition's failure."""
    codes = [
        result.partition_error_code
        for topic in answer.results_by_topic_v3_and_below
        for result in topic.results_by_partition
    ]
    failed = [code for code in codes if code != Code.NONE]
    echo = Code.OPERATION_NOT_ATTEMPTED
    return next((code for code in failed if code != echo), failed[0] if failed else Code.NONE)
