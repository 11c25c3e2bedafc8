"""
The ledger of an Iceberg sink: table properties, set in the metadata commit that adds the rows (I9).

One property per epoch, and only of the two newest epochs of a uid: a commit removes the others.
Properties outlive the expiry of snapshots and any compaction. There is a key for each epoch, not
one that is overwritten, because a catalog compares and swaps a branch's snapshot but never a
property: a driver that wakes up late may set the key of an old epoch again, which changes nothing,
and can't set back what a newer driver wrote.

Every run has a uid of its own, and what it proves is kept for good: a run is loaded once. So that a
hundred runs don't leave a hundred properties, a commit folds the entries of other uids into one,
once there are several. Its key is the digest of what it holds: of two commits that fold at the same
time, neither writes over what the other one has taken in and removed.

`rollback_to_snapshot` moves the branch back and leaves the properties: by them alone, epochs whose
rows it took away would count as committed. So an entry also names the snapshot that the branch has
by its commit, and the epoch counts as long as the branch still comes from there.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from epochal.errors import require_known_format
from epochal.terms import EpochNumber, Generation, Handle, Identity, Mark, Uid

_KEY = re.compile(r"epochal\.(?P<uid>[a-z2-7]{12})\.(?P<tag>[0-9a-f]{8})\.(?P<epoch>\d{1,19})")

_FORMAT = 1
_LOOSE_MAX = 8
"""How many entries of other uids stay as properties of their own."""
DRIVER = 9_999_999
"""The partition number in handles of files that the driver writes: no stage has so many tasks."""
DRIVER_ATTEMPT_BITS = 46
"""Of its attempts, which have no counter: as many as the number in a handle takes."""
Winner = tuple[str, int, int, int]
"""Claim, generation, partition, attempt: what distinguishes the handles of one epoch of a sink."""


class Branch(NamedTuple):
    """
    A snapshot that a branch had, with its sequence number. Tables of version 1 have none: there
    nothing shows that a branch was moved back.
    """

    snapshot_id: int
    sequence_number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """What the table proves of one epoch."""

    uid: Uid
    epoch: EpochNumber
    pipeline: str
    sink: str
    run: str | None
    generation: Generation
    winners: frozenset[Winner]
    branch: Branch | None
    """Where the branch was by its commit; None where it had no snapshot yet."""

    def names(self, handle: Handle) -> bool:
        return winner(handle) in self.winners


@dataclass(frozen=True, slots=True, kw_only=True)
class Folding:
    """Properties that take the place of others: the same entries in fewer of them."""

    written: Mapping[str, str] = field(default_factory=dict)
    removed: Sequence[str] = ()


class Ledger:
    """The ledger of one sink of one pipeline, read from a table's properties."""

    def __init__(self, identity: Identity, properties: Mapping[str, str]) -> None:
        self._identity = identity
        self._properties = properties
        self._found: dict[EpochNumber, Entry] = {}
        """Entries that were read: one may name ten thousand handles, and each is looked up."""

    def find(self, epoch: EpochNumber) -> Entry | None:
        if epoch not in self._found:
            fields = self._fields(epoch)
            if fields is None:
                return None
            self._found[epoch] = _entry(epoch, fields, self._identity)
        return self._found[epoch]

    def names(self, handle: Handle) -> bool | None:
        entry = self.find(handle.epoch)
        return None if entry is None else entry.names(handle)

    def is_of(self, epoch: EpochNumber, handles: frozenset[Handle]) -> bool:
        entry = self.find(epoch)
        proven = {one for one in entry.winners if one[2] != DRIVER} if entry else None
        return proven == {winner(handle) for handle in handles}

    def marks(self) -> list[Mark]:
        """The newest epoch of every uid that wrote under this pipeline's and this sink's name."""
        epochs = {uid: dict(known) for uid, known in self._folded.items()}
        for key, uid, epoch in self._loose():
            epochs.setdefault(uid, {})[epoch] = _read(self._properties[key])
        return [
            Mark(uid=uid, epoch=max(known), run=known[max(known)]["run"])
            for uid, known in epochs.items()
            if self._is_of_this_name(known[max(known)])
        ]

    def written(
        self, epoch: EpochNumber, handles: Iterable[Handle], branch: Branch | None
    ) -> dict[str, str]:
        """The property that proves an epoch."""
        fields = {
            "format": _FORMAT,
            "pipeline": self._identity.pipeline,
            "sink": self._identity.sink,
            "run": self._identity.run,
            "generation": self._identity.generation,
            "won": _runs(sorted(winner(handle) for handle in handles)),
            "branch": branch,
        }
        return {self._key(epoch): json.dumps(fields, separators=(",", ":"))}

    def outdated(self, epoch: EpochNumber) -> list[str]:
        """The properties of older epochs, all settled before this one began; the last is kept."""
        return sorted(key for known, key in self._keys().items() if known < epoch - 1)

    def folding(self) -> Folding:
        """The entries of other uids in one property, where there are too many of them."""
        others = [one for one in self._loose() if one[1] != self._identity.uid]
        if len(others) < _LOOSE_MAX:
            return Folding()
        epochs = {uid: dict(known) for uid, known in self._folded.items()}
        for key, uid, epoch in others:
            epochs.setdefault(uid, {})[epoch] = _read(self._properties[key])
        return self._refolded(epochs, [key for key, _, _ in others])

    def dropping(self) -> Folding:
        """All properties without the entries of this uid and this sink."""
        uid, keys = self._identity.uid, sorted(self._keys().values())
        if uid not in self._folded:
            return Folding(removed=keys)
        return self._refolded(
            {one: known for one, known in self._folded.items() if one != uid}, keys
        )

    def _refolded(
        self, epochs: Mapping[Uid, Mapping[EpochNumber, Any]], removed: Sequence[str]
    ) -> Folding:
        entries = [
            [uid, epoch, known[epoch]]
            for uid, known in sorted(epochs.items())
            for epoch in sorted(known)[-2:]
        ]
        text = json.dumps({"format": _FORMAT, "entries": entries}, separators=(",", ":"))
        key = f"{self._folded_prefix}{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        gone = [*removed, *(one for one in self._properties if one.startswith(self._folded_prefix))]
        return Folding(
            written={key: text} if entries else {}, removed=[one for one in gone if one != key]
        )

    @property
    def _folded_prefix(self) -> str:
        return f"epochal.folded.{self._identity.tag}."

    @cached_property
    def _folded(self) -> dict[Uid, dict[EpochNumber, Any]]:
        """The entries that were folded, of this sink's tag."""
        found: dict[Uid, dict[EpochNumber, Any]] = {}
        for key, text in self._properties.items():
            if key.startswith(self._folded_prefix):
                for uid, epoch, fields in _read(text)["entries"]:
                    found.setdefault(Uid(uid), {})[EpochNumber(epoch)] = fields
        return found

    def _loose(self) -> Iterable[tuple[str, Uid, EpochNumber]]:
        """The entries that are a property each, of this sink's tag."""
        for key in self._properties:
            found = _KEY.fullmatch(key)
            if found is not None and found["tag"] == self._identity.tag:
                yield key, Uid(found["uid"]), EpochNumber(int(found["epoch"]))

    def _fields(self, epoch: EpochNumber) -> Any | None:
        text = self._properties.get(self._key(epoch))
        return self._folded.get(self._identity.uid, {}).get(epoch) if text is None else _read(text)

    def _is_of_this_name(self, fields: Mapping[str, Any]) -> bool:
        names = self._identity.pipeline, self._identity.sink
        return (fields["pipeline"], fields["sink"]) == names

    def _key(self, epoch: EpochNumber) -> str:
        return f"epochal.{self._identity.uid}.{self._identity.tag}.{epoch}"

    def _keys(self) -> dict[EpochNumber, str]:
        mine = (one for one in self._loose() if one[1] == self._identity.uid)
        return {epoch: key for key, _, epoch in mine}


