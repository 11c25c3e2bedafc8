"""
The commit of prepared files: one marker per attempt, and a ledger that is written with the rows.

Files, Delta and Iceberg prepare data files that no reader looks at yet, and make them visible by
one act of the target: a manifest, a version, a snapshot. What they share is here.

A marker is a small file named by the attempt's handle (I6). It means: files of this attempt may
exist, and no ledger entry names them. Listing markers is listing what is in doubt (I5), and
costs the same however large the table is.

    task      put marker ── write files ── make them durable ── marker still there? ── receipt
    driver            (commit)   read ledger ── all files there? ── publish ── delete marker
    driver            (abort)    read ledger ── delete files ── delete marker

- The marker comes before the first file, so a killed task leaves nothing that is not listed.
- An abort can meet a task that still writes. That task finds its marker gone when it has written
  everything, removes its files and fails.
- The marker goes after the commit. A driver that dies between the two leaves a marker of rows that
  are visible; so the ledger is read after the markers were listed, and what it names is never
  discarded.

- A marker is put, not put if absent: its name has one writer (I6). A copy of that put that arrives
  late, after the marker was deleted, brings it back, and the next listing clears it: the ledger
  names it, or there are no files to discard.

The commit asks the ledger first. Two drivers may carry out one decision at the same time (I7); the
target refuses the second one's commit because the first one came in between, and the second looks
again before it repeats anything:

    old driver  read ledger: no epoch 7 ─────────────────── publish 7: refused ── read ledger: done
    new driver       read ledger: no epoch 7 ── publish 7

Done means: under the very handles that are to be committed. An entry of other handles is of a
driver that works with a copy of the epoch log, and proves nothing of these.
"""

from __future__ import annotations

import hashlib
import json
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from epochal.contract import Begin
from epochal.errors import (
    EpochalError,
    PreparedLost,
    Refused,
    TryAgain,
    copy_at_work,
    require_still_committed,
)
from epochal.kit.sink_base import CommitterBase
from epochal.storage import Entry
from epochal.terms import (
    NO_ROWS,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Mark,
    Proof,
    Receipt,
    Uid,
    claims_of,
    handle_prefix,
)

_THREADS = 8
_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def at_once(
    verb: Callable[[_Item], _Result], items: Iterable[_Item], *, at_least: int = 2
) -> list[_Result]:
    """Do the same to many files in parallel: every call to an object store is a round trip."""
    listed = list(items)
    if len(listed) < at_least:
        return [verb(item) for item in listed]
    with ThreadPoolExecutor(min(_THREADS, len(listed))) as pool:
        return list(pool.map(verb, listed))


class MarkerStore(Protocol):
    """The verbs of a `Store` that markers need."""

    def put(self, key: str, content: bytes) -> None: ...

    def read(self, key: str) -> bytes | None: ...

    def delete(self, keys: Sequence[str]) -> None: ...

    def entries(self, folder: str) -> Sequence[Entry]: ...


class Markers:
    """The markers of one target, below one folder."""

    def __init__(self, store: MarkerStore, folder: str) -> None:
        self._store = store
        self._folder = folder

    def put(self, handle: Handle, content: bytes = b"") -> None:
        self._store.put(self._key(handle), content)

    def read(self, handle: Handle) -> bytes | None:
        """What the marker holds; None where there is none."""
        return self._store.read(self._key(handle))

    def exists(self, handle: Handle) -> bool:
        return self.read(handle) is not None

    def delete(self, handles: Iterable[Handle]) -> None:
        self._store.delete([self._key(handle) for handle in handles])

    def in_doubt(self, identity: Identity) -> list[InDoubt]:
        """Every marker of this pipeline and this sink, and those whose name can't be read."""
        return of_sink(identity, self.of_pipeline(identity.uid))

    def of_pipeline(self, uid: Uid) -> list[InDoubt]:
        """Every marker of this pipeline, of any sink."""
        now = time.time()
        return [
            InDoubt(
                name=entry.name,
                handle=Handle.parse(entry.name),
                age_s=max(0.0, now - entry.modified_at),
            )
            for entry in self._store.entries(self._folder)
            if entry.name.startswith(handle_prefix(uid))
        ]

    def _key(self, handle: Handle) -> str:
        return f"{self._folder}/{handle}"


