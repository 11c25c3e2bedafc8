"""
The ledger of a spool: which epochs were delivered from it, for targets that keep no proof.

    <spool>/ledger/s<tag>/<uid>/<epoch>.json             this epoch is delivered, with these handles
    <spool>/ledger/s<tag>/<uid>/<epoch>.acks/begun       from these handles it is being delivered
    <spool>/ledger/s<tag>/<uid>/<epoch>.acks/<id>.json   what was acknowledged of it so far

Acknowledgements only ever add up, each writer's under names of its own, so two drivers that carry
out one decision at a time (I7) don't disturb each other. The first of them, which may hold nothing,
is written before the first call to the outside: from then on rows may have been delivered.

Nothing here is put if absent. An entry that a suspended driver writes again after it was pruned has
the content that it had, and is pruned again; the newest is never pruned.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from epochal.errors import CorruptRecord, require_known_format
from epochal.kit.marked_files import take_epoch
from epochal.storage import Store
from epochal.terms import EpochNumber, Identity, Json, Mark, Receipt, Uid

_FORMAT = 1
_SUFFIX = ".json"
_ACKS = ".acks"
_BEGUN = "begun"


@dataclass(frozen=True, slots=True, kw_only=True)
class Delivered:
    """The entry of one epoch: its owner, the receipts it was delivered from, and some figures."""

    pipeline: str
    sink: str
    uid: Uid
    epoch: EpochNumber
    run: str | None
    handles: frozenset[str]
    facts: Mapping[str, Json] = field(default_factory=dict)


class SpoolLedger:
    """The ledger of one pipeline's sink, beside its rows. Every verb may be repeated."""

    def __init__(self, store: Store, identity: Identity) -> None:
        self._store = store
        self._identity = identity
        self._sink_folder = f"ledger/s{identity.tag}"
        self._folder = f"{self._sink_folder}/{identity.uid}"
        self._writer = secrets.token_hex(8)
        self._written = 0

    def find(self, epoch: EpochNumber) -> Delivered | None:
        return self._read(f"{self._folder}/{_entry(epoch)}")

    def settle(
        self, epoch: EpochNumber, handles: frozenset[str], facts: Mapping[str, Json]
    ) -> None:
        """Prove an epoch. Two drivers that do so write the same: the decision fixed the handles."""
        entry = {
            "format": _FORMAT,
            "pipeline": self._identity.pipeline,
            "sink": self._identity.sink,
            "uid": self._identity.uid,
            "epoch": epoch,
            "run": self._identity.run,
            "handles": sorted(handles),
            "facts": dict(facts),
        }
        content = json.dumps(entry, ensure_ascii=False).encode()
        self._store.put(f"{self._folder}/{_entry(epoch)}", content)

    def begin(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        """Before the first call to the outside; False where a driver of a copy was first."""
        return take_epoch(self._store, f"{self._acks(epoch)}/{_BEGUN}", receipts) is not None

    def newest_epoch(self) -> EpochNumber | None:
        return max(self._epochs(self._folder), default=None)

    def newest(self) -> Sequence[Mark]:
        """The newest proven epoch of each life that had this pipeline's and this sink's name."""
        lives = (f"{self._sink_folder}/{uid}" for uid in self._store.folders(self._sink_folder))
        heads = ((life, max(self._epochs(life), default=None)) for life in lives)
        found = [
            self._read(f"{life}/{_entry(epoch)}") for life, epoch in heads if epoch is not None
        ]
        mine = (self._identity.pipeline, self._identity.sink)
        return [
            Mark(uid=entry.uid, epoch=entry.epoch, run=entry.run)
            for entry in found
            if entry is not None and (entry.pipeline, entry.sink) == mine
        ]

    def prune(self, below: EpochNumber) -> None:
        """Forget epochs under `below`; the newest stays."""
        newest = self.newest_epoch()
        if newest is None:
            return
        settled = [epoch for epoch in self._epochs(self._folder) if epoch < min(below, newest)]
        for epoch in settled:
            self.forget_delivery(epoch)
        self._store.delete([f"{self._folder}/{_entry(epoch)}" for epoch in settled])

    def size(self) -> int:
        """How many epochs it proves."""
        return len(self._epochs(self._folder))

    def forget(self) -> None:
        """Remove every epoch, the newest too: for a pipeline that will never run again."""
        for folder in self._store.folders(self._folder):
            self._delete_all(f"{self._folder}/{folder}")
        self._delete_all(self._folder)

    def acknowledge(self, epoch: EpochNumber, acknowledged: Sequence[Json]) -> None:
        """Remember what a receiver has taken. With nothing in it: delivery is about to begin."""
        self._written += 1
        name = f"{self._acks(epoch)}/{self._writer}-{self._written:08d}{_SUFFIX}"
        self._store.put(name, json.dumps(list(acknowledged)).encode())

    def acknowledged(self, epoch: EpochNumber) -> Sequence[Json] | None:
        """All acknowledgements of an epoch, by any driver; None where its delivery never began."""
        folder = self._acks(epoch)
        names = [name for name in self._store.names(folder) if not name.startswith(_BEGUN)]
        pieces = (self._store.read(f"{folder}/{name}") for name in names)
        read = [json.loads(piece) for piece in pieces if piece is not None]
        return [one for piece in read for one in piece] if names else None

    def forget_delivery(self, epoch: EpochNumber) -> None:
        """Remove how far it was: once the epoch is proven that is of no use."""
        self._delete_all(self._acks(epoch))

    def _delete_all(self, folder: str) -> None:
        self._store.delete([f"{folder}/{name}" for name in self._store.names(folder)])

    def _acks(self, epoch: EpochNumber) -> str:
        return f"{self._folder}/{epoch:020d}{_ACKS}"

    def _epochs(self, folder: str) -> list[EpochNumber]:
        stems = (name.removesuffix(_SUFFIX) for name in self._store.names(folder))
        return sorted(EpochNumber(int(stem)) for stem in stems if stem.isdecimal())

    def _read(self, name: str) -> Delivered | None:
        content = self._store.read(name)
        if content is None:
            return None
        try:
            entry = json.loads(content)
            require_known_format(f"{self._store.location}/{name}", entry["format"], _FORMAT)
            return Delivered(
                pipeline=entry["pipeline"],
                sink=entry["sink"],
                uid=entry["uid"],
                epoch=entry["epoch"],
                run=entry["run"],
                handles=frozenset(entry["handles"]),
                facts=entry["facts"],
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptRecord(
                f"{self._store.location}/{name} is not an entry of a spool's ledger: {error}",
                "files of a spool belong to the pipeline: restore it as it was",
            ) from error


def _entry(epoch: EpochNumber) -> str:
    return f"{epoch:020d}{_SUFFIX}"