class TableLedger(Ledger):
    """The ledger with the table that it was read from."""

    def __init__(self, identity: Identity, table: Table, branch: str) -> None:
        super().__init__(identity, table.metadata.properties)
        self.table = table
        self._branch = branch

    @cached_property
    def newest(self) -> EpochNumber | None:
        """The newest epoch whose rows the branch still has, or had when others replaced them."""
        known = {*self._keys(), *self._folded.get(self._identity.uid, {})}
        entries = [entry for epoch in known if (entry := self.find(epoch)) is not None]
        there = [entry.epoch for entry in entries if self._comes_from(entry.branch)]
        lost = max(known, default=None) not in {None, *there}
        return max([*there, *(self._in_lineage() if lost else ())], default=None)

    def is_done(self, epoch: EpochNumber) -> bool:
        """Whether this epoch or a later one is committed: then this one was, before it."""
        return self.newest is not None and self.newest >= epoch

    def marks(self) -> list[Mark]:
        mine, newest = self._identity.uid, self.newest
        return [
            one if one.uid != mine or newest is None else replace(one, epoch=newest)
            for one in super().marks()
            if one.uid != mine or newest is not None
        ]

    def _lineage(self) -> Iterator[Snapshot]:
        """The branch's snapshot and those before it, as far back as they are not expired."""
        metadata = self.table.metadata
        snapshot = metadata.snapshot_by_name(self._branch)
        while snapshot is not None:
            yield snapshot
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else metadata.snapshot_by_id(parent)

    def _comes_from(self, branch: Branch | None) -> bool:
        """Whether the branch was never moved back from there, as far as its snapshots tell."""
        if branch is None:
            return True
        snapshot: Snapshot | None = None
        for snapshot in self._lineage():
            if snapshot.snapshot_id == branch.snapshot_id:
                return True
            if branch.sequence_number and (snapshot.sequence_number or 0) <= branch.sequence_number:
                return False
        # The last one that is not expired, whose parent a catalog may have forgotten with it.
        return snapshot is not None

    def _in_lineage(self) -> Iterator[EpochNumber]:
        """Epochs of this sink, by what its snapshots say."""
        for snapshot in self._lineage():
            said = {} if snapshot.summary is None else snapshot.summary.additional_properties
            who = said.get("epochal.uid"), said.get("epochal.sink")
            if who == (self._identity.uid, self._identity.sink) and "epochal.epoch" in said:
                yield EpochNumber(int(said["epochal.epoch"]))


