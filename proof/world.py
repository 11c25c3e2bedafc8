"""
A world: the state outside of a simulated driver, which outlives it.

It has three parts. The log holds numbered records and lists beside them. A target holds prepared
rows, visible rows and a ledger, per pipeline and uid, and commits handle by handle: the weakest
shape a sink may have, as a reader may see an epoch half committed. Spark's checkpoint records which
epochs are planned and finished.

A world can be copied and has a key: two worlds with one key behave alike from then on. Each
call is reported to it when a driver issues it and when its effect lands; the judge checks both.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from epochal.errors import (
    OutcomeUnknown,
    PreparedLost,
    Refused,
    copy_at_work,
    require_still_committed,
)
from epochal.terms import (
    Claim,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Mark,
    Proof,
    Receipt,
    SinkName,
    Uid,
    claims_of,
    handle_prefix,
    owner_of,
    sink_tag,
)
from epochal.testing.driver import Checkpoint
from proof.calls import LOG, SPARK, TARGET, Call
from proof.judge import Judge

Rows: TypeAlias = tuple[Hashable, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What there is to read: the rows of each partition of each epoch."""

    epochs: tuple[tuple[Rows, ...], ...]

    @classmethod
    def of(cls, *sizes: Sequence[int]) -> Source:
        """Epochs by the number of rows in each of their partitions."""
        return cls(
            epochs=tuple(
                tuple(
                    tuple(f"e{epoch}p{partition}r{row}" for row in range(size))
                    for partition, size in enumerate(partitions)
                )
                for epoch, partitions in enumerate(sizes)
            )
        )

    def rows(self, epoch: int) -> Rows:
        return tuple(row for partition in self.epochs[epoch] for row in partition)


