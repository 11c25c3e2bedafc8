"""Entries as bytes: a kind, a length, and the fields of the kind.

The frequent kinds are packed by hand, the rest is JSON: a list of the entry's fields.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from epochal.broker.core import entries
from epochal.broker.core.entries import (
    Appended,
    ConsumerMember,
    Entry,
    GroupChanged,
    Placed,
    Places,
    SlotFilled,
    TxnChanged,
    TxnGrew,
)
from epochal.errors import CorruptRecord
from epochal.kafka.primitives import Part

_HEAD = struct.Struct(">BI")
_APPENDED = struct.Struct(">BII")
_NUMBER = struct.Struct(">I")
_PLACED = struct.Struct(">IqqIqq")
_TXN = struct.Struct(">qhhqqbiqq?")
_GREW = struct.Struct(">HII")
_LENGTH = struct.Struct(">H")
_FILLED = struct.Struct(">QI")

KINDS: dict[int, type[Entry]] = {
    1: entries.Appended,
    2: entries.Placed,
    3: entries.TxnChanged,
    4: entries.TxnGrew,
    5: entries.TxnForgotten,
    6: entries.ProducerIdsReserved,
    7: entries.TopicChanged,
    8: entries.TopicDeleted,
    9: entries.LogStartMoved,
    10: entries.OffsetsCommitted,
    11: entries.OffsetsPending,
    12: entries.OffsetsDecided,
    13: entries.OffsetsForgotten,
    14: entries.GroupChanged,
    15: entries.GroupForgotten,
    16: entries.PartitionKnown,
    17: entries.SegmentKnown,
    18: entries.Identity,
    19: entries.ConsumerGroupChanged,
    20: entries.ConsumerMember,
    21: entries.ConsumerMemberGone,
    22: entries.ProducersForgotten,
    23: entries.SlotTaken,
    24: entries.AppendedElsewhere,
    25: entries.GroupConfigured,
    26: entries.SlotFilled,
}
"""Never renumbered: data folders outlive releases."""
_NUMBERS: dict[type[Entry], int] = {kind: number for number, kind in KINDS.items()}


def put(entry: Entry, parts: list[Part]) -> int:
    """Append an entry's pieces to `parts`; returns how many bytes they are."""
    if isinstance(entry, Appended):
        number, batch = entry
        size = len(batch) + 4
        parts.append(_APPENDED.pack(1, size, number))
        parts.append(batch)
        return size + 5
    kind = type(entry)
    body = _PACKERS.get(kind, _json)(entry)
    parts.append(_HEAD.pack(_NUMBERS[kind], len(body)))
    parts.append(body)
    return len(body) + 5


def packed(listed: Iterable[Entry]) -> bytes:
    """All of these, as one payload."""
    parts: list[Part] = []
    for entry in listed:
        put(entry, parts)
    return b"".join(parts)


def read(data: bytes, at: int = 0) -> Iterator[Entry]:
    """The entries of a payload whose checksum was right."""
    end = len(data)
    while at < end:
        try:
            number, size = _HEAD.unpack_from(data, at)
            kind = KINDS[number]
        except (struct.error, KeyError) as error:
            raise CorruptRecord(
                f"an unknown entry in the broker's journal: {error}",
                hint="was the data folder written by a newer release?",
            ) from error
        at += _HEAD.size
        yield _READERS.get(kind, _from_json)(kind, data[at : at + size])
        at += size


def holds(kind: type[Entry], data: bytes) -> bool:
    """Whether an entry of this kind is in a payload, without reading any."""
    wanted, at, end = _NUMBERS[kind], 0, len(data)
    while at < end:
        number, size = _HEAD.unpack_from(data, at)
        if number == wanted:
            return True
        at += _HEAD.size + size
    return False


def _pack_placed(entry: Any) -> bytes:
    return _PLACED.pack(*entry)


def _pack_filled(entry: Any) -> bytes:
    return _FILLED.pack(*entry)


def _pack_txn(entry: Any) -> bytes:
    name: str = entry[0]
    return _TXN.pack(*entry[1:]) + name.encode()


def _pack_grew(entry: Any) -> bytes:
    name = entry[0].encode()
    groups = [group.encode() for group in entry[2]]
    head = _GREW.pack(len(name), len(entry[1]), len(groups))
    numbers = struct.pack(f">{len(entry[1])}I", *entry[1])
    return b"".join((head, name, numbers, *map(_counted, groups)))


