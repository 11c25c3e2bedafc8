"""
The ledger of an Iceberg sink: table properties, set in the metadata commit that adds the rows (I9).

One property per epoch, and only of the two newest epochs of a uid: a commit removes the others.
Properties outlive the expiry of snapshots and any compaction. There is a key for each epoch, not
one that is overwritten, because a catalog compares and swaps a branch's snapshot but never a
property: a driver that wakes up late may set the key of an old epoch again, which changes nothing,
and can't set back what a newer driver wrote.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.table import Table

from epochal.errors import require_known_format
from epochal.terms import EpochNumber, Generation, Handle, Identity, Mark, Uid

_KEY = re.compile(r"epochal\.(?P<uid>[a-z2-7]{12})\.(?P<tag>[0-9a-f]{8})\.(?P<epoch>\d{1,19})")

_FORMAT = 1
DRIVER = 9_999_999
"""The partition number in handles of files that the driver writes: no stage has so many tasks."""
Winner = tuple[str, int, int, int]
"""Claim, generation, partition, attempt: what distinguishes the handles of one epoch of a sink."""


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

    def names(self, handle: Handle) -> bool:
        return winner(handle) in self.winners


class Ledger:
    """The ledger of one sink of one pipeline, read from a table's properties."""

    def __init__(self, identity: Identity, properties: Mapping[str, str]) -> None:
        self._identity = identity
        self._properties = properties
        self._found: dict[EpochNumber, Entry] = {}
        """Entries that were read: one may name ten thousand handles, and each is looked up."""

    @property
    def newest(self) -> Entry | None:
        """The newest epoch of this uid that the table proves."""
        mine = self._keys()
        return (
            _entry(max(mine), self._properties[mine[max(mine)]], self._identity) if mine else None
        )

    def find(self, epoch: EpochNumber) -> Entry | None:
        key = self._key(epoch)
        if epoch not in self._found and key in self._properties:
            self._found[epoch] = _entry(epoch, self._properties[key], self._identity)
        return self._found.get(epoch)

    def names(self, handle: Handle) -> bool | None:
        entry = self.find(handle.epoch)
        return None if entry is None else entry.names(handle)

    def is_of(self, epoch: EpochNumber, handles: frozenset[Handle]) -> bool:
        entry = self.find(epoch)
        proven = {one for one in entry.winners if one[2] != DRIVER} if entry else None
        return proven == {winner(handle) for handle in handles}

    def is_done(self, epoch: EpochNumber) -> bool:
        """Whether this epoch or a later one is committed: then this one was, before it."""
        return any(known >= epoch for known in self._keys())

    def marks(self) -> list[Mark]:
        """The newest epoch of every uid that wrote under this pipeline's and this sink's name."""
        newest: dict[Uid, Mark] = {}
        for key, value in self._properties.items():
            found = _KEY.fullmatch(key)
            if found is None or found["tag"] != self._identity.tag:
                continue
            fields = _fields(value)
            if (fields["pipeline"], fields["sink"]) != (
                self._identity.pipeline,
                self._identity.sink,
            ):
                continue
            mark = Mark(
                uid=Uid(found["uid"]), epoch=EpochNumber(int(found["epoch"])), run=fields["run"]
            )
            if mark.uid not in newest or newest[mark.uid].epoch < mark.epoch:
                newest[mark.uid] = mark
        return list(newest.values())

    def written(self, epoch: EpochNumber, handles: Iterable[Handle]) -> dict[str, str]:
        """The property that proves an epoch."""
        fields = {
            "format": _FORMAT,
            "pipeline": self._identity.pipeline,
            "sink": self._identity.sink,
            "run": self._identity.run,
            "generation": self._identity.generation,
            "won": _runs(sorted(winner(handle) for handle in handles)),
        }
        return {self._key(epoch): json.dumps(fields, separators=(",", ":"))}

    def outdated(self, epoch: EpochNumber) -> list[str]:
        """The properties of older epochs, all settled before this one began; the last is kept."""
        return sorted(key for known, key in self._keys().items() if known < epoch - 1)

    def keys(self) -> list[str]:
        """Every property of this uid and this sink."""
        return sorted(self._keys().values())

    def _key(self, epoch: EpochNumber) -> str:
        return f"epochal.{self._identity.uid}.{self._identity.tag}.{epoch}"

    def _keys(self) -> dict[EpochNumber, str]:
        prefix = f"epochal.{self._identity.uid}.{self._identity.tag}."
        return {
            EpochNumber(int(key[len(prefix) :])): key
            for key in self._properties
            if key.startswith(prefix) and key[len(prefix) :].isdigit()
        }


class TableLedger(Ledger):
    """The ledger with the table that it was read from."""

    def __init__(self, identity: Identity, table: Table) -> None:
        super().__init__(identity, table.metadata.properties)
        self.table = table


def winner(handle: Handle) -> Winner:
    return handle.claim, int(handle.generation), handle.partition, handle.attempt


def _entry(epoch: EpochNumber, value: str, identity: Identity) -> Entry:
    fields = _fields(value)
    return Entry(
        uid=identity.uid,
        epoch=epoch,
        pipeline=fields["pipeline"],
        sink=fields["sink"],
        run=fields["run"],
        generation=Generation(fields["generation"]),
        winners=frozenset(_unrolled(fields["won"])),
    )


def _fields(value: str) -> dict[str, Any]:
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