class EpochStore(Protocol):
    """The verbs of a `Store` that `take_epoch` needs."""

    def put_if_absent(self, key: str, content: bytes) -> bool: ...

    def read(self, key: str) -> bytes | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenEpoch:
    """What `take_epoch` found or put."""

    keys: Sequence[str]
    is_new: bool
    """This call put the last one. Else an earlier one did, here or in another process."""


def take_epoch(store: EpochStore, key: str, receipts: Sequence[Receipt]) -> TakenEpoch | None:
    """
    Make these handles the only ones under which an epoch is carried out, before anything of it gets
    outside piece by piece. Returns the keys that say so; None where a driver of a copy was first.

    Rows that were written again have other handles than their log had decided before. They go under
    another key, which has the digest of those they replace: of two drivers that replace the same,
    one goes on. The keys may be removed once the ledger has the epoch, so after this call the
    ledger must be read once more.
    """
    mine = json.dumps(sorted(str(receipt.handle) for receipt in receipts)).encode()
    keys = [key]
    while not store.put_if_absent(keys[-1], mine):
        there = store.read(keys[-1])
        if there is None:
            continue
        if there == mine:
            return TakenEpoch(keys=keys, is_new=False)
        named = (Handle.parse(name) for name in json.loads(there))
        if {handle.claim for handle in named if handle is not None} - claims_of(receipts):
            return None
        keys.append(_key_after(key, there))
    return TakenEpoch(keys=keys, is_new=True)


def takers(store: EpochStore, key: str) -> dict[str, frozenset[str]]:
    """The keys that `take_epoch` has put for an epoch, each with the handles in it."""
    found: dict[str, frozenset[str]] = {}
    at = key
    while (there := store.read(at)) is not None:
        found[at] = frozenset(json.loads(there))
        at = _key_after(key, there)
    return found


def _key_after(key: str, there: bytes) -> str:
    """Where those go that replace the handles that are there."""
    return f"{key}-{hashlib.sha256(there).hexdigest()[:16]}"


def of_sink(identity: Identity, listed: Iterable[InDoubt]) -> list[InDoubt]:
    """Those of this sink, and those whose name can't be read: they are left for a person."""
    return [one for one in listed if one.handle is None or one.handle.sink == identity.tag]


def is_of(identity: Identity, handle: Handle | None) -> bool:
    """Whether a file's handle is one of this sink under this uid."""
    return handle is not None and (handle.uid, handle.sink) == (identity.uid, identity.tag)


OTHERS_WROTE = ", of which others wrote some or files were compacted"
"""What a count says of a table whose files are not all this sink's own."""


def rows_by_epoch(
    identity: Identity, counted: Iterable[tuple[Handle | None, int]]
) -> dict[EpochNumber, int] | None:
    """Rows of a table's files per epoch; None where a file is not this sink's own."""
    rows: Counter[EpochNumber] = Counter()
    for handle, count in counted:
        if handle is None or not is_of(identity, handle):
            return None
        rows[handle.epoch] += count
    return dict(rows)


class Ledger(Protocol):
    """A target's ledger for one sink, as one read found it."""

    def is_done(self, epoch: EpochNumber) -> bool:
        """Whether it proves that this epoch is committed."""

    def names(self, handle: Handle) -> bool | None:
        """Whether the commit of the handle's epoch took it; None where there is no such entry."""

    def is_of(self, epoch: EpochNumber, handles: frozenset[Handle]) -> bool:
        """
        Whether an epoch that is done was committed from these very handles. False where the ledger
        has only later ones: this driver was superseded, or a copy of its log has gone past it.
        """

    def marks(self) -> Sequence[Mark]:
        """The newest epoch of every uid that wrote under this pipeline's and this sink's name."""


_Read = TypeVar("_Read", bound=Ledger)


class Conflict(Exception):
    """A publish that was refused or not answered. `error` is raised once repeating it is over."""

    def __init__(self, error: EpochalError) -> None:
        super().__init__(str(error))
        self.error = error