def _counted(text: bytes) -> bytes:
    return _LENGTH.pack(len(text)) + text


def _json(entry: Any) -> bytes:
    fields = list(entry)
    if type(entry) is GroupChanged:
        fields[5] = [_member_out(row) for row in fields[5]]
    elif type(entry) is ConsumerMember:
        fields = _consumer_out(entry)
    return json.dumps(fields, separators=(",", ":")).encode()


_PACKERS: dict[type[Entry], Callable[[Any], bytes]] = {
    Placed: _pack_placed,
    SlotFilled: _pack_filled,
    TxnChanged: _pack_txn,
    TxnGrew: _pack_grew,
}


def _read_appended(_: type[Entry], body: bytes) -> Entry:
    return Appended(_NUMBER.unpack_from(body)[0], body[4:])


def _read_placed(_: type[Entry], body: bytes) -> Entry:
    return Placed(*_PLACED.unpack(body))


def _read_filled(_: type[Entry], body: bytes) -> Entry:
    return SlotFilled(*_FILLED.unpack(body))


def _read_txn(_: type[Entry], body: bytes) -> Entry:
    return TxnChanged(body[_TXN.size :].decode(), *_TXN.unpack_from(body))


def _read_grew(_: type[Entry], body: bytes) -> Entry:
    name_size, count, group_count = _GREW.unpack_from(body)
    at = _GREW.size + name_size
    name = body[_GREW.size : at].decode()
    numbers = struct.unpack_from(f">{count}I", body, at)
    at += 4 * count
    groups: list[str] = []
    while len(groups) < group_count:
        (size,) = _LENGTH.unpack_from(body, at)
        at += 2
        groups.append(body[at : at + size].decode())
        at += size
    return TxnGrew(name, numbers, tuple(groups))


def _from_json(kind: type[Entry], body: bytes) -> Entry:
    fields = json.loads(body)
    if kind is GroupChanged:
        fields[5] = [_member_in(row) for row in fields[5]]
    elif kind is ConsumerMember:
        return _consumer_in(fields)
    return kind(*(_tupled(field) for field in fields))


_READERS: dict[type[Entry], Callable[[type[Entry], bytes], Entry]] = {
    Appended: _read_appended,
    Placed: _read_placed,
    SlotFilled: _read_filled,
    TxnChanged: _read_txn,
    TxnGrew: _read_grew,
}


def _tupled(field: Any) -> Any:
    """JSON has no tuples; rows of a list are."""
    if isinstance(field, list):
        return [tuple(row) if isinstance(row, list) else row for row in field]
    return field


def _consumer_out(member: ConsumerMember) -> list[Any]:
    assigned: Any = [[*place, epoch] for place, epoch in member.assigned.items()]
    shown = member._replace(
        protocols=_protocols_out(member.protocols),
        assigned=assigned,
        revoking=_places_out(member.revoking),
        target=_places_out(member.target),
    )
    return list(shown)


def _consumer_in(fields: list[Any]) -> ConsumerMember:
    read = ConsumerMember(*fields)
    return read._replace(
        topics=tuple(read.topics),
        protocols=tuple(_protocols_in(read.protocols)),
        assigned={(topic, index): epoch for topic, index, epoch in fields[-3]},
        revoking=_places_in(read.revoking),
        target=_places_in(read.target),
    )


def _places_out(places: Places) -> Any:
    found: dict[str, list[int]] = {}
    for topic, index in sorted(places):
        found.setdefault(topic, []).append(index)
    return found


def _places_in(found: Any) -> Places:
    return frozenset((topic, index) for topic, listed in found.items() for index in listed)


def _protocols_out(protocols: Iterable[tuple[str, bytes]]) -> Any:
    return [[name, base64.b64encode(data).decode()] for name, data in protocols]


def _protocols_in(listed: Iterable[Any]) -> list[tuple[str, bytes]]:
    return [(name, base64.b64decode(data)) for name, data in listed]


def _member_out(row: Iterable[Any]) -> list[Any]:
    *front, protocols, assignment = row
    return [*front, _protocols_out(protocols), base64.b64encode(assignment).decode()]


def _member_in(row: Iterable[Any]) -> list[Any]:
    *front, protocols, assignment = row
    return [*front, _protocols_in(protocols), base64.b64decode(assignment)]
