"""Tiny transactions over the wire, as fast as a broker answers ([broker_txn_*]) or at a pace
([broker_end_txn]).

One selector, one connection a producer. The newer protocol: Produce 12 adds the partition, EndTxn 5
raises the epoch; frames are made beforehand, and only the epoch and the checksum change. The older
one: AddPartitionsToTxn 3, Produce 11, EndTxn 4.
"""

from __future__ import annotations

import math
import selectors
import socket
import struct
import time
from dataclasses import dataclass, field

import google_crc32c

from epochal.clock import SystemClock
from epochal.kafka.batch_format import (
    BIT_TRANSACTIONAL,
    CRC_AT,
    CRC_FROM,
    Producer,
    with_header,
)
from epochal.kafka.client import Client
from epochal.kafka.cluster import Controller, Coordinator, Leader
from epochal.kafka.codes import Code
from epochal.kafka.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopic,
)
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.kafka.messages.end_txn import EndTxnRequest, EndTxnResponse
from epochal.kafka.messages.headers import RequestHeader
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.list_offsets import (
    ListOffsetsPartition,
    ListOffsetsRequest,
    ListOffsetsTopic,
)
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)
from epochal.kafka.primitives import Message

_PRODUCE, _END = 12, 5
_ADD, _PRODUCE_OLDER, _END_OLDER = 3, 11, 4
_AGAIN = (Code.CONCURRENT_TRANSACTIONS, Code.NOT_COORDINATOR, Code.COORDINATOR_LOAD_IN_PROGRESS)
_EPOCH_IN_BATCH = 51
_EPOCH_FROM_END = 4
_BATCH_BYTES = 61 + 27
_BEHIND_BATCH = 3
"""Empty sections of tagged fields, of the partition, the topic and the request."""


def make_topic(address: str, name: str, partitions: int) -> None:
    with Client(address, clock=SystemClock()) as client:
        wanted = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        request = CreateTopicsRequest(topics=[wanted], timeout_ms=10_000)
        (made,) = client.ask(request, Controller()).topics
        assert made.error_code in (0, Code.TOPIC_ALREADY_EXISTS), made
        for number in range(partitions):
            part = ListOffsetsPartition(partition_index=number, timestamp=-1)
            asked = ListOffsetsRequest(topics=[ListOffsetsTopic(name=name, partitions=[part])])
            # Asked again until the topic is known.
            client.ask(
                asked,
                Leader(name, number),
                is_repeatable=True,
                code_of=lambda answer: answer.topics[0].partitions[0].error_code,
            )


def framed(request: Message, version: int) -> bytearray:
    header = RequestHeader(
        request_api_key=request.API_KEY, request_api_version=version, client_id="bench"
    )
    body = b"".join(bytes(part) for part in (*header.encode(2), *request.encode(version)))
    return bytearray(struct.pack(">i", len(body)) + body)


def record_of(value: bytes) -> bytes:
    """A record of under 60 bytes without key and headers."""
    body = b"\x00\x00\x00\x01" + bytes([len(value) * 2]) + value + b"\x00"
    return bytes([len(body) * 2]) + body