class MarkedFilesCommitter(CommitterBase, Generic[_Read]):
    """
    The verbs of a committer whose attempts are marked and whose rows are published in one act.

    A sink defines how its ledger is read, which prepared files are missing, how rows are published
    and how an attempt is discarded. The order of these steps and their consequences are here.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        target: str,
        trusts_rehearsal: bool = False,
        conflict_waits_s: Sequence[float] = (),
    ) -> None:
        """
        `trusts_rehearsal`: a commit need not look for files again that its rehearsal saw a moment
        ago in this process. `conflict_waits_s`: between repetitions of a publish that was refused.
        """
        self._identity = identity
        self._target = target
        self._trusts_rehearsal = trusts_rehearsal
        self._conflict_waits_s = conflict_waits_s
        self._rehearsed: tuple[EpochNumber, frozenset[Handle]] | None = None
        self._after = identity.committed
        """The newest epoch that was committed here before the one at work."""

    # The contract

    def begin(self, begin: Begin) -> Json:
        self._after = begin.newest_committed
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """See every prepared file from here, and that the target takes these rows as it is now."""
        with self._errors(f"rehearse epoch {epoch}"):
            self._forget_rehearsal()
            with self._reading(is_rehearsed=False) as ledger:
                if ledger.is_done(epoch):
                    raise self._committed_by_others(epoch)
                self._require_not_back(ledger)
                self._require_seen(ledger, epoch, receipts)
                self._require_acceptable(ledger, epoch, receipts)
            self._rehearsed = _key(epoch, receipts)

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        is_rehearsed = self._take_rehearsal(epoch, receipts)
        with self._errors(f"commit epoch {epoch}"):
            for wait_s in (*self._conflict_waits_s, None):
                try:
                    self._commit_once(epoch, receipts, is_rehearsed=is_rehearsed)
                    break
                except Conflict as conflict:
                    if wait_s is None:
                        raise conflict.error from conflict
                    time.sleep(wait_s)
                is_rehearsed = False
            self._clear(receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        with self._errors(f"abort epoch {epoch}"):
            self._forget_rehearsal()
            marked = self._marked(receipts)
            if not marked:
                return
            ledger = self._read()
            at_once(self._discard, [one for one in marked if self._is_discardable(ledger, one)])
            self._clear([one for one in marked if ledger.names(one.handle)])

    def in_doubt(self) -> Sequence[InDoubt]:
        with self._errors("list what is prepared"):
            listed = self._listed()
            if not listed:
                return []
            # After the listing: what was committed in between is proven by now.
            ledger = self._read()
            named = {one.handle for one in listed if one.handle and ledger.names(one.handle)}
            for one in listed:
                if one.handle in named:
                    self._clear_listed(one)
            return [one for one in listed if one.handle not in named]

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        with self._errors("ask for proof"):
            # In this order: of what is committed meanwhile, the ledger has the entry (I9).
            is_prepared = self._is_prepared(receipt)
            ledger = self._read()
            is_named = ledger.names(receipt.handle)
            if is_named:
                return Proof.COMMITTED
            # A task without rows leaves no file: that there is none proves nothing. And a ledger
            # that is past this epoch may have forgotten the entry.
            is_open = is_named is None and (
                not receipt.token.get("files")
                or ledger.is_done(epoch)
                or self._may_be_visible(ledger, receipt)
            )
            return Proof.UNKNOWN if is_prepared or is_open else Proof.ABORTED

    def newest(self) -> Sequence[Mark] | None:
        with self._errors("read the ledger"):
            return self._read().marks()

    # Defined by a sink

    @abstractmethod
    def _errors(self, verb: str) -> AbstractContextManager[None]:
        """Turn what the target's library raises into one of our errors."""

    @abstractmethod
    def _read(self) -> _Read:
        """The ledger as it is now."""

    @abstractmethod
    def _reading(self, *, is_rehearsed: bool) -> AbstractContextManager[_Read]:
        """
        The ledger that a rehearsal or a commit works on. Where these very receipts were rehearsed a
        moment ago it may be the one of the rehearsal.
        """

    @abstractmethod
    def _require_prepared(
        self, ledger: _Read, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        """Raise `PreparedLost` where a prepared file is gone, or not of this table any more."""

    def _require_seen(self, ledger: _Read, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """The same before the decision: then the epoch is tried again."""
        try:
            self._require_prepared(ledger, epoch, receipts)
        except PreparedLost as error:
            raise TryAgain(f"{error.message}; no decision was made", error.hint) from error

    @abstractmethod
    def _require_acceptable(
        self, ledger: _Read, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        """Raise where the target would refuse these rows by their content (I3)."""

    def _is_committed(self, ledger: _Read, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        """Whether nothing is left to publish. Raises where other attempts were published."""
        if not ledger.is_done(epoch):
            return False
        if not ledger.is_of(epoch, frozenset(receipt.handle for receipt in receipts)):
            raise self._committed_by_others(epoch)
        return True

    @abstractmethod
    def _publish(self, ledger: _Read, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Make the rows visible and write the ledger entry, on the very state that `ledger` was read
        from. Raises `Conflict` where another commit came in between, or no answer came.
        """

    @abstractmethod
    def _clear(self, receipts: Sequence[Receipt]) -> None:
        """Remove what committed attempts leave beside their rows: markers, last of all."""

    @abstractmethod
    def _discard(self, receipt: Receipt) -> None:
        """Remove the files of an attempt that is not committed, then its marker. Repeatable."""

    @abstractmethod
    def _listed(self) -> Sequence[InDoubt]:
        """All that is marked under this pipeline's uid and this sink."""

    def _clear_listed(self, found: InDoubt) -> None:
        """Remove what is listed of an attempt that is committed."""
        if found.handle is not None:
            self._clear([Receipt(handle=found.handle, fingerprint=NO_ROWS)])

    @abstractmethod
    def _is_prepared(self, receipt: Receipt) -> bool:
        """Whether files of it wait for a decision."""

    def _marked(self, receipts: Sequence[Receipt]) -> list[Receipt]:
        """Those to be aborted: one without a marker is committed, or was thrown away already."""
        return [receipt for receipt in receipts if self._is_prepared(receipt)]

    def _may_be_visible(self, ledger: _Read, receipt: Receipt) -> bool:  # noqa: ARG002
        """Whether readers may see rows of an attempt that no ledger entry names."""
        return False

    def _forget_rehearsal(self) -> None:
        """Give up what a rehearsal left open for its commit."""
        self._rehearsed = None

    # The rules

    def _take_rehearsal(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        """Whether these very receipts were rehearsed a moment ago; true at most once."""
        rehearsed, self._rehearsed = self._rehearsed, None
        return self._trusts_rehearsal and rehearsed == _key(epoch, receipts)

    def _commit_once(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], *, is_rehearsed: bool
    ) -> None:
        with self._reading(is_rehearsed=is_rehearsed) as ledger:
            if not self._is_committable(ledger, epoch, receipts, is_rehearsed=is_rehearsed):
                return
            self._publish(ledger, epoch, receipts)

    def _is_committable(
        self,
        ledger: _Read,
        epoch: EpochNumber,
        receipts: Sequence[Receipt],
        *,
        is_rehearsed: bool,
    ) -> bool:
        """False where the epoch is committed already; raises where it can't be."""
        if self._is_committed(ledger, epoch, receipts):
            return False
        if not is_rehearsed:
            self._require_not_back(ledger)
            self._require_prepared(ledger, epoch, receipts)
        return True

    def _require_not_back(self, ledger: _Read) -> None:
        """Raise where the ledger has lost the newest epoch that was committed here."""
        if self._after is not None and not ledger.is_done(self._after):
            require_still_committed(self._identity.sink, self._after, proven=None)

    def _is_discardable(self, ledger: _Read, receipt: Receipt) -> bool:
        is_named = ledger.names(receipt.handle)
        return is_named is False or (is_named is None and not self._may_be_visible(ledger, receipt))

    def _committed_by_others(self, epoch: EpochNumber) -> Refused:
        return copy_at_work(
            f"sink {self._identity.sink!r}: {self._target} proves epoch {epoch} committed, and not "
            "under the handles that this log has for it"
        )


def _key(epoch: EpochNumber, receipts: Sequence[Receipt]) -> tuple[EpochNumber, frozenset[Handle]]:
    return epoch, frozenset(receipt.handle for receipt in receipts)
