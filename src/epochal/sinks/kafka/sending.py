"""Sends batches inside one transaction, several under way a partition, each acknowledged by all.

Batches of a partition are numbered, and a broker takes them in order only and each once. So what
went unanswered is sent again as it was: it lands once. After a failure everything of that partition
that is under way is waited for, and then sent again one by one.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, RowRejected, TryAgain
from epochal.kafka import batches, faults
from epochal.kafka.batches import Columns, Producer
from epochal.kafka.client import Ask, Client
from epochal.kafka.cluster import Coordinator, Leader
from epochal.kafka.codes import Code
from epochal.kafka.compression import Compression
from epochal.kafka.connection import Pending
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
from epochal.sinks.kafka import rights
from epochal.sinks.kafka.ending import ENDED, require_going_on
from epochal.sinks.kafka.tokens import WITNESSES_MAX, Open, Witness

_UNDER_WAY_MAX = 5
"""A broker remembers this many batches of a producer: of older ones it can't tell a repetition."""
_PRODUCE_BEFORE_V2 = 11
_ACKS_ALL = -1


@dataclass(slots=True)
class _Batch:
    request: ProduceRequest
    count: int
    told: str
    """Which rows these are, for people."""
    pending: Pending[ProduceResponse] | None


class _Line:
    """The batches of one partition that are not acknowledged yet, the oldest first."""

    def __init__(self) -> None:
        self.sequence = 0
        self.under_way: deque[_Batch] = deque()
        self.last_offset = -1