class LogStore:
    __slots__ = ("lists", "records")

    def __init__(
        self, records: Mapping[int, bytes] | None = None, lists: Mapping[str, bytes] | None = None
    ) -> None:
        self.records = dict(records or {})
        self.lists = dict(lists or {})

    def copy(self) -> LogStore:
        return LogStore(self.records, self.lists)

    def key(self) -> Hashable:
        return frozenset(self.records.items()), frozenset(self.lists)

    def put_if_absent(self, number: int, record: bytes) -> bool:
        if number in self.records:
            return False
        self.records[number] = record
        return True

    def numbers(self) -> tuple[int, ...]:
        return tuple(sorted(self.records))

    def read(self, number: int) -> bytes | None:
        return self.records.get(number)

    def delete(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self.records.pop(number, None)

    def put_list(self, name: str, content: bytes) -> None:
        self.lists[name] = content

    def read_list(self, name: str) -> bytes | None:
        return self.lists.get(name)

    def list_names(self) -> tuple[str, ...]:
        return tuple(sorted(self.lists))

    def delete_lists(self, names: Sequence[str]) -> None:
        for name in names:
            self.lists.pop(name, None)


class Target:
    """One sink's target."""

    __slots__ = (
        "committed",
        "epochs",
        "gone",
        "name",
        "owners",
        "prepared",
        "pruned",
        "runs",
        "tag",
        "visible",
    )

    def __init__(self, name: SinkName) -> None:
        self.name = name
        self.tag = sink_tag(name)
        self.prepared: dict[str, Rows] = {}
        self.visible: dict[str, Rows] = {}
        """What readers see, with the handle that brought it."""
        self.committed: set[str] = set()
        """The ledger: handles, written together with their rows."""
        self.epochs: set[tuple[Uid, int]] = set()
        """The ledger: epochs, empty ones too."""
        self.owners: dict[tuple[Uid, int], Claim] = {}
        """The claim under which an epoch is carried out, written before its first handle."""
        self.pruned: dict[Uid, int] = {}
        self.runs: dict[Uid, str | None] = {}
        self.gone: set[str] = set()
        """Thrown away by the target itself, for good: a late prepare brings nothing back."""

    def copy(self) -> Target:
        other = Target.__new__(Target)
        other.name, other.tag = self.name, self.tag
        other.prepared, other.visible = dict(self.prepared), dict(self.visible)
        other.committed, other.epochs = set(self.committed), set(self.epochs)
        other.owners = dict(self.owners)
        other.pruned, other.runs = dict(self.pruned), dict(self.runs)
        other.gone = set(self.gone)
        return other

    def key(self) -> Hashable:
        return (
            frozenset(self.prepared.items()),
            frozenset(self.visible.items()),
            frozenset(self.committed),
            frozenset(self.epochs),
            frozenset(self.owners.items()),
            frozenset(self.pruned.items()),
            frozenset(self.gone),
        )

    def prepare(self, identity: Identity | None, handle: str, rows: Rows) -> None:  # noqa: ARG002
        if handle not in self.gone:
            self.prepared[handle] = rows

    def rehearse(
        self,
        identity: Identity,
        epoch: int,  # noqa: ARG002
        receipts: Sequence[Receipt],  # noqa: ARG002
        after: int | None = None,
    ) -> None:
        """Nothing simulated refuses by content; a schedule may make it. It may have gone back."""
        require_still_committed(self.name, after, proven=self.proven(identity.uid))

    def _require_not_back(
        self, identity: Identity, epoch: int, receipts: Sequence[Receipt], after: int | None
    ) -> None:
        """Of an epoch that is not committed under these very handles."""
        is_there = (identity.uid, epoch) in self.epochs
        if not (is_there and self.committed.issuperset(_names(receipts))):
            require_still_committed(self.name, after, proven=self.proven(identity.uid))

    def proven(self, uid: Uid) -> int | None:
        return max((epoch for owner, epoch in self.epochs if owner == uid), default=None)

    def commit(
        self,
        identity: Identity,
        epoch: int,
        receipts: Sequence[Receipt],
        after: int | None = None,
    ) -> None:
        self._require_not_back(identity, epoch, receipts, after)
        self._take(identity, epoch, receipts)
        if epoch < self.pruned.get(identity.uid, 0):
            return
        lost = [
            handle
            for handle in _names(receipts)
            if not self._commit_one(identity.uid, epoch, handle)
        ]
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: {len(lost)} of {len(receipts)} are neither prepared nor committed",
                handles=tuple(lost),
            )
        self.runs[identity.uid] = identity.run
        self.epochs.add((identity.uid, epoch))

    def _take(self, identity: Identity, epoch: int, receipts: Sequence[Receipt]) -> None:
        """Refuse an epoch that a driver with a copy of the log carries out, or has gone past."""
        mine, key = owner_of(receipts, identity), (identity.uid, epoch)
        newest = max((at for uid, at in self.owners if uid == identity.uid), default=-1)
        is_ours = self.owners.get(key) in {mine, *claims_of(receipts)}
        if receipts and epoch <= newest and not is_ours:
            raise copy_at_work(f"epoch {epoch} of {newest} belongs to {self.owners.get(key)}")
        if epoch > newest or (epoch == newest and receipts):
            self.owners[key] = mine

    def _commit_one(self, uid: Uid, epoch: int, handle: str) -> bool:
        if handle in self.committed:
            return True
        if handle not in self.prepared:
            return False
        self.visible[handle] = self.prepared.pop(handle)
        self.committed.add(handle)
        self.epochs.add((uid, epoch))
        return True

    def commit_half(
        self,
        identity: Identity,
        epoch: int,
        receipts: Sequence[Receipt],
        after: int | None = None,
    ) -> None:
        """What a crash in the middle of a commit leaves."""
        self._require_not_back(identity, epoch, receipts, after)
        self._take(identity, epoch, receipts)
        if epoch >= self.pruned.get(identity.uid, 0):
            for handle in _names(receipts)[: len(receipts) // 2]:
                self._commit_one(identity.uid, epoch, handle)

    def abort(self, identity: Identity, epoch: int, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        for handle in _names(receipts):
            self.prepared.pop(handle, None)

    def in_doubt(self, identity: Identity) -> tuple[InDoubt, ...]:
        prefix = handle_prefix(identity.uid)
        listed = (
            InDoubt(name=name, handle=Handle.parse(name))
            for name in sorted(self.prepared)
            if name.startswith(prefix)
        )
        return tuple(one for one in listed if one.handle and one.handle.sink == self.tag)

    def outcome(self, identity: Identity, epoch: int, receipt: Receipt) -> Proof:
        handle = str(receipt.handle)
        if handle in self.committed:
            return Proof.COMMITTED
        if handle in self.prepared or epoch < self.pruned.get(identity.uid, 0):
            return Proof.UNKNOWN
        return Proof.ABORTED

    def newest(self, identity: Identity) -> tuple[Mark, ...]:  # noqa: ARG002
        newest: dict[Uid, int] = {}
        for uid, epoch in self.epochs:
            newest[uid] = max(epoch, newest.get(uid, 0))
        return tuple(
            Mark(uid=uid, epoch=EpochNumber(epoch), run=self.runs.get(uid))
            for uid, epoch in sorted(newest.items())
        )

    def prune(self, identity: Identity, below: int) -> None:
        """Forget proofs under `below` but the newest, and remember that they were there."""
        newest = max((epoch for uid, epoch in self.epochs if uid == identity.uid), default=0)
        self.pruned[identity.uid] = max(min(below, newest), self.pruned.get(identity.uid, 0))
        self.epochs = {
            (uid, epoch)
            for uid, epoch in self.epochs
            if uid != identity.uid or epoch >= self.pruned[uid]
        }
        self.owners = {
            (uid, epoch): owner
            for (uid, epoch), owner in self.owners.items()
            if uid != identity.uid or epoch >= self.pruned[uid]
        }

    def expire(self, handles: Sequence[str]) -> None:
        """The target throws prepared rows away by itself, as one with a time limit does."""
        for handle in handles:
            self.prepared.pop(handle, None)
        self.gone |= set(handles)


class World:
    """
    Log, targets and checkpoint, and the judge that checks them.

    A copy shares its parts, and their keys, until one of them changes: the model checker makes
    millions of copies and changes one part at a time.
    """

    __slots__ = ("_borrowed", "_keys", "checkpoint", "judge", "log", "source", "targets")

    def __init__(self, source: Source, sinks: Sequence[SinkName]) -> None:
        self.source = source
        self.log = LogStore()
        self.targets = {name: Target(name) for name in sinks}
        self.checkpoint = Checkpoint([f"offsets-{at}" for at in range(len(source.epochs))])
        self.judge = Judge()
        self._borrowed: set[str] = set()
        self._keys: dict[str, Hashable] = {}

    def copy(self) -> World:
        other = World.__new__(World)
        other.source = self.source
        other.log, other.targets, other.checkpoint = self.log, dict(self.targets), self.checkpoint
        other.judge = self.judge.copy()
        self._borrowed = {LOG, SPARK, *self.targets}
        other._borrowed = set(self._borrowed)
        other._keys = dict(self._keys)
        return other

    def key(self) -> Hashable:
        rooms = (
            self._key(LOG, self.log),
            self._key(SPARK, self.checkpoint),
            *(self._key(name, target) for name, target in self.targets.items()),
        )
        return (rooms, self.judge.key())

    def _key(self, name: str, room: LogStore | Checkpoint | Target) -> Hashable:
        known = self._keys.get(name)
        if known is None:
            known = self._keys[name] = hash(room.key())
        return known

    def _about_to_change(self, name: str) -> None:
        self._keys.pop(name, None)
        if name not in self._borrowed:
            return
        self._borrowed.remove(name)
        if name == LOG:
            self.log = self.log.copy()
        elif name == SPARK:
            self.checkpoint = self.checkpoint.copy()
        else:
            self.targets[SinkName(name)] = self.targets[SinkName(name)].copy()

    def issue(self, call: Call) -> None:
        """A driver makes a call: what it may not even try is judged here."""
        self.judge.issued(self, call)

    def land(self, call: Call) -> Any:
        """The effect of a call, now."""
        self.judge.landing(self, call)
        if call.changes_something:
            self._about_to_change(call.name or call.room)
        answer = self._verb(call)(*call.args)
        if call.room == LOG and call.verb == "put_if_absent" and answer:
            self.judge.recorded(self, call)
        return answer

    def conflict(self) -> bool | None:
        """What `put_if_absent` makes of a conflict: None, as it is not known who is in the slot."""
        return None

    def land_late(self, call: Call) -> None:
        """The effect of a call whose caller is no longer listening, at any later time."""
        self.judge.arrives_late(call)
        self.land_unheard(call)

    def land_unheard(self, call: Call) -> None:
        """The effect of a call whose answer is lost."""
        try:
            self.land(call)
        except (PreparedLost, OutcomeUnknown, Refused):
            return

    def expire(self, sink: SinkName, handles: Sequence[str]) -> None:
        self.judge.expired(handles)
        self._about_to_change(sink)
        self.targets[sink].expire(handles)

    def go_back(self, sink: SinkName, old: Target) -> None:
        """A backup is restored, or a replica that lagged takes over."""
        self.judge.went_back(self.targets[sink], old)
        self._about_to_change(sink)
        self.targets[sink] = old

    def _verb(self, call: Call) -> Callable[..., Any]:
        if call.room == TARGET:
            target = self.targets[SinkName(call.name)]
            verb: Callable[..., Any] = getattr(target, call.verb)
            return lambda *args: verb(call.identity, *args)
        room: object = self.log if call.room == LOG else self.checkpoint
        found: Callable[..., Any] = getattr(room, call.verb)
        return found


def _names(receipts: Sequence[Receipt]) -> list[str]:
    return [str(receipt.handle) for receipt in receipts]
