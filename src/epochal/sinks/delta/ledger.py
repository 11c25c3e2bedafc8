"""
The ledger of a Delta sink: application transactions, all that a Delta log keeps for good.

A transaction is an application id and a 64-bit number; the newest number of each id outlives
checkpoints, log clean-up and compaction. Three kinds of ids are written, in the very commit that
shows an epoch's rows:

    epochal-<uid>-s<tag>             number = the epoch
    epochal-claim-<uid>-s<tag>       number = the claim of that epoch's attempts
    epochal-name-<digest>-<n>        number = the n-th uid that wrote under this name
    epochal-run-<uid>-s<tag>-<n>     number = the n-th seven bytes of the run's key

The digest is of the pipeline's and the sink's name together. Ids can be looked up and not listed,
which is why the uids of one name are numbered: a reader counts up until there is none (I10). A uid
is twelve characters of base32, sixty bits, and so fits.

Which attempts an epoch consists of is in the metadata of its commit, as long as the log goes back
so far; from then on the claim shows whether the newest was committed from these attempts.

RESTORE puts the files of an older version back and leaves all transactions: by them alone, epochs
whose rows it took away would count as committed. The log tells, as long as it goes back so far:

    version   3 epoch 1   4 epoch 2   5 epoch 3   6 RESTORE to 3      transaction: 3, rows: up to 1
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from deltalake import DeltaTable

from epochal.errors import InvariantBroken
from epochal.sinks.delta.client import (
    Entry,
    active_paths,
    epoch_after_restores,
    handles_in_history,
    is_restored_since,
    transaction_number,
)
from epochal.sinks.delta.table_files import is_written_by
from epochal.terms import (
    EpochNumber,
    Handle,
    Identity,
    Mark,
    SinkTag,
    Uid,
    handle_prefix,
)

Look = Callable[[str], "int | None"]
"""The newest number of an application id in a log, or None."""

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_UID_CHARACTERS = 12
_CLAIM_CHARACTERS = 8
_BYTES_PER_NUMBER = 7
_UIDS_MAX = 10_000


def ledger_id(uid: Uid, tag: SinkTag) -> str:
    return f"{handle_prefix(uid)}s{tag}"


class NewestEpoch:
    """The newest epoch of a ledger whose rows are there, also after RESTORE. For one process."""

    def __init__(self, identity: Identity) -> None:
        self._id = ledger_id(identity.uid, identity.tag)
        self._version = -1
        self._number: int | None = None
        self._epoch: int | None = None

    def of(self, table: DeltaTable) -> int | None:
        """
        Reads only what was added to the log since the last call, and not a version that can only be
        an epoch's own commit.
        """
        version, number = table.version(), transaction_number(table, self._id)
        if number is None or (version, number) == (self._version, self._number):
            return self._epoch if number is not None else None
        is_new = number != self._number
        is_read = 0 <= self._version < version
        is_own_alone = is_new and version == self._version + 1
        if is_read and (is_own_alone or not is_restored_since(table, self._version)):
            self._epoch = number if is_new else self._epoch
        else:
            self._epoch = epoch_after_restores(table, self._id, number)
        self._version, self._number = version, number
        return self._epoch


class Ledger:
    """What one handle of a table proves of one sink; nothing where there is no table yet."""

    def __init__(
        self, identity: Identity, table: DeltaTable | None, newest: NewestEpoch | None = None
    ) -> None:
        self._identity = identity
        self._table = table
        self._newest = newest or NewestEpoch(identity)
        self._uids = Uids(identity)
        self._id = ledger_id(identity.uid, identity.tag)
        self._claim_id = f"epochal-claim-{identity.uid}-s{identity.tag}"
        self._handles: dict[EpochNumber, set[str] | None] = {}

    @property
    def table(self) -> DeltaTable:
        if self._table is None:
            raise InvariantBroken("a table that does not exist was about to be written")
        return self._table

    def is_done(self, epoch: EpochNumber) -> bool:
        newest = None if self._table is None else self._newest.of(self._table)
        return newest is not None and newest >= epoch

    def was_done(self, epoch: EpochNumber) -> bool:
        """The same, if RESTORE took its rows away or not."""
        newest = None if self._table is None else transaction_number(self._table, self._id)
        return newest is not None and newest >= epoch

    def names(self, handle: Handle) -> bool | None:
        if not self.was_done(handle.epoch):
            return None
        named = self._named(handle.epoch)
        if named is not None:
            return str(handle) in named
        is_active = any(is_written_by(handle, path) for path in active_paths(self.table))
        return True if is_active else None

    def is_of(self, epoch: EpochNumber, handles: frozenset[Handle]) -> bool:
        named = self._named(epoch)
        if named is not None:
            return named == {*map(str, handles)}
        newest = transaction_number(self.table, self._id)
        number = transaction_number(self.table, self._claim_id)
        claim = None if number is None else letters_of(number, _CLAIM_CHARACTERS)
        return newest == epoch and claim in {handle.claim for handle in handles}

    def marks(self) -> list[Mark]:
        table = self._table
        if table is None:
            return []
        marks = self._uids.newest(lambda app_id: transaction_number(table, app_id))
        mine, newest = self._identity.uid, self._newest.of(table)
        others = [mark for mark in marks if mark.uid != mine]
        if newest is None:
            return others
        own = [replace(one, epoch=EpochNumber(newest)) for one in marks if one.uid == mine]
        return [*others, *own]

    def entry(self, epoch: EpochNumber, handles: Sequence[Handle]) -> Entry:
        """What the commit of an epoch writes beside its files."""
        table = self.table
        newest = max(handles, key=lambda handle: handle.generation, default=self._identity)
        return Entry(
            ledger=self._id,
            epoch=epoch,
            handles=tuple(sorted(map(str, handles))),
            transactions={
                self._claim_id: number_of(newest.claim),
                **self._uids.to_write(lambda app_id: transaction_number(table, app_id), epoch),
            },
        )

    def _named(self, epoch: EpochNumber) -> set[str] | None:
        if epoch not in self._handles:
            self._handles[epoch] = handles_in_history(self.table, epoch, self._id)
        return self._handles[epoch]


@dataclass(frozen=True, slots=True)
class Uids:
    """The uids that wrote to one table under one pipeline's and one sink's name."""

    identity: Identity

    def newest(self, look: Look) -> list[Mark]:
        """The newest epoch of each uid, as far as it has one."""
        marks = []
        for uid in self._known(look):
            epoch = look(ledger_id(uid, self.identity.tag))
            if epoch is not None:
                marks.append(Mark(uid=uid, epoch=EpochNumber(epoch), run=self._run(look, uid)))
        return marks

    def to_write(self, look: Look, epoch: EpochNumber) -> Mapping[str, int]:
        """
        Every id and number that the commit of an epoch writes. All are written each time, so that a
        table that forgets old transactions keeps those of a pipeline that is running.
        """
        mine = self.identity.uid
        # No further than to my own number: to find that an id is nowhere, all of a log is read.
        at = sum(1 for _ in takewhile(lambda uid: uid != mine, self._known(look)))
        return {
            ledger_id(mine, self.identity.tag): epoch,
            self._name_id(at): number_of(mine),
            **{
                self._run_id(mine, part): number
                for part, number in enumerate(_numbers(self.identity.run))
            },
        }

    def _known(self, look: Look) -> Iterator[Uid]:
        for at in range(_UIDS_MAX):
            number = look(self._name_id(at))
            if number is None:
                return
            yield Uid(letters_of(number, _UID_CHARACTERS))

    def _run(self, look: Look, uid: Uid) -> str | None:
        parts: list[bytes] = []
        while (number := look(self._run_id(uid, len(parts)))) is not None:
            parts.append(_bytes_of(number))
        return b"".join(parts).decode() if parts else None

    def _name_id(self, at: int) -> str:
        name = f"{self.identity.pipeline}\0{self.identity.sink}"
        return f"epochal-name-{hashlib.sha256(name.encode()).hexdigest()[:24]}-{at}"

    def _run_id(self, uid: Uid, at: int) -> str:
        return f"epochal-run-{uid}-s{self.identity.tag}-{at}"


def number_of(letters: str) -> int:
    number = 0
    for character in letters:
        number = number * len(_ALPHABET) + _ALPHABET.index(character)
    return number


def letters_of(number: int, count: int) -> str:
    characters = []
    for _ in range(count):
        number, digit = divmod(number, len(_ALPHABET))
        characters.append(_ALPHABET[digit])
    if number:
        raise InvariantBroken(
            f"the table's log has a transaction of ours whose number is more than {count} letters"
        )
    return "".join(reversed(characters))


def _numbers(run: str | None) -> Iterator[int]:
    """A run's key as numbers below 2^60, each led by its number of bytes."""
    if run is None:
        return
    written = run.encode()
    for start in range(0, max(len(written), 1), _BYTES_PER_NUMBER):
        part = written[start : start + _BYTES_PER_NUMBER]
        yield int.from_bytes(bytes([len(part)]) + part.ljust(_BYTES_PER_NUMBER, b"\0"), "big")


def _bytes_of(number: int) -> bytes:
    length, *part = number.to_bytes(_BYTES_PER_NUMBER + 1, "big")
    return bytes(part[:length])