class Sending:
    """One transaction's rows on their way. For one thread."""

    def __init__(
        self, client: Client, txn: Open, *, compression: Compression, batch_bytes_max: int
    ) -> None:
        self._client = client
        self._txn = txn
        self._compression = compression
        self._batch_bytes_max = batch_bytes_max
        self._lines: dict[Leader, _Line] = {}
        self.bytes = 0

    @property
    def partitions(self) -> int:
        return len(self._lines)

    def join(self, targets: set[Leader]) -> None:
        """Make partitions part of the transaction; in the newer protocol the first batch does."""
        new = sorted(targets - self._lines.keys(), key=lambda one: (one.topic, one.partition))
        if not new:
            return
        if not self._txn.is_v2:
            self._add(new)
        for target in new:
            self._lines[target] = _Line()

    def send(self, target: Leader, rows: Columns) -> None:
        """Send one batch. Waits only where too many of its partition are under way."""
        line = self._lines[target]
        while len(line.under_way) >= _UNDER_WAY_MAX:
            self._settle(target, line)
        parts = batches.encode(
            rows,
            default_timestamp_ms=int(time.time() * 1000),
            compression=self._compression,
            producer=Producer(
                producer_id=self._txn.producer_id,
                producer_epoch=self._txn.producer_epoch,
                base_sequence=line.sequence,
                is_transactional=True,
            ),
        )
        records = b"".join(parts)
        told = _told_of(rows, len(records))
        if len(records) > self._batch_bytes_max:
            raise _too_large(target, told, len(rows), f"{self._batch_bytes_max} bytes")
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
        line.sequence = batches.next_sequence(line.sequence, len(rows))
        pending = self._submitted(target, request)
        line.under_way.append(_Batch(request, len(rows), told, pending))

    def finish(self) -> list[Witness]:
        """Wait for every acknowledgement. Gives a few rows by their places."""
        for target, line in self._lines.items():
            while line.under_way:
                self._settle(target, line)
        return [
            Witness(target.topic, target.partition, line.last_offset)
            for target, line in self._lines.items()
            if line.last_offset >= 0
        ][:WITNESSES_MAX]

    def drain(self) -> None:
        """Let all that is under way come to its end, whatever that is."""
        for line in self._lines.values():
            for batch in line.under_way:
                self._await(batch)

    def _ask(self, target: Leader, request: ProduceRequest) -> Ask[ProduceResponse]:
        return Ask(
            request=request,
            to=target,
            is_repeatable=True,
            code_of=lambda answer: _told(answer).error_code,
            version_max=None if self._txn.is_v2 else _PRODUCE_BEFORE_V2,
        )

    def _submitted(
        self, target: Leader, request: ProduceRequest
    ) -> Pending[ProduceResponse] | None:
        try:
            return self._client.submit(self._ask(target, request))
        except (TryAgain, OutcomeUnknown):
            self._client.forget(target)
            return None

    def _settle(self, target: Leader, line: _Line) -> None:
        """Wait for the oldest batch of a partition; if it failed, send all again in order."""
        if self._take_answer(target, line):
            return
        for later in list(line.under_way)[1:]:
            self._await(later)
        self._client.forget(target)
        while line.under_way:
            first = line.under_way[0]
            first.pending = None
            told = _told(self._asked(target, first))
            self._require_taken(target, first, told)
            self._acknowledged(line, told)

    def _take_answer(self, target: Leader, line: _Line) -> bool:
        first = line.under_way[0]
        if first.pending is None:
            return False
        try:
            told = _told(first.pending.result())
        except (TryAgain, OutcomeUnknown):
            return False
        if faults.is_passing(told.error_code) or told.error_code in faults.MAY_HAVE_HAPPENED:
            return False
        self._require_taken(target, first, told)
        self._acknowledged(line, told)
        return True

    def _await(self, batch: _Batch) -> None:
        """Let a batch behind a failed one come to its end; it is sent again whatever that was."""
        if batch.pending is None:
            return
        try:
            batch.pending.wait()
        except EpochalError:
            return

    def _asked(self, target: Leader, batch: _Batch) -> ProduceResponse:
        (answer,) = self._client.ask_all([self._ask(target, batch.request)])
        if isinstance(answer, EpochalError):
            # Nothing is lost: the attempt ends here, and its transaction is aborted.
            raise TryAgain(answer.message, answer.hint) from answer
        return answer

    def _acknowledged(self, line: _Line, told: PartitionProduceResponse) -> None:
        batch = line.under_way.popleft()
        if told.error_code == Code.NONE and told.base_offset >= 0:
            line.last_offset = told.base_offset + batch.count - 1

    def _require_taken(self, target: Leader, batch: _Batch, told: PartitionProduceResponse) -> None:
        code = told.error_code
        # A number that the broker has already seen: the first answer was lost, the rows are there.
        if code in (Code.NONE, Code.DUPLICATE_SEQUENCE_NUMBER):
            return
        rights.require(code, topic=("Write", target.topic))
        if code in (Code.MESSAGE_TOO_LARGE, Code.RECORD_LIST_TOO_LARGE):
            raise _too_large(target, batch.told, batch.count, "less")
        about = f"writing to {target.topic}-{target.partition}"
        if code in ENDED:
            require_going_on(code, self._txn, about)
        error = faults.error_for(code, about, told.error_message)
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
            request, Coordinator(txn.transactional_id), is_repeatable=True, code_of=_worst
        )
        rights.require(_worst(answer), topic=("Write", ", ".join(topics)))
        require_going_on(_worst(answer), txn, f"adding {', '.join(topics)} to the transaction")


def _told_of(rows: Columns, size: int) -> str:
    if len(rows) > 1:
        return f"a batch of {len(rows)} rows takes {size} bytes"
    key = "" if rows.key is None else f" with the key {rows.key[0].as_py()!r}"
    return f"a row{key} takes {size} bytes as a record"


def _too_large(target: Leader, told: str, count: int, taken: str) -> EpochalError:
    """No row of several is to blame: the sink was not told, or not lately, what the topic takes."""
    fact = f"{told}, and {target.topic} takes {taken}"
    if count > 1:
        return Misconfigured(
            fact, "a smaller batch_bytes=, or the right DescribeConfigs on the topic to learn it"
        )
    return RowRejected(
        fact, "max.message.bytes of the topic, compression=, or leave such rows out: where="
    )


def _told(answer: ProduceResponse) -> PartitionProduceResponse:
    return answer.responses[0].partition_responses[0]


def _worst(answer: AddPartitionsToTxnResponse) -> int:
    """The first code that is not the echo of another partition's failure."""
    codes = [
        result.partition_error_code
        for topic in answer.results_by_topic_v3_and_below
        for result in topic.results_by_partition
    ]
    failed = [code for code in codes if code != Code.NONE]
    echo = Code.OPERATION_NOT_ATTEMPTED
    return next((code for code in failed if code != echo), failed[0] if failed else Code.NONE)
