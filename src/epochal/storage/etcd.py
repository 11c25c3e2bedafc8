"""A store in etcd: an epoch log that outlives any machine of a cluster, some milliseconds away.

    etcd://h1:2379,h2:2379,h3:2379/epochal/orders

etcd's Raft makes a put durable on a majority of its members before it is answered, and decides who
was first; nothing of that is done here. Reads are linearizable.

    /epochal/orders/KEY                          0x00 nonce[16] time[8] content         up to 1 MiB
                                                 0x01 nonce[16] time[8] size[8] parts[4]      above
    /epochal/orders//parts/KEY/NONCE/0000        the content, cut: etcd takes 1.5 MiB in a request

A content in parts is written part by part, each under a lease of etcd, then its key in one
transaction which demands that all parts are there and takes them off the lease:

    put part 0, part 1, part 2      under a lease: a writer killed here leaves nothing for long
    transaction                     key absent, parts 0 to 2 there: put the key, keep the parts

So a key never names a part that is missing, even if another process deletes. The nonce says whose
content a key holds when a transaction was sent twice because its first answer was lost.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from epochal.errors import CorruptRecord, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.etcd_client import (
    Address,
    EtcdClient,
    KeyValue,
    Reply,
    Token,
    address_of,
    delete_range,
    exists,
    is_absent,
    keep,
    past,
    put,
    range_of,
)
from epochal.storage.store import Entry, checked, gone
from epochal.terms import Ability

_PART_BYTES = 1 << 20
_PARTS_MAX = 100
"""etcd takes 128 operations in a transaction."""
_PART_LEASE_S = 300
_LEASE_TTL_S = 5
"""2 is etcd's least; on a busy machine keep-alives come late."""
_PAGE_KEYS = 1000
_PAGE_ENTRIES = 20
_DELETED_AT_ONCE = 60
_READS_MAX = 20
_NONCE_BYTES = 16
_UNCOMPACTED_REVISIONS = 10_000
_QUOTA_BYTES = 2 << 30
"""etcd's default, where a server does not say (before 3.6)."""
_FULL = 0.75
_ALMOST_FULL = "almost full: compact and defrag it, or set a greater --quota-backend-bytes"
_ALARMS = {1: "NOSPACE", 2: "CORRUPT"}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    """The value of a key: its content, or where the parts of it are."""

    _FORMAT: ClassVar[str] = f">B{_NONCE_BYTES}sd"
    _PARTS: ClassVar[str] = ">QI"

    nonce: bytes
    modified_at: float
    content: bytes | None
    size: int
    parts: int

    def encode(self) -> bytes:
        is_cut = self.content is None
        start = struct.pack(self._FORMAT, is_cut, self.nonce, self.modified_at)
        return start + (
            struct.pack(self._PARTS, self.size, self.parts)
            if self.content is None
            else self.content
        )

    @classmethod
    def decode(cls, location: str, found: KeyValue) -> _Head:
        try:
            kind, nonce, modified_at = struct.unpack_from(cls._FORMAT, found.value)
            rest = found.value[struct.calcsize(cls._FORMAT) :]
            size, parts = struct.unpack(cls._PARTS, rest) if kind == 1 else (len(rest), 0)
        except struct.error:
            kind = -1
        if kind not in (0, 1):
            raise CorruptRecord(
                f"{location}: the key {found.key.decode(errors='replace')} was not written by a "
                "store",
                "give the store a prefix that nothing else writes to",
            )
        return cls(
            nonce=nonce,
            modified_at=modified_at,
            content=rest if kind == 0 else None,
            size=size,
            parts=parts,
        )


