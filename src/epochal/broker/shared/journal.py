"""`SharedJournal`: slots, members and their secret in a store, as calls that block.

Its keys:
    slots/00000000000000000041     slot 41
    snapshots/…  records/…         see `snapshots`
    batches/NUMBER.NONCE           large batches of the tick that begins with this slot, where there
                                   is a store for segments: the slot names what is in it
    members/NAME                   where a member is reached, for clients and for `status`
    secret                         by which members know each other: who may read the journal has it
    owner                          in the store for segments: of which cluster they are
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass

from epochal.broker.core.entries import Appended, AppendedElsewhere, Entry, SlotTaken
from epochal.broker.shared import slots, snapshots
from epochal.broker.shared.protocol import (
    Action,
    AskNewest,
    Event,
    Fetch,
    Fetched,
    Found,
    List,
    Listed,
    Newest,
    Position,
    Put,
    Read,
    Stored,
    deletable,
)
from epochal.broker.shared.snapshots import RecordObject, Restoring, Snapshot
from epochal.broker.storage import codec
from epochal.broker.storage.checksums import crc32c
from epochal.broker.storage.disk import Disk
from epochal.clock import Clock
from epochal.errors import CorruptRecord, InvariantBroken, Misconfigured, OutcomeUnknown
from epochal.kafka.primitives import Part
from epochal.storage import ScannedStore, ServedStore, Store, open_store
from epochal.storage.urls import OBJECT_SCHEMES, scheme_of

_SLOTS = "slots"
_SNAPSHOTS = "snapshots"
_DELETED_AT_ONCE = 500
_READ_AHEAD = 8
_SCANNED = 16
"""Slots in one request. They are small, though each may have 8 MiB."""
_TICK_EVERY_S = 0.1
_MEMBERS = "members"
_BATCHES = "batches"
_LARGE_BYTES = 64 << 10
"""A larger batch does not go through the slots, where there is a store for segments."""
_KEY_OF_SECRET = "secret"  # noqa: S105  the name of a key
_KEY_OF_OWNER = "owner"
_ETCD_PAYLOAD_BYTES = (1 << 20) - 4_096
_PAYLOAD_BYTES = 8 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberRecord:
    """Where a member is reached."""

    member: str
    node_id: int
    host: str
    port: int
    peer_host: str
    peer_port: int


class SharedJournal:
    """Used by one thread at a time; `again` opens another for another thread."""

    def __init__(self, url: str, clock: Clock, segments: str = "") -> None:
        """`segments`: the URL of a store for the records of snapshots, if not the same."""
        self._url = url
        self._segments = segments
        self._clock = clock
        self._store: Store = open_store(url)
        self._scanned = self._store if isinstance(self._store, ScannedStore) else None
        is_slow = scheme_of(url) in OBJECT_SCHEMES
        self.tick_every_s = _TICK_EVERY_S if is_slow else 0.0
        """Not more often: each is paid for, and standbys have to read as fast."""
        self._readers = ThreadPoolExecutor(_READ_AHEAD) if is_slow else None
        self._ahead: dict[int, bytes] = {}
        self._records: Store = open_store(segments) if segments else self._store
        self.payload_bytes_max = (
            _ETCD_PAYLOAD_BYTES if scheme_of(url) in {"etcd", "etcds"} else _PAYLOAD_BYTES
        )

    def again(self) -> SharedJournal:
        return SharedJournal(self._url, self._clock, self._segments)

    @property
    def location(self) -> str:
        return self._store.location

    def carry_out(self, action: Action) -> Event:
        """A call of the protocol. Raises `TryAgain` where nothing was done."""
        store = self._store
        match action:
            case Read():
                return Found(self._read(action.number))
            case Put():
                try:
                    return Stored(store.put_if_absent(_slot(action.number), action.data))
                except OutcomeUnknown:
                    return Stored(None)
            case Fetch():
                return Fetched(self._fetched(action.payload))
            case List():
                entry = store.entry(_slot(action.number))
                stored_ms = 0 if entry is None else int(entry.modified_at * 1000)
                highest = self.highest(action.number)
                return Listed(highest, stored_ms, int(self._clock.now() * 1000))
            case AskNewest():
                return Newest(max(self.snapshot_numbers(), default=0))
            case _:
                raise InvariantBroken(f"{action} is no call of the store")

    def read_ahead(self, number: int) -> bytes | None:
        """A slot that was read with one before it, once. Not while a call is under way."""
        return self._ahead.pop(number, None)

    def _read(self, number: int) -> bytes | None:
        """
        A slot. Several behind it are read at once, where that is possible, for `read_ahead`: one
        that was there is that slot, whenever it is used. That a slot is not there is never
        remembered.
        """
        self._ahead.clear()
        if self._scanned is not None:
            rows = self._scanned.read_after(_SLOTS, f"{number - 1:020d}", _SCANNED)
            self._ahead = {int(name): content for name, content in rows.items()}
            return self._ahead.pop(number, None)
        data = self._store.read(_slot(number))
        if data is not None and self._readers is not None:
            numbers = range(number + 1, number + 1 + _READ_AHEAD)
            contents = self._readers.map(self._store.read, map(_slot, numbers))
            read = zip(numbers, contents, strict=True)
            self._ahead = {one: content for one, content in read if content is not None}
        return data

    # Large batches

    def are_outside(self, entries: Sequence[Entry]) -> bool:
        """Whether some of these are too large for the slots."""
        return self._records is not self._store and any(map(_is_large, entries))

    def put_outside(self, number: int, nonce: bytes, entries: Sequence[Entry]) -> Sequence[Entry]:
        """
        Put the large batches of a tick into one object, before its first slot (this number) is
        filled; returns the entries for the slots. Repeated, it puts the same again.
        """
        key = f"{_BATCHES}/{number:020d}.{nonce.hex()}"
        batches: list[bytes] = []
        shown: list[Entry] = []
        at = 0
        for entry in entries:
            if isinstance(entry, Appended) and _is_large(entry):
                size, crc = len(entry.batch), crc32c(entry.batch)
                shown.append(AppendedElsewhere(entry.partition, key, at, size, crc))
                batches.append(entry.batch)
                at += size
            else:
                shown.append(entry)
        self._records.put(key, b"".join(batches))
        return shown

    def _fetched(self, payload: bytes) -> bytes | None:
        """None: an object that it names is gone."""
        found: dict[str, bytes | None] = {}
        parts: list[Part] = []
        for entry in codec.read(payload):
            if not isinstance(entry, AppendedElsewhere):
                codec.put(entry, parts)
                continue
            if entry.key not in found:
                found[entry.key] = self._records.read(entry.key)
            content = found[entry.key]
            if content is None:
                return None
            batch = content[entry.at : entry.at + entry.size]
            if crc32c(batch) != entry.crc:
                raise CorruptRecord(f"{entry.key} of the shared journal is damaged", slots.HINT)
            codec.put(Appended(entry.partition, batch), parts)
        return b"".join(parts)

    def _delete_batches(self, before: int) -> None:
        """Of slots that are deleted, and of ticks that never came into their slots."""
        names = self._records.names(_BATCHES)
        gone = [name for name in names if int(name.partition(".")[0]) < before]
        _delete(self._records, [f"{_BATCHES}/{name}" for name in gone])

    def _delete_records(self, number: int, named: Set[str]) -> None:
        """Of snapshots up to this one: those that were deleted, or never came to their end."""
        names = self._records.names(snapshots.RECORDS)
        gone = [name for name in names if int(name.partition(".")[0]) <= number]
        keys = (f"{snapshots.RECORDS}/{name}" for name in gone)
        _delete(self._records, [key for key in keys if key not in named])

    def doubts(self) -> list[str]:
        """What the servers of the store do not promise, for a person."""
        if not isinstance(self._store, ServedStore):
            return []
        return [f"{one.name}: {one.because}" for one in self._store.check() if not one.granted]

    # Snapshots

    def snapshot_numbers(self) -> list[int]:
        return sorted(int(name) for name in self._store.names(_SNAPSHOTS))

    def snapshot(self, number: int) -> Snapshot | None:
        data = self._store.read(f"{_SNAPSHOTS}/{number:020d}")
        return None if data is None else snapshots.decode(number, data)

    def put_snapshot(self, snapshot: Snapshot) -> None:
        """Once its objects are put."""
        number = snapshot.position.number
        self._store.put_if_absent(f"{_SNAPSHOTS}/{number:020d}", snapshot.encode())

    def put_object(self, one: RecordObject, data: bytes) -> None:
        self._records.put(one.key, data)

    def restore(self, number: int, disk: Disk, cluster_id: str) -> bool:
        """
        The folder is as of this snapshot; False: the snapshot is gone, as there is a newer.
        Raises `Misconfigured` where the folder holds the data of another cluster (if of any).
        """
        found = self.snapshot(number)
        if found is None:
            return False
        if cluster_id and found.cluster_id != cluster_id:
            raise Misconfigured(
                f"{self.location} is the journal of the cluster {found.cluster_id}, and the folder "
                f"{disk.folder} is of {cluster_id}",
                "is --cluster right? A folder that is emptied takes in what the cluster has",
            )
        restoring = Restoring(disk, found)
        for one in found.objects:
            if restoring.has(one):
                continue
            data = self._records.read(one.key)
            if data is None and self.snapshot(number) is None:
                return False
            restoring.add(one, data or b"")
        restoring.finish()
        return True

    def prune(self) -> int:
        """Delete what the two newest snapshots make needless; returns how many slots that were."""
        numbers = self.snapshot_numbers()
        kept = [found for number in numbers[-2:] if (found := self.snapshot(number)) is not None]
        if len(kept) < 2:
            return 0
        # First the snapshots: a member that loads one of them asks whether it is still there.
        for number in numbers[:-2]:
            self._store.delete([f"{_SNAPSHOTS}/{number:020d}"])
        named = {one.key for snapshot in kept for one in snapshot.objects}
        self._delete_records(kept[0].position.number, named)
        filled = [int(name) for name in self._store.names(_SLOTS)]
        gone = deletable(filled, [to_position(snapshot.position) for snapshot in kept])
        _delete(self._store, [_slot(number) for number in gone])
        if self._records is not self._store:
            self._delete_batches(kept[0].position.number)
        return len(gone)

    def highest(self, number: int) -> int:
        """The highest number of all slots from this one on."""
        names = self._store.names(_SLOTS, after=f"{number:020d}")
        return int(names[-1]) if names else number

    def secret(self) -> bytes | None:
        """None: no member has ever been here."""
        return self._store.read(_KEY_OF_SECRET)

    def make_secret(self) -> bytes:
        """The secret, made where this is the first member."""
        while (found := self.secret()) is None:
            self._store.put_if_absent(_KEY_OF_SECRET, secrets.token_hex(32).encode())
        return found

    def require_own_segments(self, secret: bytes) -> None:
        """Two clusters with one store for segments would delete each other's records."""
        if self._records is self._store:
            return
        mine = hashlib.sha256(secret).hexdigest().encode()
        self._records.put_if_absent(_KEY_OF_OWNER, mine)
        if self._records.read(_KEY_OF_OWNER) != mine:
            raise Misconfigured(
                f"--segments {self._records.location} is that of another cluster",
                "a folder, prefix or database of its own for each cluster",
            )

    def register(self, record: MemberRecord) -> None:
        content = json.dumps(asdict(record)).encode()
        self._store.put(f"{_MEMBERS}/{record.member}", content)

    def retire(self, member: str) -> None:
        self._store.delete([f"{_MEMBERS}/{member}"])

    def members(self) -> list[MemberRecord]:
        found = (self._store.read(f"{_MEMBERS}/{name}") for name in self._store.names(_MEMBERS))
        return [MemberRecord(**json.loads(content)) for content in found if content is not None]

    def close(self) -> None:
        if self._readers is not None:
            self._readers.shutdown(wait=False, cancel_futures=True)
        self._store.close()
        self._records.close()


def to_position(taken: SlotTaken | None) -> Position:
    if taken is None:
        return Position()
    return Position(
        number=taken.number,
        crc=taken.crc,
        generation=taken.generation,
        nonce=bytes.fromhex(taken.nonce),
        holder=taken.holder.encode(),
        claims=tuple(taken.claims),
    )


def to_entry(position: Position) -> SlotTaken:
    return SlotTaken(
        position.number,
        position.crc,
        position.generation,
        position.nonce.hex(),
        position.holder.decode(),
        list(position.claims),
    )


def _is_large(entry: Entry) -> bool:
    return isinstance(entry, Appended) and len(entry.batch) > _LARGE_BYTES


def _delete(store: Store, keys: Sequence[str]) -> None:
    for at in range(0, len(keys), _DELETED_AT_ONCE):
        store.delete(keys[at : at + _DELETED_AT_ONCE])


def _slot(number: int) -> str:
    return f"{_SLOTS}/{number:020d}"
