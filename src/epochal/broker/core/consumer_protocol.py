"""Subscriptions and assignments, as consumers of the classic protocol exchange them.

Brokers pass these bytes on unread, but for groups whose members use both protocols.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_VERSION = struct.Struct(">h")
_COUNT = struct.Struct(">i")
_LENGTH = struct.Struct(">h")
_OWNED_FROM = 1
_RACK_FROM = 3


class Malformed(Exception):
    """These bytes are not what the protocol says."""


class Subscription(NamedTuple):
    topics: list[str]
    owned: list[tuple[str, list[int]]]
    rack_id: str | None


class _Reader:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def number(self, kind: struct.Struct) -> int:
        (found,) = kind.unpack_from(self._data, self._at)
        self._at += kind.size
        return int(found)

    def count(self) -> int:
        """Of elements: each is at least two bytes long, so no number costs more than its bytes."""
        found = self.number(_COUNT)
        if found * 2 > len(self._data) - self._at:
            raise Malformed(f"{found} elements in {len(self._data)} bytes")
        return found

    def text(self) -> str | None:
        size = self.number(_LENGTH)
        return None if size < 0 else self._bytes(size).decode()

    def name(self) -> str:
        return self.text() or ""

    def skip_bytes(self) -> None:
        self._bytes(max(0, self.number(_COUNT)))

    def _bytes(self, size: int) -> bytes:
        found = self._data[self._at : self._at + size]
        if len(found) < size:
            raise Malformed(f"{size} bytes wanted, {len(found)} left")
        self._at += size
        return found

    def places(self) -> list[tuple[str, list[int]]]:
        return [
            (self.name(), [self.number(_COUNT) for _ in range(self.count())])
            for _ in range(self.count())
        ]


def read_subscription(data: bytes) -> Subscription:
    """Raises `Malformed`."""
    try:
        reader = _Reader(data)
        version = reader.number(_VERSION)
        topics = [reader.name() for _ in range(reader.count())]
        reader.skip_bytes()
        owned = reader.places() if version >= _OWNED_FROM else []
        rack_id = None
        if version >= _RACK_FROM:
            reader.number(_COUNT)  # the generation in which it owned these
            rack_id = reader.text()
    except (struct.error, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error
    return Subscription(topics, owned, rack_id)


def read_assignment(data: bytes) -> list[tuple[str, list[int]]]:
    """Partitions by topic; none where there is no assignment. Raises `Malformed`."""
    if not data:
        return []
    try:
        reader = _Reader(data)
        reader.number(_VERSION)
        return reader.places()
    except (struct.error, UnicodeDecodeError) as error:
        raise Malformed(str(error)) from error


def write_assignment(places: Mapping[str, Iterable[int]], like: bytes) -> bytes:
    """In the version of a subscription's bytes."""
    version = _VERSION.unpack_from(like)[0] if len(like) >= _VERSION.size else 0
    parts = [_VERSION.pack(version), _COUNT.pack(len(places))]
    for topic, indexes in sorted(places.items()):
        name, listed = topic.encode(), sorted(indexes)
        parts += (
            _LENGTH.pack(len(name)),
            name,
            struct.pack(f">{len(listed) + 1}i", len(listed), *listed),
        )
    parts.append(_COUNT.pack(-1))
    return b"".join(parts)
