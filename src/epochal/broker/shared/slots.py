"""A slot of the shared journal as bytes.

    magic, kind, flags, generation, number, nonce, time, checksum of the slot before, payload,
    checksum of all that

A *tick* holds entries of the broker's journal; a large one takes several slots, the last of which
is marked. A *claim* makes a member the active: its payload says who it is and where clients reach
it. The nonce is that of the claim, so every slot names its writer's life as the active.
"""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass
from enum import IntEnum
from typing import Any

from epochal.broker.storage.checksums import crc32c
from epochal.errors import CorruptRecord, require_known_format

NONCE_BYTES = 16
FORMAT = 1
_MAGIC = b"epsl"
_HEAD = struct.Struct(f">4sBBQQ{NONCE_BYTES}sqII")
_CRC = struct.Struct(">I")
_LAST = 1
HINT = (
    "the store was damaged or restored, or somebody else wrote there: the guide on broker clusters "
    'has the ways out, under "The store was lost or restored"'
)


class Kind(IntEnum):
    TICK = 1
    CLAIM = 2


_KINDS = frozenset(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    kind: Kind
    number: int
    generation: int
    nonce: bytes
    """Of the claim of this generation."""
    time_ms: int
    """By the clock of its writer."""
    crc_before: int
    """The checksum of the slot before: a slot that was replaced or lost breaks the chain."""
    payload: bytes
    is_last: bool = True
    """False: the tick goes on in the next slot."""

    def encode(self) -> bytes:
        head = _HEAD.pack(
            _MAGIC,
            self.kind,
            _LAST if self.is_last else 0,
            self.generation,
            self.number,
            self.nonce,
            self.time_ms,
            self.crc_before,
            len(self.payload),
        )
        return b"".join((head, self.payload, _CRC.pack(crc32c(head, self.payload))))


def crc_of(data: bytes) -> int:
    """The checksum at the end of an encoded slot."""
    return int(_CRC.unpack_from(data, len(data) - _CRC.size)[0])


def decode(number: int, data: bytes) -> Slot:
    """The slot, whole. Raises `CorruptRecord` where it is not, or is that of another number."""
    if len(data) >= _HEAD.size + _CRC.size and crc32c(data[: -_CRC.size]) == crc_of(data):
        magic, kind, flags, generation, found, nonce, time_ms, before, size = _HEAD.unpack_from(
            data
        )
        payload = data[_HEAD.size : -_CRC.size]
        if magic == _MAGIC and found == number and size == len(payload) and kind in _KINDS:
            return Slot(
                kind=Kind(kind),
                number=number,
                generation=generation,
                nonce=nonce,
                time_ms=time_ms,
                crc_before=before,
                payload=payload,
                is_last=bool(flags & _LAST),
            )
    raise CorruptRecord(f"slot {number} of the shared journal is damaged", HINT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """The payload of a claim: who is the active from here on."""

    member: str
    node_id: int
    host: str
    port: int
    peer_host: str
    peer_port: int
    release: str
    format: int = FORMAT

    def encode(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def decode(cls, payload: bytes) -> Claim:
        """Raises `CorruptRecord` where a newer release has written it."""
        found: dict[str, Any] = json.loads(payload)
        require_known_format("the shared journal", found["format"], FORMAT)
        return cls(**found)
