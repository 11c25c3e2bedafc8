"""Offsets that consumer groups have committed, and those that wait for a transaction to end.

Offsets that a transaction commits are *pending* under its producer id until the transaction is
decided: a commit makes them the group's, an abort drops them. Readers that ask for stable offsets
have to wait while a partition has pending ones.

Offsets that are forgotten are forgotten pending ones included: a topic that is made again under its
old name must not get an offset of the first one by a transaction that ends later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import NamedTuple

from epochal.broker.core.entries import (
    Entry,
    OffsetRow,
    OffsetsCommitted,
    OffsetsDecided,
    OffsetsForgotten,
    OffsetsPending,
)


class Committed(NamedTuple):
    offset: int
    leader_epoch: int
    metadata: str
    committed_ms: int


Place = tuple[str, int]
"""A topic and a partition's index."""


class Offsets:
    def __init__(self, emit: Callable[[Entry], None]) -> None:
        self.groups: dict[str, dict[Place, Committed]] = {}
        self.pending: dict[str, dict[int, dict[Place, Committed]]] = {}
        """Group → producer id → offsets pending in its transaction."""
        self._emit = emit

    def commit(self, group: str, rows: list[OffsetRow]) -> None:
        if rows:
            entry = OffsetsCommitted(group, rows)
            self.apply_committed(entry)
            self._emit(entry)

    def commit_later(self, group: str, producer_id: int, rows: list[OffsetRow]) -> None:
        if rows:
            entry = OffsetsPending(group, producer_id, rows)
            self.apply_pending(entry)
            self._emit(entry)

    def decide(self, group: str, producer_id: int, *, is_commit: bool) -> None:
        if producer_id in self.pending.get(group, ()):
            entry = OffsetsDecided(group, producer_id, is_commit)
            self.apply_decided(entry)
            self._emit(entry)

    def is_unstable(self, group: str, place: Place) -> bool:
        waiting = self.pending.get(group)
        return waiting is not None and any(place in rows for rows in waiting.values())

    def forget(self, group: str, places: list[Place]) -> None:
        if places:
            entry = OffsetsForgotten(group, places)
            self.apply_forgotten(entry)
            self._emit(entry)

    def forget_group(self, group: str) -> None:
        self.forget(group, self._places(group))

    def forget_topic(self, topic: str) -> None:
        for group in dict.fromkeys((*self.groups, *self.pending)):
            self.forget(group, [place for place in self._places(group) if place[0] == topic])

    def _places(self, group: str) -> list[Place]:
        """Those with an offset of the group, committed or pending."""
        pending = self.pending.get(group, {}).values()
        return list(dict.fromkeys(chain(self.groups.get(group, ()), *pending)))

    # Entries

    def apply_committed(self, entry: OffsetsCommitted) -> None:
        self.groups.setdefault(entry.group, {}).update(_placed(entry.rows))

    def apply_pending(self, entry: OffsetsPending) -> None:
        waiting = self.pending.setdefault(entry.group, {})
        waiting.setdefault(entry.producer_id, {}).update(_placed(entry.rows))

    def apply_decided(self, entry: OffsetsDecided) -> None:
        waiting = self.pending.get(entry.group)
        if waiting is None or entry.producer_id not in waiting:
            return
        rows = waiting.pop(entry.producer_id)
        if not waiting:
            del self.pending[entry.group]
        if entry.is_commit and rows:
            self.groups.setdefault(entry.group, {}).update(rows)

    def apply_forgotten(self, entry: OffsetsForgotten) -> None:
        committed, waiting = self.groups.get(entry.group, {}), self.pending.get(entry.group, {})
        for rows in (committed, *waiting.values()):
            for topic, partition in entry.places:
                rows.pop((topic, partition), None)
        if not committed:
            self.groups.pop(entry.group, None)

    def known(self) -> Iterator[Entry]:
        for group, rows in self.groups.items():
            yield OffsetsCommitted(group, _rows(rows))
        for group, waiting in self.pending.items():
            for producer_id, rows in waiting.items():
                yield OffsetsPending(group, producer_id, _rows(rows))


def _placed(rows: list[OffsetRow]) -> Iterator[tuple[Place, Committed]]:
    for topic, partition, offset, leader_epoch, metadata, committed_ms in rows:
        yield (topic, partition), Committed(offset, leader_epoch, metadata, committed_ms)


def _rows(placed: dict[Place, Committed]) -> list[OffsetRow]:
    return [(*place, *committed) for place, committed in placed.items()]