def winner(handle: Handle) -> Winner:
    return handle.claim, int(handle.generation), handle.partition, handle.attempt


def _entry(epoch: EpochNumber, fields: Mapping[str, Any], identity: Identity) -> Entry:
    return Entry(
        uid=identity.uid,
        epoch=epoch,
        pipeline=fields["pipeline"],
        sink=fields["sink"],
        run=fields["run"],
        generation=Generation(fields["generation"]),
        winners=frozenset(_unrolled(fields["won"])),
        branch=None if fields["branch"] is None else Branch(*fields["branch"]),
    )


def _read(value: str) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(value)
    require_known_format("the property of an epoch in the table", fields.get("format"), _FORMAT)
    return fields


def _runs(winners: Sequence[Winner]) -> list[list[Any]]:
    """
    Winners as runs: Spark gives the tasks of a stage numbers in a row, so a thousand first attempts
    are one run and the property stays short.
    """
    runs: list[list[Any]] = []
    for claim, generation, partition, attempt in winners:
        if runs:
            *of, first, number, count = runs[-1]
            if (of, partition, attempt) == ([claim, generation], first + count, number + count):
                runs[-1][-1] += 1
                continue
        runs.append([claim, generation, partition, attempt, 1])
    return runs


def _unrolled(runs: Iterable[Sequence[Any]]) -> Iterable[Winner]:
    for claim, generation, partition, attempt, count in runs:
        for step in range(count):
            yield claim, generation, partition + step, attempt + step