@dataclass(slots=True)
class Writer:
    """One producer: its requests in turn, again and again."""

    address: tuple[str, int]
    transactional_id: str
    topic: str
    partition: int
    producer_id: int
    epoch: int
    is_newer: bool = True
    sock: socket.socket = field(init=False)
    steps: list[bytearray] = field(init=False)
    """The requests of a transaction; the last one ends it."""
    at: int = 0
    sequence: int = 0
    buffer: bytes = b""
    started_s: float = 0.0
    pace_s: float = 0.0
    """Between the beginnings of its transactions; zero: each begins where the last one ends."""
    due_s: float = 0.0
    is_waiting: bool = False
    done: int = 0
    again: int = 0
    end_times_s: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sock = socket.create_connection(self.address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._make_steps()

    def _make_steps(self) -> None:
        """Anew after every transaction that changed the id, the epoch or the sequence."""
        now_ms = int(time.time() * 1000)
        who = Producer(
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=self.sequence,
            is_transactional=True,
        )
        parts = with_header(record_of(b"x" * 20), BIT_TRANSACTIONAL, 1, (now_ms, now_ms), who)
        batch = b"".join(bytes(part) for part in parts)
        data = PartitionProduceData(index=self.partition, records=batch)
        produce = ProduceRequest(
            transactional_id=self.transactional_id,
            acks=-1,
            timeout_ms=10_000,
            topic_data=[TopicProduceData(name=self.topic, partition_data=[data])],
        )
        end = EndTxnRequest(
            transactional_id=self.transactional_id,
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            committed=True,
        )
        self.steps = [framed(produce, self._produce_version), framed(end, self._end_version)]
        if not self.is_newer:
            add = AddPartitionsToTxnRequest(
                v3_and_below_transactional_id=self.transactional_id,
                v3_and_below_producer_id=self.producer_id,
                v3_and_below_producer_epoch=self.epoch,
                v3_and_below_topics=[
                    AddPartitionsToTxnTopic(name=self.topic, partitions=[self.partition])
                ],
            )
            self.steps.insert(0, framed(add, _ADD))

    @property
    def _produce_version(self) -> int:
        return _PRODUCE if self.is_newer else _PRODUCE_OLDER

    @property
    def _end_version(self) -> int:
        return _END if self.is_newer else _END_OLDER

    def send(self) -> None:
        self.started_s = time.perf_counter()
        self.sock.sendall(self.steps[self.at])

    def hear(self) -> None:
        self.buffer += self.sock.recv(1 << 16)
        if len(self.buffer) < 4 or len(self.buffer) < 4 + struct.unpack_from(">i", self.buffer)[0]:
            return
        frame, self.buffer = self.buffer[4:], b""
        match len(self.steps) - self.at:
            case 1:
                self._ended(EndTxnResponse.decode(self._end_version, frame, 5))
            case 2:
                answer = ProduceResponse.decode(self._produce_version, frame, 5)
                self._went(answer.responses[0].partition_responses[0].error_code)
            case _:
                added = AddPartitionsToTxnResponse.decode(_ADD, frame, 5)
                (topic,) = added.results_by_topic_v3_and_below
                self._went(topic.results_by_partition[0].partition_error_code)
        if not self.is_waiting:
            self.send()

    def _went(self, code: int) -> None:
        if code in _AGAIN:
            self.again += 1
            return
        assert code == 0, code
        self.at += 1

    def begin(self, now_s: float) -> None:
        """Its next transaction, if that is due."""
        if self.is_waiting and now_s >= self.due_s:
            self.is_waiting = False
            self.due_s += self.pace_s
            self.send()

    def _ended(self, answer: EndTxnResponse) -> None:
        if answer.error_code in _AGAIN:
            self.again += 1
            return
        assert answer.error_code == 0, answer
        self.end_times_s.append(time.perf_counter() - self.started_s)
        self.done += 1
        self.at = 0
        self.is_waiting = self.pace_s > 0
        if not self.is_newer:
            self.sequence += 1
            self._make_steps()
        elif answer.producer_id == self.producer_id:
            self.epoch = answer.producer_epoch
            self._raise_epoch()
        else:
            # After 32,767 transactions the id goes on under another producer id.
            self.producer_id, self.epoch = answer.producer_id, answer.producer_epoch
            self._make_steps()

    def _raise_epoch(self) -> None:
        produce, end = self.steps
        struct.pack_into(">h", end, len(end) - _EPOCH_FROM_END, self.epoch)
        batch_at = len(produce) - _BEHIND_BATCH - _BATCH_BYTES
        struct.pack_into(">h", produce, batch_at + _EPOCH_IN_BATCH, self.epoch)
        covered = bytes(produce[batch_at + CRC_FROM : batch_at + _BATCH_BYTES])
        struct.pack_into(">I", produce, batch_at + CRC_AT, google_crc32c.value(covered))


def run(
    address: str,
    producers: int,
    seconds: float,
    topic: str,
    *,
    rate: float = 0.0,
    is_newer: bool = True,
) -> tuple[float, float, int]:
    """
    (transactions a second, p99 of EndTxn in ms, how often a request had to be asked again).

    `rate` is how many transactions a second begin, over all producers; zero: as many as can.
    """
    host, _, port = address.rpartition(":")
    writers: list[Writer] = []
    with Client(address, clock=SystemClock()) as client:
        for number in range(producers):
            name = f"bench-{topic}-{number}"
            asked = InitProducerIdRequest(transactional_id=name, transaction_timeout_ms=60_000)
            given = client.ask(asked, Coordinator(name), is_repeatable=True)
            assert given.error_code == 0, given
            place = ((host, int(port)), name, topic, number)
            known = (given.producer_id, given.producer_epoch)
            writers.append(Writer(*place, *known, is_newer=is_newer))
    with selectors.DefaultSelector() as selector:
        for writer in writers:
            selector.register(writer.sock, selectors.EVENT_READ, writer)
            writer.send()
        started = time.perf_counter()
        for number, writer in enumerate(writers):
            writer.pace_s = producers / rate if rate else 0.0
            writer.due_s = started + writer.pace_s * (1 + number / producers)
        while (now_s := time.perf_counter()) < started + seconds:
            waiting = [writer.due_s for writer in writers if writer.is_waiting]
            for key, _ in selector.select(max(min(waiting) - now_s, 0.0) if waiting else 1.0):
                key.data.hear()
            now_s = time.perf_counter()
            for writer in writers if rate else ():
                writer.begin(now_s)
        took = time.perf_counter() - started
    done = sum(writer.done for writer in writers)
    times = sorted(second for writer in writers for second in writer.end_times_s)
    for writer in writers:
        writer.sock.close()
    p99 = times[int(len(times) * 0.99)] * 1000 if times else math.inf
    return done / took, p99, sum(writer.again for writer in writers)
