"""Requests of the right form with any values at all: answered or refused, and no broker stops."""

from __future__ import annotations

import random
import sys
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

import pyarrow as pa
import pytest
from table import Table

from epochal.broker import handlers
from epochal.broker.core.settings import Settings
from epochal.broker.handlers import Handler, write_txn_markers
from epochal.errors import EpochalError
from epochal.kafka import batches
from epochal.kafka.batches import Columns, Producer
from epochal.kafka.codes import Code
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.kafka.messages.write_txn_markers import (
    WritableTxnMarker,
    WritableTxnMarkerTopic,
    WriteTxnMarkersRequest,
)
from epochal.kafka.primitives import Malformed, Message, Unsupported

REQUESTS = 4_000
TOPICS = ("t", "u")
WORDS = (*TOPICS, "g", "m", "", "range", "-1", "segment.bytes", "é漢", "(", "a" * 300, "é" * 20_000)
NUMBERS = (0, 1, -1)
EXTREMES = (5, 1000, -(1 << 15), (1 << 31) - 1, -(1 << 31), (1 << 63) - 1, -(1 << 63))
UNASKED = frozenset(("SaslHandshake", "SaslAuthenticate"))
"""They have no meaning without a listener that wants a login."""


class Chance:
    """Values that are often those of something real, so that requests get far."""

    def __init__(self, seed: int, only: str = "") -> None:
        self._rng = random.Random(seed)
        self._only = only
        self._members = [""]
        self._producers = [(-1, -1)]

    def request(self) -> tuple[Handler, int, Message]:
        asked = [
            one
            for one in handlers.table().values()
            if one.name not in UNASKED and self._only in ("", one.name)
        ]
        handler = self._rng.choice(asked)
        version = self._rng.choice(handler.versions)
        return handler, version, self._message(handler.request)

    def passing_ms(self) -> int:
        return self._rng.choice((1, 100, 60_000))

    def learn(self, answer: Any) -> None:
        """Names that a broker gave out are used again."""
        if getattr(answer, "member_id", ""):
            self._members = [*self._members[-4:], answer.member_id]
        if getattr(answer, "producer_id", -1) >= 0:
            given = (answer.producer_id, answer.producer_epoch)
            self._producers = [*self._producers[-4:], given]

    def _message(self, kind: type) -> Any:
        return kind(**{name: self._value(hint, name) for name, hint in _hints(kind).items()})

    def _value(self, hint: Any, name: str) -> Any:
        kinds = typing.get_args(hint)
        if typing.get_origin(hint) is list:
            return [self._value(kinds[0], name) for _ in range(self._rng.choice((0, 1, 1, 2)))]
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            if type(None) in kinds and self._rng.random() < 0.25:
                return None
            return self._records() if name == "records" else self._value(kinds[0], name)
        return self._message(hint) if is_dataclass(hint) else self._plain(hint, name)

    def _plain(self, kind: type, name: str) -> Any:
        rng = self._rng
        if kind is bool:
            return rng.random() < 0.5
        if kind is bytes:
            return rng.randbytes(16)
        if kind is str:
            return rng.choice(self._members if name == "member_id" else self._words())
        if name in ("producer_id", "producer_epoch") and rng.random() < 0.7:
            return rng.choice(self._producers)[name == "producer_epoch"]
        return rng.choice(NUMBERS if rng.random() < 0.8 else EXTREMES)

    def _words(self) -> tuple[str, ...]:
        return TOPICS if self._rng.random() < 0.5 else WORDS

    def _records(self) -> bytes:
        producer_id, epoch = self._rng.choice(self._producers)
        producer = Producer(
            producer_id=producer_id,
            producer_epoch=epoch,
            base_sequence=self._rng.choice((0, 0, 1, 5)),
            is_transactional=producer_id >= 0 and self._rng.random() < 0.7,
        )
        rows = Columns(value=pa.array([b"row"] * self._rng.choice((1, 3)), pa.binary()))
        parts = batches.encode(rows, default_timestamp_ms=0, producer=producer)
        data = bytearray(b"".join(parts))
        if self._rng.random() < 0.3:
            data[self._rng.randrange(len(data))] = self._rng.randrange(256)
        return bytes(data)


@cache
def _hints(kind: type) -> dict[str, Any]:
    # Annotations of the class itself name what only type checkers import.
    known = vars(sys.modules[kind.__module__])
    return {field.name: eval(str(field.type), known) for field in fields(kind)}


def fresh(transaction_version: int) -> Table:
    table = Table(settings=Settings(transaction_version=transaction_version, topics_max=100))
    wanted = [CreatableTopic(name=n, num_partitions=2, replication_factor=1) for n in TOPICS]
    table.ask(CreateTopicsRequest(topics=wanted))
    return table


def ask_anything(table: Table, chance: Chance, requests: int) -> int:
    """How many were answered. Whatever a handler raises comes out: it would stop a broker."""
    answered = 0
    for number in range(requests):
        handler, version, message = chance.request()
        try:
            data = b"".join(bytes(part) for part in message.encode(version))
            request, _ = handler.request.decode_head(version, data)
        except (Malformed, Unsupported):
            continue
        try:
            chance.learn(table.ask(request, version))
            answered += 1
        except EpochalError:
            continue
        if number % 50 == 0:
            table.pass_time(chance.passing_ms())
    return answered


def ends(table: Table) -> dict[str, list[tuple[int, int]]]:
    topics = table.broker.state.topics.by_name
    return {
        name: [(partition.log_start, partition.end) for partition in topic.partitions]
        for name, topic in topics.items()
    }


@pytest.mark.parametrize("transaction_version", [0, 2])
def test_any_values_are_answered_or_refused_and_what_was_taken_survives(
    transaction_version: int,
) -> None:
    table = fresh(transaction_version)
    assert ask_anything(table, Chance(transaction_version), REQUESTS) > REQUESTS // 4
    again = Table(table.disk, settings=table.settings)
    assert ends(again) == ends(table)


def test_the_judge_objects_to_a_handler_that_trusts_its_client(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "epochal.broker.core.partitions.Partition.judge_marker", lambda *_: Code.NONE
    )
    with pytest.raises(ValueError, match="needs a producer id"):
        ask_anything(fresh(2), Chance(2, only="WriteTxnMarkers"), REQUESTS)


def test_a_marker_of_nobody_is_refused() -> None:
    table = fresh(2)
    nobody = WritableTxnMarker(
        producer_id=-1, topics=[WritableTxnMarkerTopic(name="t", partition_indexes=[0])]
    )
    answer = table.ask(WriteTxnMarkersRequest(markers=[nobody]), write_txn_markers.VERSIONS[-1])
    (part,) = answer.markers[0].topics[0].partitions
    assert part.error_code == Code.INVALID_PRODUCER_ID_MAPPING
