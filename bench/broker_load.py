"""Tiny transactions over the wire, as fast as a broker answers ([broker_txn_*]) or at a pace
([broker_end_txn]).

One selector, one connection a producer, frames made beforehand: only the epoch and the checksum
change. The newer protocol: Produce 12 adds the partition, EndTxn 5 raises the epoch.
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
from epochal.kafka.cluster import Controller, Coordinator
from epochal.kafka.codes import Code
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.kafka.messages.end_txn import EndTxnRequest, EndTxnResponse
from epochal.kafka.messages.headers import RequestHeader
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)

_PRODUCE, _END = 12, 5
_AGAIN = (Code.CONCURRENT_TRANSACTIONS, Code.NOT_COORDINATOR, Code.COORDINATOR_LOAD_IN_PROGRESS)
_EPOCH_IN_BATCH = 51


def make_topic(address: str, name: str, partitions: int) -> None:
    with Client(address, clock=SystemClock()) as client:
        wanted = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        request = CreateTopicsRequest(topics=[wanted], timeout_ms=10_000)
        (made,) = client.ask(request, Controller()).topics
        assert made.error_code in (0, Code.TOPIC_ALREADY_EXISTS), made
        client.topic(name)
        time.sleep(0.5)


def framed(request: ProduceRequest | EndTxnRequest, version: int) -> bytearray:
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
    """One producer: produce, end, produce, end …"""

    address: tuple[str, int]
    transactional_id: str
    topic: str
    partition: int
    producer_id: int
    epoch: int
    sock: socket.socket = field(init=False)
    produce: bytearray = field(init=False)
    end: bytearray = field(init=False)
    is_ending: bool = False
    buffer: bytes = b""
    started_s: float = 0.0
    pace_s: float = 0.0
    """Between the beginnings of its transactions; zero: each begins where the last one ends."""
    due_s: float = 0.0
    is_waiting: bool = False
    done: int = 0
    again: int = 0
    end_times_s: list[float] = field(default_factory=list)
    _batch_at: int = 0
    _end_epoch_at: int = 0

    def __post_init__(self) -> None:
        self.sock = socket.create_connection(self.address)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        who = Producer(
            producer_id=self.producer_id,
            producer_epoch=self.epoch,
            base_sequence=0,
            is_transactional=True,
        )
        now_ms = int(time.time() * 1000)
        parts = with_header(record_of(b"x" * 20), BIT_TRANSACTIONAL, 1, (now_ms, now_ms), who)
        batch = b"".join(bytes(part) for part in parts)
        data = PartitionProduceData(index=self.partition, records=batch)
        self.produce = framed(
            ProduceRequest(
                transactional_id=self.transactional_id,
                acks=-1,
                timeout_ms=10_000,
                topic_data=[TopicProduceData(name=self.topic, partition_data=[data])],
            ),
            _PRODUCE,
        )
        self._batch_at = self.produce.index(batch)
        self.end = framed(
            EndTxnRequest(
                transactional_id=self.transactional_id,
                producer_id=self.producer_id,
                producer_epoch=self.epoch,
                committed=True,
            ),
            _END,
        )
        self._end_epoch_at = len(self.end) - 4

    def send(self) -> None:
        self.started_s = time.perf_counter()
        self.sock.sendall(self.end if self.is_ending else self.produce)

    def hear(self) -> None:
        self.buffer += self.sock.recv(1 << 16)
        if len(self.buffer) < 4 or len(self.buffer) < 4 + struct.unpack_from(">i", self.buffer)[0]:
            return
        frame, self.buffer = self.buffer[4:], b""
        if self.is_ending:
            self._ended(EndTxnResponse.decode(_END, frame, 5))
        else:
            part = ProduceResponse.decode(_PRODUCE, frame, 5).responses[0].partition_responses[0]
            if part.error_code in _AGAIN:
                self.again += 1
            else:
                assert part.error_code == 0, part
                self.is_ending = True
        if not self.is_waiting:
            self.send()

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
        self.is_ending = False
        self.is_waiting = self.pace_s > 0
        self.epoch = answer.producer_epoch
        struct.pack_into(">h", self.end, self._end_epoch_at, self.epoch)
        at = self._batch_at
        struct.pack_into(">h", self.produce, at + _EPOCH_IN_BATCH, self.epoch)
        covered = bytes(self.produce[at + CRC_FROM : at + CRC_FROM + len(self._covered())])
        struct.pack_into(">I", self.produce, at + CRC_AT, google_crc32c.value(covered))

    def _covered(self) -> range:
        (length,) = struct.unpack_from(">i", self.produce, self._batch_at + 8)
        return range(12 + length - CRC_FROM)


def run(
    address: str, producers: int, seconds: float, topic: str, *, rate: float = 0.0
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
            writers.append(Writer(*place, given.producer_id, given.producer_epoch))
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
                key.data.answer()
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