class EtcdStore:
    """Keys below a prefix of etcd. Processes may race for them."""

    def __init__(
        self, address: Address | str, *, keeps_channels: bool = True, token: Token | None = None
    ) -> None:
        self._address = address if isinstance(address, Address) else address_of(address)
        self.client = EtcdClient(self._address, keeps_channels=keeps_channels, token=token)

    @property
    def location(self) -> str:
        return self._address.location

    def put(self, key: str, content: bytes) -> None:
        head, parts = self._prepared(key, content)
        mine = [self._parts(key, head.nonce), past(self._parts(key, head.nonce))]
        first, end = self._parts(key), past(self._parts(key))
        others = [(first, mine[0]), (mine[1], end)] if parts else [(first, end)]
        is_put, _ = self.client.transaction(
            compare=[exists(part) for part in parts],
            puts=[put(self._path(key), head.encode()), *(keep(part) for part in parts)],
            deletes=[delete_range(*one) for one in others],
        )
        if not is_put:
            raise self._parts_gone(key)

    def put_if_absent(self, key: str, content: bytes) -> bool:
        head, parts = self._prepared(key, content)
        path = self._path(key)
        is_put, found = self.client.transaction(
            compare=[is_absent(path), *(exists(part) for part in parts)],
            puts=[put(path, head.encode()), *(keep(part) for part in parts)],
            otherwise=[range_of(path)],
        )
        if is_put:
            return True
        if not found[0]:
            raise self._parts_gone(key)
        if _Head.decode(self.location, found[0][0]).nonce == head.nonce:
            return True  # an earlier try of this very call, whose answer was lost
        if parts:
            mine = self._parts(key, head.nonce)
            self.client.transaction(deletes=[delete_range(mine, past(mine))])
        return False

    def read(self, key: str) -> bytes | None:
        for _ in range(_READS_MAX):
            head = self._head(key)
            if head is None:
                return None
            content = self._content(key, head, 0, head.size)
            if content is not None:
                return content
        raise self._unsteady(key)

    def read_range(self, key: str, start: int, end: int) -> bytes:
        for _ in range(_READS_MAX):
            head = self._head(key)
            if head is None:
                raise gone(self.location, key)
            content = self._content(key, head, start, min(end, head.size))
            if content is not None:
                return content
        raise self._unsteady(key)

    def names(self, folder: str = "", after: str = "") -> Sequence[str]:
        found = self._children(folder, after)
        return [name for name, one in found if one is not None]

    def read_after(self, folder: str, after: str, most: int) -> Mapping[str, bytes]:
        found: dict[str, bytes] = {}
        for name, one in self._children(folder, after, with_values=True):
            content = None if one is None else self._whole(f"{folder}/{name}", one)
            if content is not None:
                found[name] = content
            if len(found) == most:
                break
        return found

    def _whole(self, key: str, found: KeyValue) -> bytes | None:
        content = _Head.decode(self.location, found).content
        return self.read(key) if content is None else content

    def folders(self, folder: str = "") -> Sequence[str]:
        return [name for name, found in self._children(folder) if found is None]

    def entries(self, folder: str = "") -> Sequence[Entry]:
        found = self._children(folder, with_values=True)
        return [self._entry(name, one) for name, one in found if one is not None]

    def entry(self, key: str) -> Entry | None:
        found, _ = self.client.range(range_of(self._path(checked(key))))
        return self._entry(key.rpartition("/")[2], found[0]) if found else None

    def delete(self, keys: Sequence[str]) -> None:
        paths = [
            one
            for key in map(checked, keys)
            for one in (
                delete_range(self._path(key)),
                delete_range(self._parts(key), past(self._parts(key))),
            )
        ]
        step = 2 * _DELETED_AT_ONCE
        for at in range(0, len(paths), step):
            try:
                self.client.transaction(deletes=paths[at : at + step])
            except OutcomeUnknown as error:
                raise TryAgain(error.message, error.hint) from None  # some may be gone

    def beside(self, name: str) -> EtcdStore:
        """A folder of the same prefix, with channels for each call; one role covers both."""
        address = self._address
        below = Address(
            endpoints=address.endpoints,
            prefix=f"{address.prefix}/{name}",
            has_tls=address.has_tls,
            user=address.user,
            password=address.password,
        )
        return EtcdStore(below, keeps_channels=False, token=self.client.token)

    def lease(self) -> EtcdLease:
        return EtcdLease(self._address)

    def close(self) -> None:
        self.client.close()

    # For operators

    def grants(self) -> Sequence[str]:
        """What gives a role and a user the least privileges that this store needs."""
        user = self._address.user or "epochal"
        prefix = f"{self._address.prefix}/"
        return [
            "etcdctl role add epochal",
            f"etcdctl role grant-permission epochal --prefix=true readwrite {prefix}",
            f"etcdctl user add {user}",
            f"etcdctl user grant-role {user} epochal",
        ]

    def check(self) -> Sequence[Ability]:
        """Ask every endpoint how it is. What is not granted is a problem."""
        found = [self._checked(*one) for one in self.client.ask_each("Maintenance/Status")]
        return [*found, *self._alarms(), *self._history()]

    def _checked(self, endpoint: str, status: Reply | str) -> Ability:
        if isinstance(status, str):
            return Ability(name=endpoint, granted=False, because=f"does not answer: {status}")
        member, leader = status.part(1).number(2), status.number(4)
        size, quota = status.number(3), status.number(12) or _QUOTA_BYTES
        role = "leader" if member == leader else "follower" if leader else "knows no leader"
        problems = [
            *(one.decode(errors="replace") for one in status.contents(8)),
            *(["it is a learner"] if status.number(10) else []),
            *([_ALMOST_FULL] if size > _FULL * quota else []),
        ]
        assumed = "" if status.number(12) else ", if the quota is the default"
        text = (
            f"etcd {status.text(2)}, {role}, {size / 1e6:.1f} MB of {quota / 1e6:.0f} MB{assumed}"
        )
        return Ability(
            name=endpoint,
            granted=bool(leader) and not problems,
            because="; ".join([text, *problems]),
        )

    def _alarms(self) -> list[Ability]:
        """An alarm stops all writes, of every member."""
        answers = (answer for _, answer in self.client.ask_each("Maintenance/Alarm"))
        first = next((one for one in answers if isinstance(one, Reply)), None)
        raised = [] if first is None else first.parts(2)
        return [
            Ability(
                name="alarms",
                granted=False,
                because=f"{_ALARMS.get(one.number(2), one.number(2))} on member "
                f"{one.number(1):x}: no writes until `etcdctl alarm disarm`",
            )
            for one in raised
        ]

    def _history(self) -> list[Ability]:
        """
        Whether anything compacts the history. Servers don't say how they are set; but where the
        first revision of a busy cluster can still be read, nothing does.
        """
        path = self._path("")
        header = self.client.call("KV/Range", range_of(path), "read from").part(1)
        revision = header.number(3)
        try:
            self.client.call("KV/Range", range_of(path, revision=1), "read from")
        except Misconfigured:  # required revision has been compacted
            return [Ability(name="history", granted=True, because="is compacted")]
        return [
            Ability(
                name="history",
                granted=revision < _UNCOMPACTED_REVISIONS,
                because=f"never compacted, {revision} revisions: without "
                "--auto-compaction-retention on the servers every record ever written stays",
            )
        ]

    # Keys

    def _path(self, key: str) -> bytes:
        return f"{self._address.prefix}/{key}".encode()

    def _parts(self, key: str, nonce: bytes | None = None) -> bytes:
        # No key has an empty folder in it, so this is a place of its own.
        start = f"{self._address.prefix}//parts/{key}/"
        return (start if nonce is None else f"{start}{nonce.hex()}/").encode()

    def _prepared(self, key: str, content: bytes) -> tuple[_Head, list[bytes]]:
        """The value of a key, and the parts that are written already where there are some."""
        checked(key)
        is_cut = len(content) > _PART_BYTES
        cuts = range(0, len(content), _PART_BYTES) if is_cut else ()
        if len(cuts) > _PARTS_MAX:
            raise Misconfigured(
                f"{self.location}: {key} has {len(content)} bytes, etcd takes "
                f"{_PARTS_MAX * _PART_BYTES} in a transaction",
                "a log elsewhere: s3://…, postgresql://…#name",
            )
        head = _Head(
            nonce=os.urandom(_NONCE_BYTES),
            modified_at=time.time(),
            content=None if is_cut else content,
            size=len(content),
            parts=len(cuts),
        )
        try:
            pieces = [content[at : at + _PART_BYTES] for at in cuts]
            return head, self._put_parts(key, head.nonce, pieces)
        except OutcomeUnknown as error:
            raise TryAgain(error.message, error.hint) from None  # no key names them

    def _put_parts(self, key: str, nonce: bytes, pieces: Sequence[bytes]) -> list[bytes]:
        lease = self.client.grant_lease(_PART_LEASE_S) if pieces else 0
        paths = [b"%s%04d" % (self._parts(key, nonce), at) for at in range(len(pieces))]
        for path, piece in zip(paths, pieces, strict=True):
            self.client.transaction(puts=[put(path, piece, lease)])
        return paths

    def _head(self, key: str) -> _Head | None:
        found, _ = self.client.range(range_of(self._path(checked(key))))
        return _Head.decode(self.location, found[0]) if found else None

    def _content(self, key: str, head: _Head, start: int, end: int) -> bytes | None:
        """None where parts are gone: the key was replaced or deleted since its value was read."""
        if head.content is not None:
            return head.content[start:end]
        first = start // _PART_BYTES
        pieces = []
        for at in range(first, -(-end // _PART_BYTES)):
            path = b"%s%04d" % (self._parts(key, head.nonce), at)
            found, _ = self.client.range(range_of(path))
            if not found:
                return None
            pieces.append(found[0].value)
        skipped = first * _PART_BYTES
        return b"".join(pieces)[start - skipped : end - skipped]

    def _children(
        self, folder: str, after: str = "", *, with_values: bool = False
    ) -> Iterator[tuple[str, KeyValue | None]]:
        """Keys directly in a folder, and its folders, with None. What is in those is skipped."""
        top = self._path(f"{folder}/" if folder else "")
        start, end = top, past(top)
        if after:
            start += after.encode() + b"\0"
        limit = _PAGE_ENTRIES if with_values else _PAGE_KEYS
        has_more = True
        last = ""
        while has_more:
            found, has_more = self.client.range(
                range_of(start, end, limit=limit, keys_only=not with_values)
            )
            for one in found:
                name, slash, _ = one.key[len(top) :].decode().partition("/")
                if not slash:
                    yield name, one
                elif name and name != last:
                    yield name, None
                    last = name
                start = past(top + name.encode() + b"/") if slash else one.key + b"\0"

    def _entry(self, name: str, found: KeyValue) -> Entry:
        head = _Head.decode(self.location, found)
        return Entry(name=name, size=head.size, modified_at=head.modified_at)

    def _parts_gone(self, key: str) -> TryAgain:
        return TryAgain(
            f"cannot write to {self.location}: parts of {key} were deleted while they were "
            "written, or took too long"
        )

    def _unsteady(self, key: str) -> TryAgain:
        return TryAgain(
            f"cannot read {self.location}/{key}: it was replaced {_READS_MAX} times meanwhile"
        )


class EtcdLease:
    """A key that vanishes with a lease of etcd, which its holder keeps alive."""

    look_every_s = 0.5

    def __init__(self, address: Address, *, ttl_s: int = _LEASE_TTL_S) -> None:
        self._client = EtcdClient(address)
        self._key = f"{address.prefix}//lease".encode()
        self._ttl_s = ttl_s
        self.renew_every_s = ttl_s / 3
        self._lease: int | None = None

    @property
    def location(self) -> str:
        return self._client.address.location

    def acquire(self, holder: str) -> bool:
        self._lease = None
        found, _ = self._client.range(range_of(self._key))
        if found:
            return False
        lease = self._client.grant_lease(self._ttl_s, max_s=self._ttl_s)
        is_put, found_since = self._client.transaction(
            compare=[is_absent(self._key)],
            puts=[put(self._key, holder.encode(), lease)],
            otherwise=[range_of(self._key)],
            max_s=self._ttl_s,
        )
        # Its own where the answer to the first try was lost.
        is_own = is_put or bool(found_since[0] and found_since[0][0].lease == lease)
        self._lease = lease if is_own else None
        return is_own

    def renew(self) -> bool:
        if self._lease is not None and not self._client.keep_alive(self._lease, max_s=self._ttl_s):
            self._lease = None
        return self._lease is not None

    def release(self) -> None:
        lease, self._lease = self._lease, None
        if lease is not None:
            self._client.revoke_lease(lease, max_s=self._ttl_s)

    def close(self) -> None:
        try:
            self.release()
        finally:
            self._client.close()
