"""The rules of `kit.marked_files`, on a target in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from epochal.errors import OutcomeUnknown, PreparedLost, Refused, TryAgain
from epochal.kit.marked_files import Conflict, MarkedFilesCommitter, Markers
from epochal.storage.memory import MemoryStore
from epochal.terms import (
    NO_ROWS,
    EpochNumber,
    Generation,
    Handle,
    Identity,
    InDoubt,
    Mark,
    Proof,
    Receipt,
    Uid,
)

E0 = EpochNumber(0)


@dataclass
class Target:
    """Files by handle, and a ledger of the handles that each epoch consists of."""

    store: MemoryStore = field(default_factory=MemoryStore)
    files: set[Handle] = field(default_factory=set)
    epochs: dict[EpochNumber, frozenset[Handle]] = field(default_factory=dict)
    published: list[EpochNumber] = field(default_factory=list)
    overtaken: list[Any] = field(default_factory=list)
    """Called once each at a publish, before it: what another driver does meanwhile."""

    @property
    def markers(self) -> Markers:
        return Markers(self.store, "prepared")

    def prepare(self, handle: Handle) -> Receipt:
        self.markers.put(handle)
        self.files.add(handle)
        return Receipt(handle=handle, fingerprint=NO_ROWS, token={"files": [str(handle)]})


@dataclass
class Read:
    epochs: dict[EpochNumber, frozenset[Handle]]

    def is_done(self, epoch: EpochNumber) -> bool:
        return any(known >= epoch for known in self.epochs)

    def names(self, handle: Handle) -> bool | None:
        named = self.epochs.get(handle.epoch)
        return None if named is None else handle in named

    def is_of(self, epoch: EpochNumber, handles: frozenset[Handle]) -> bool:
        return self.epochs.get(epoch, handles) == handles

    def marks(self) -> list[Mark]:
        return []


class Lake(MarkedFilesCommitter[Read]):
    def __init__(self, target: Target, identity: Identity, **options: Any) -> None:
        super().__init__(identity, target="memory", conflict_waits_s=(0, 0), **options)
        self.target = target

    def check(self, schema: Any) -> list[Any]:
        return []

    def _errors(self, verb: str) -> Any:
        return nullcontext()

    def _read(self) -> Read:
        return Read(dict(self.target.epochs))

    @contextmanager
    def _reading(self, *, is_rehearsed: bool) -> Iterator[Read]:
        yield self._read()

    def _require_prepared(self, ledger: Read, epoch: EpochNumber, receipts: Any) -> None:
        lost = tuple(str(one.handle) for one in receipts if one.handle not in self.target.files)
        if lost:
            raise PreparedLost(f"epoch {epoch}: {lost} are gone", "look", handles=lost)

    def _require_acceptable(self, ledger: Read, epoch: EpochNumber, receipts: Any) -> None:
        """Takes all rows."""

    def _publish(self, ledger: Read, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        if self.target.overtaken:
            self.target.overtaken.pop(0)()
        if ledger.epochs != self.target.epochs:
            raise Conflict(OutcomeUnknown("others commit all the time"))
        self.target.epochs[epoch] = frozenset(one.handle for one in receipts)
        self.target.published.append(epoch)

    def _clear(self, receipts: Sequence[Receipt]) -> None:
        self.target.markers.delete(one.handle for one in receipts)

    def _discard(self, receipt: Receipt) -> None:
        self.target.files.discard(receipt.handle)
        self.target.markers.delete([receipt.handle])

    def _listed(self) -> list[InDoubt]:
        return self.target.markers.in_doubt(self._identity)

    def _is_prepared(self, receipt: Receipt) -> bool:
        return self.target.markers.exists(receipt.handle)


@pytest.fixture
def target() -> Target:
    return Target()


def identity(generation: int = 1) -> Identity:
    return Identity(
        pipeline="orders",
        uid=Uid("abcdefgh2345"),
        sink="lake",
        generation=Generation(generation),
    )


def handle(attempt: int = 1, epoch: int = 0, generation: int = 1) -> Handle:
    return identity(generation).handle(EpochNumber(epoch), partition=0, attempt=attempt)


def test_a_repeated_commit_asks_the_ledger_and_publishes_nothing(target):
    receipt = target.prepare(handle())
    for _ in range(2):
        Lake(target, identity()).commit(E0, [receipt])
    assert target.published == [0]
    assert target.store.names("prepared") == []


def test_a_driver_that_is_overtaken_finds_the_epoch_done(target):
    receipt = target.prepare(handle())
    target.overtaken = [lambda: Lake(target, identity(2)).commit(E0, [receipt])]
    Lake(target, identity()).commit(E0, [receipt])
    assert target.published == [0]


def test_a_driver_that_is_always_overtaken_gives_up_with_the_targets_error(target):
    receipt = target.prepare(handle())

    def another(number: int) -> Any:
        return lambda: target.epochs.__setitem__(EpochNumber(-number), frozenset())

    target.overtaken = [another(number) for number in (1, 2, 3)]
    with pytest.raises(OutcomeUnknown, match="all the time"):
        Lake(target, identity()).commit(E0, [receipt])
    assert target.published == []
    assert target.markers.exists(receipt.handle)


def test_lost_files_are_tried_again_before_the_decision_and_reported_after_it(target):
    lake, receipt = Lake(target, identity()), target.prepare(handle())
    target.files.clear()
    with pytest.raises(TryAgain, match="no decision was made"):
        lake.rehearse(E0, [receipt])
    with pytest.raises(PreparedLost) as caught:
        lake.commit(E0, [receipt])
    assert caught.value.handles == (str(receipt.handle),)


def test_files_that_the_rehearsal_saw_are_not_looked_for_again(target):
    lake = Lake(target, identity(), trusts_rehearsal=True)
    receipt = target.prepare(handle())
    lake.rehearse(E0, [receipt])
    target.files.clear()
    lake.commit(E0, [receipt])
    assert target.published == [0]


def test_an_epoch_that_is_committed_is_refused_before_the_decision(target):
    winner = target.prepare(handle(generation=2))
    Lake(target, identity(2)).commit(E0, [winner])
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        Lake(target, identity(1)).rehearse(E0, [target.prepare(handle(2))])
    with pytest.raises(Refused, match="or the log was restored"):
        Lake(target, identity(2)).rehearse(E0, [target.prepare(handle(3, generation=2))])


def test_a_marker_that_a_dead_driver_left_is_removed_and_its_rows_stay(target):
    receipt, loser = target.prepare(handle(1)), target.prepare(handle(2))
    lake = Lake(target, identity())
    lake.commit(E0, [receipt])
    target.markers.put(receipt.handle)
    assert [one.handle for one in lake.in_doubt()] == [loser.handle]
    lake.abort(E0, [receipt, loser])
    assert target.files == {receipt.handle}
    assert lake.in_doubt() == []


def test_proof_needs_the_ledger_or_the_absence_of_what_was_prepared(target):
    lake, receipt = Lake(target, identity()), target.prepare(handle(1))
    without_rows = Receipt(handle=handle(9), fingerprint=NO_ROWS)
    assert lake.outcome(E0, receipt) is Proof.UNKNOWN
    assert lake.outcome(E0, without_rows) is Proof.UNKNOWN
    lake.abort(E0, [receipt])
    assert lake.outcome(E0, receipt) is Proof.ABORTED
    winner = target.prepare(handle(2))
    lake.commit(E0, [winner])
    assert lake.outcome(E0, winner) is Proof.COMMITTED
    assert lake.outcome(E0, without_rows) is Proof.ABORTED
    target.epochs = {EpochNumber(7): frozenset()}
    assert lake.outcome(E0, receipt) is Proof.UNKNOWN, "the ledger is past this epoch"
