"""
The judge: the invariants as checks on a world, in every state and at rest.

The judge keeps what no driver has: the history. A record is *effective* if no higher slot had
ever been filled when it landed; the newest effective record is the truth, and a decision exists
from the moment such a record names it. Everything else follows from comparing calls and effects
with that truth:

- I1, I3  a commit may be issued, and may land, only for handles that an effective decision names;
- I2      effective records never take a decision back, change it, or decide an epoch twice;
- I4      a decision leaves the log only when its target proves it done, or a person gave it up;
          lists beside the log that the truth names are there, from its record on;
- I5      an abort never meets a handle that a decision names, nor a decision a handle that was
          aborted; a driver that says STOP left nothing prepared that it could have listed, as the
          next one may leave a sink out;
- I6      a decision names one attempt per partition, and together they are the epoch's rows, once;
- I7      no effective record is of an older generation; nobody aborts without having asked the
          log first; the driver of the newest claim is not fenced, and one whose claim was not
          effective goes no further;
- I8      at rest, an empty epoch is proven at every target of its decision;
- I9      an unanswered call is neither taken for done (I4 sees it) nor for failed (I5 sees it),
          and nobody asks a target to forget the proof of the newest decision;
- I10     the uid never changes, and a decision's offsets are those that the engine planned.

At rest every row of every decided epoch is visible once in each of its sinks, nothing else is
visible, nothing is in doubt, the log is small, and no list lies beside it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from epochal.errors import Fenced, Unsettled, WentBack
from epochal.protocol.receipts import lists_of
from epochal.protocol.records import decode
from epochal.protocol.state import Record, RecordKind, State
from epochal.terms import Decision, Handle, Receipt, SinkName, Uid, total
from epochal.testing.crash import Breach
from proof.calls import LOG, TARGET, Call

if TYPE_CHECKING:
    from proof.world import Target, World

_CLEARING = frozenset(
    {"abort", "in_doubt", "newest", "prune", "outcome", "numbers", "read", "read_list"}
)
"""What a driver may do between asking the log who is newest and aborting."""

LOG_RECORDS_MAX = 200

_decoded = lru_cache(maxsize=4096)(decode)


class Judge:
    __slots__ = (
        "_answered",
        "_asked",
        "_claimants",
        "_clear_generation",
        "_decided",
        "_expired",
        "_hanging",
        "_hanging_commits",
        "_latecomers",
        "_named",
        "_rehearsed",
        "_top",
        "claimant",
        "lost",
        "truth",
    )

    def __init__(self) -> None:
        self.truth: State | None = None
        self.claimant = ""
        """The driver of the newest claim."""
        self._claimants: frozenset[str] = frozenset()
        """Drivers whose claims were effective."""
        self._top = 0
        self._decided: dict[int, frozenset[SinkName]] = {}
        self._named: dict[str, int] = {}
        """Every handle that an effective decision ever named, with its epoch."""
        self._expired: frozenset[str] = frozenset()
        self._latecomers: frozenset[str] = frozenset()
        """Prepared by an old driver after a newer one had claimed: a sweep may have missed them."""
        self._rehearsed: frozenset[tuple[str, int, frozenset[str]]] = frozenset()
        self._asked: dict[str, bool] = {}
        """Whether a driver has asked the log since it last did anything but clear up."""
        self._clear_generation = 0
        """The newest driver that stopped and said that none of its tasks can prepare any more."""
        self._hanging: frozenset[tuple[str, str]] = frozenset()
        """Drivers, and targets that hang in a call of theirs."""
        self._hanging_commits: frozenset[str] = frozenset()
        """Drivers that wait for a commit that hangs."""
        self._answered: frozenset[tuple[str, SinkName, int]] = frozenset()
        """Drivers that know of a sink that it has committed an epoch."""
        self.lost: dict[SinkName, frozenset[tuple[Uid, int]]] = {}
        """Targets that went back in time, with the epochs that were committed and are gone."""

    def copy(self) -> Judge:
        other = Judge.__new__(Judge)
        self.copy_into(other)
        return other

    def copy_into(self, other: Judge) -> None:
        other.truth, other._top, other.claimant = self.truth, self._top, self.claimant
        other._claimants = self._claimants
        other._decided, other._named = dict(self._decided), dict(self._named)
        other._expired, other._rehearsed = self._expired, self._rehearsed
        other._latecomers = self._latecomers
        other._asked = dict(self._asked)
        other._clear_generation = self._clear_generation
        other._hanging, other._hanging_commits = self._hanging, self._hanging_commits
        other._answered = self._answered
        other.lost = dict(self.lost)

    def key(self) -> Hashable:
        """`_asked` and what drivers know follow from their own calls, which the state has."""
        return (
            self._top,
            frozenset(self._decided.items()),
            frozenset(self._named.items()),
            self._expired,
            self._latecomers,
            self._rehearsed,
            frozenset(self.lost.items()),
        )

    @property
    def decided(self) -> Collection[int]:
        return self._decided.keys()

    # Every state

    def issued(self, world: World, call: Call) -> None:
        """A driver makes this call, whether or not it will arrive."""
        if call.verb == "numbers":
            self._asked[call.actor] = True
        elif call.verb not in _CLEARING:
            self._asked[call.actor] = False
        if call.room == TARGET and call.verb == "newest":
            self._has_claimed(call)
        if call.identity is not None and (call.actor, call.name) in self._hanging:
            raise Breach("contract", f"{call}: an earlier call to this target has not ended")
        if call.room == TARGET and call.verb == "abort":
            self._may_abort(call)
        if call.room == TARGET:
            self.landing(world, call)

    def landing(self, world: World, call: Call) -> None:
        """The effect of this call is about to happen."""
        if call.room == LOG and call.verb == "delete_lists":
            self._may_delete_lists(call)
        if call.room != TARGET:
            return
        if call.verb in ("commit", "commit_half"):
            self._may_commit(world, call)
        elif call.verb == "abort":
            self._may_drop(world, call)
        elif call.verb == "rehearse":
            epoch, handles = _epoch_and_handles(call)
            self._rehearsed |= {(call.name, epoch, frozenset(handles))}
        elif call.verb == "prepare":
            self._one_attempt(world, call)
        elif call.verb == "prune":
            self._may_forget(call)

    def _may_delete_lists(self, call: Call) -> None:
        (names,) = cast("tuple[tuple[str, ...]]", call.args)
        if self.truth is not None and (needed := lists_of(self.truth.unsettled) & set(names)):
            raise Breach("I4", f"{call}: the newest record names {sorted(needed)}")

    def _may_commit(self, world: World, call: Call) -> None:
        epoch, handles = _epoch_and_handles(call)
        if SinkName(call.name) not in self._decided.get(epoch, ()):
            raise Breach("I3", f"{call}: no durable decision for epoch {epoch}")
        for handle in handles:
            if self._named.get(handle) != epoch:
                raise Breach("I1", f"{call}: no decision names {handle}")
        if self.lost:
            self._knows_of_no_gap(world.targets[SinkName(call.name)], call, epoch)

    def _knows_of_no_gap(self, target: Target, call: Call, epoch: int) -> None:
        """
        What a driver, or the log that it started with, knows to be committed there is there, or
        the target refuses.
        """
        after = cast("int | None", call.args[2])
        proven = target.proven(self.truth.uid) if self.truth is not None else None
        if self.truth is None or (after is not None and (proven is None or after > proven)):
            return
        logged = self.truth.newest_committed.get(target.name, -1)
        for uid, lost in self.lost.get(target.name, ()):
            is_known = lost <= logged or (call.actor, target.name, lost) in self._answered
            is_gone = (uid, lost) not in target.epochs and lost >= target.pruned.get(uid, 0)
            if lost < epoch and is_known and is_gone:
                raise Breach("I10", f"{call}: {target.name} went back and has lost epoch {lost}")

    def _has_claimed(self, call: Call) -> None:
        """The first question of a driver that takes itself for the newest."""
        if self._claimants and call.actor not in self._claimants:
            raise Breach("I7", f"{call}: its claim is below the newest record, and it goes on")

    def _may_abort(self, call: Call) -> None:
        if call.identity is None or self.truth is None:
            raise Breach("I7", f"{call}: aborts before anything was claimed")
        if call.identity.generation < self.truth.generation and not self._asked.get(call.actor):
            raise Breach(
                "I7",
                f"{call}: generation {call.identity.generation} aborts, and did not ask the log "
                f"first, after {self.truth.generation} claimed",
            )

    def _may_drop(self, world: World, call: Call) -> None:
        _, handles = _epoch_and_handles(call)
        committed = world.targets[SinkName(call.name)].committed
        for handle in handles:
            if handle in self._named and handle not in committed:
                raise Breach("I5", f"{call}: the decision of {self._named[handle]} names {handle}")

    def _may_forget(self, call: Call) -> None:
        (below,) = cast("tuple[int]", call.args)
        if below > max(self._decided, default=0):
            raise Breach("I9", f"{call}: the newest decision may still have to be proven")

    def _one_attempt(self, world: World, call: Call) -> None:
        handle, rows = cast("tuple[str, Hashable]", call.args)
        known = world.targets[SinkName(call.name)].prepared.get(handle, rows)
        if known != rows:
            raise Breach("I6", f"{call}: two attempts share the handle {handle}")
        if _generation(handle) == self._clear_generation:
            raise Breach("I5", f"{call}: its driver stopped and said that none can come")
        if self.truth is not None and _generation(handle) < self.truth.generation:
            self._latecomers |= {handle}

    def arrives_late(self, call: Call) -> None:
        """The effect of this call comes at a time that its driver knows nothing of."""
        if call.verb == "prepare":
            self._latecomers |= {str(call.args[0])}

    def expired(self, handles: Sequence[str]) -> None:
        """The target itself throws these away."""
        self._expired |= set(handles)

    def recorded(self, world: World, call: Call) -> None:
        """A slot of the log was filled."""
        number, data = cast("tuple[int, bytes]", call.args)
        if number <= self._top:
            return
        if number != self._top + 1:
            raise Breach("I2", f"{call}: slot {number} filled where {self._top + 1} is next")
        self._top = number
        record = self._with_lists(world, call, _decoded(data, f"slot {number}"))
        self._follows(world, call, record)
        self.truth = record.state
        if record.kind is RecordKind.CLAIM:
            self.claimant = call.actor
            self._claimants |= {call.actor}

    def _with_lists(self, world: World, call: Call, record: Record) -> Record:
        """The record with all its receipts: a decision that can't be read can't be carried out."""
        lists = world.log.lists
        if missing := lists_of(record.state.unsettled) - lists.keys():
            raise Breach("I3", f"{call}: names {sorted(missing)}, and they are not there")
        if record.state.unsettled is None or not lists_of(record.state.unsettled):
            return record
        number, data = cast("tuple[int, bytes]", call.args)
        record = decode(data, f"slot {number}", dict(lists).__getitem__)
        for receipts in record.state.unsettled.receipts.values() if record.state.unsettled else ():
            tuple(receipts)
        return record

    def _follows(self, world: World, call: Call, record: Record) -> None:
        before, after = self.truth, record.state
        if before is None:
            if record.kind is not RecordKind.CLAIM or after.generation != 1:
                raise Breach("I7", f"{call}: the log begins with {record.kind.value}")
            return
        if after.uid != before.uid:
            raise Breach("I10", f"{call}: uid {before.uid} became {after.uid}")
        step = 1 if record.kind is RecordKind.CLAIM else 0
        if after.generation != before.generation + step:
            raise Breach(
                "I7",
                f"{call}: {record.kind.value} of generation {after.generation} after "
                f"{before.generation}",
            )
        self._nothing_dropped(world, call, before, after)
        if after.is_clear and not before.is_clear:
            self._nothing_left(world, call, after)
            self._clear_generation = after.generation
        if not _same_last(before, after):
            self._decides(world, call, before, record)
        elif after.unsettled is not None:
            self._same_decision(world, call, before, record)

    def _nothing_dropped(self, world: World, call: Call, before: State, after: State) -> None:
        given_up = {(word.epoch, word.sink) for word in after.given_up}
        for sink in before.pending:
            if before.unsettled is None or (sink in after.pending and _same_last(before, after)):
                continue
            epoch, target = before.unsettled.epoch, world.targets[sink]
            named = {str(receipt.handle) for receipt in before.pending[sink]}
            if (
                not self._is_proven(target, (before.uid, epoch), named)
                and (epoch, sink) not in given_up
            ):
                raise Breach("I4", f"{call}: epoch {epoch} is taken for done on {sink}, and is not")

    def _is_proven(self, target: Target, key: tuple[Uid, int], named: Collection[str]) -> bool:
        if key in self.lost.get(target.name, ()):
            return True
        return key in target.epochs and target.committed.issuperset(named)

    def _nothing_left(self, world: World, call: Call, after: State) -> None:
        for sink in after.sinks:
            left = world.targets[sink].prepared.keys() - self._named.keys() - self._latecomers
            if left:
                raise Breach("I5", f"{call}: stopped, and {sink} holds {left}")

    def _decides(self, world: World, call: Call, before: State, record: Record) -> None:
        decision, last = record.state.unsettled, record.state.last
        if record.kind is not RecordKind.COMMIT or decision is None or last is None:
            raise Breach("I2", f"{call}: {record.kind.value} changes the last decision")
        epoch = decision.epoch
        if epoch in self._decided or epoch != before.expected or last.epoch != epoch:
            raise Breach("I2", f"{call}: epoch {epoch} decided where {before.expected} is next")
        if decision.offsets.digest != world.checkpoint.digests[epoch]:
            raise Breach("I10", f"{call}: epoch {epoch} decided for {decision.offsets.digest}")
        if set(decision.receipts) != set(record.state.sinks):
            raise Breach("I3", f"{call}: the decision is about {set(decision.receipts)}")
        self._decided[epoch] = frozenset(decision.receipts)
        for sink, receipts in decision.receipts.items():
            self._names(world, call, decision, sink, receipts)
        self._rehearsed = frozenset()

    def _names(
        self,
        world: World,
        call: Call,
        decision: Decision,
        sink: SinkName,
        receipts: Sequence[Receipt],
    ) -> None:
        epoch, handles = decision.epoch, [str(receipt.handle) for receipt in receipts]
        if (sink, epoch, frozenset(handles)) not in self._rehearsed:
            raise Breach("I3", f"{call}: epoch {epoch} was not rehearsed on {sink}")
        target = world.targets[sink]
        rows: list[Hashable] = []
        for handle in handles:
            if handle not in target.prepared and handle not in self._expired:
                raise Breach("I5", f"{call}: the decision of {epoch} names the aborted {handle}")
            self._named[handle] = epoch
            rows += map(plain_row, target.prepared.get(handle, ()))
        if self._expired.isdisjoint(handles) and Counter(rows) != Counter(world.source.rows(epoch)):
            raise Breach("I6", f"{call}: the decision names {rows} on {sink}")

    def _same_decision(self, world: World, call: Call, before: State, record: Record) -> None:
        was, now = before.unsettled, record.state.unsettled
        if was is None or now is None:
            raise Breach("I2", f"{call}: a settled decision came back")
        if _facts(was) != _facts(now):
            raise Breach("I2", f"{call}: the decision of epoch {was.epoch} changed")
        for sink, receipts in now.receipts.items():
            if tuple(receipts) != tuple(was.receipts[sink]):
                self._rewrites(world, call, record, sink, was)

    def _rewrites(
        self, world: World, call: Call, record: Record, sink: SinkName, was: Decision
    ) -> None:
        """I4: other handles may stand for the same rows, where the old ones are gone for good."""
        now = record.state.unsettled
        if record.kind is not RecordKind.REWRITE or now is None:
            raise Breach("I2", f"{call}: {record.kind.value} changes receipts of {sink}")
        if _sum(was.receipts[sink]) != _sum(now.receipts[sink]):
            raise Breach("I4", f"{call}: {sink} is written again with other rows")
        target, stay = world.targets[sink], {str(r.handle) for r in now.receipts[sink]}
        for receipt in was.receipts[sink]:
            handle = str(receipt.handle)
            if handle not in stay and (handle in target.prepared or handle in target.committed):
                raise Breach("I4", f"{call}: {handle} is replaced and still there")
        for handle in stay:
            self._named[handle] = now.epoch

    def ended(self, driver: str, error: BaseException | None) -> None:
        """A driver came to its end."""
        if isinstance(error, Fenced) and driver == self.claimant:
            raise Breach("I7", f"{driver} is fenced, and no driver claimed after it: {error}")

    def went_back(self, before: Target, now: Target) -> None:
        """A target is replaced by an older one."""
        lost = before.epochs - now.epochs
        self.lost[now.name] = self.lost.get(now.name, frozenset()) | lost
        self.expired([*(before.prepared.keys() | before.committed) - now.prepared.keys()])
        self._latecomers |= now.prepared.keys() - before.prepared.keys()

    def accepted(self, sink: SinkName) -> None:
        """A person goes on at a target that went back."""
        del self.lost[sink]

    # Targets that hang, sources that are idle

    def hangs(self, call: Call) -> None:
        """The target does not answer this call while the driver that made it lives."""
        self._hanging |= {(call.actor, call.name)}
        if call.verb in ("commit", "outcome"):
            self._hanging_commits |= {call.actor}

    def answered(self, call: Call) -> None:
        """A driver gets the answer of this call."""
        if call.verb == "commit":
            epoch, _ = _epoch_and_handles(call)
            self._answered |= {(call.actor, SinkName(call.name), epoch)}

    def kept_waiting(self, actor: str) -> None:
        """A driver waits for a target that hangs: what is done elsewhere must be on record."""
        unsettled = None if self.truth is None else self.truth.unsettled
        if self.truth is None or unsettled is None or actor not in self._hanging_commits:
            return
        done = {
            sink for who, sink, epoch in self._answered if (who, epoch) == (actor, unsettled.epoch)
        }
        if missing := done & self.truth.pending.keys():
            raise Breach("I4", f"{actor} waits, and {missing} of {unsettled.epoch} are not noted")

    def idle(self, world: World, sinks: Collection[SinkName]) -> None:
        """A driver whose source is idle has swept: nothing is left that no decision names."""
        for sink in sinks:
            if left := world.targets[sink].prepared.keys() - self._named.keys():
                raise Breach("I5", f"idle after a sweep, and {sink} holds {sorted(left)}")

    # At rest

    def concluded(
        self, world: World, error: BaseException | None, *, is_deterministic: bool
    ) -> None:
        """A last driver ran undisturbed, and ended so."""
        is_other = isinstance(error, Unsettled) and not is_deterministic
        if is_other or (self.lost and self._is_reported(error)):
            self.partly(world)
        else:
            self.at_rest(world)

    def _is_reported(self, error: BaseException | None) -> bool:
        """
        A person learns that a target went back, or that a decided epoch is not carried out: the
        engine may have taken it for done, and does not give its rows again.
        """
        is_unsettled = self.truth is not None and self.truth.unsettled is not None
        return isinstance(error, WentBack) or is_unsettled

    def at_rest(self, world: World) -> None:
        """After a last driver started and stopped undisturbed, and no call is on its way."""
        if self.truth is None or not self.truth.is_clear or self.truth.unsettled is not None:
            raise Breach("I4", "at rest, and the log is not")
        for epoch in range(len(world.source.epochs)):
            if epoch not in self._decided:
                raise Breach("I2", f"epoch {epoch} was never decided")
        for sink, target in world.targets.items():
            self._once(world, sink)
            if target.prepared:
                raise Breach("I5", f"{sink} still holds {sorted(target.prepared)}")
        if len(world.log.records) > LOG_RECORDS_MAX:
            raise Breach("I2", f"the log holds {len(world.log.records)} records")
        if world.log.lists:
            raise Breach("I4", f"lists that no record names are left: {sorted(world.log.lists)}")

    def _once(self, world: World, sink: SinkName) -> None:
        target = world.targets[sink]
        seen = Counter(plain_row(row) for rows in target.visible.values() for row in rows)
        epochs = [epoch for epoch, sinks in self._decided.items() if sink in sinks]
        wanted = Counter(str(row) for epoch in epochs for row in world.source.rows(epoch))
        if lost := wanted - seen:
            raise Breach("I4", f"{sink} lost {sorted(map(str, lost))}")
        if surplus := seen - wanted:
            raise Breach("I1", f"{sink} shows too often {sorted(map(str, surplus))}")
        if epochs and self.truth and (self.truth.uid, max(epochs)) not in target.epochs:
            raise Breach("I8", f"{sink} does not prove epoch {max(epochs)}")

    def partly(self, world: World) -> None:
        """Where a run ended with a person needed: no row twice, and none without a decision."""
        for sink, target in world.targets.items():
            seen = Counter(plain_row(row) for rows in target.visible.values() for row in rows)
            twice = [str(row) for row, times in seen.items() if times > 1]
            if twice:
                raise Breach("I1", f"{sink} shows twice {sorted(twice)}")
            for handle in target.visible:
                if handle not in self._named:
                    raise Breach("I1", f"{sink} shows {handle}, which no decision names")


OTHER = "other "
"""How a row begins that a source, not being deterministic, gives in the place of another."""


def plain_row(row: Hashable) -> str:
    """Which row of the source this is."""
    return str(row).removeprefix(OTHER)


def _generation(name: str) -> int:
    handle = Handle.parse(name)
    return 0 if handle is None else handle.generation


def _epoch_and_handles(call: Call) -> tuple[int, list[str]]:
    epoch, receipts = cast("tuple[int, tuple[Receipt, ...]]", call.args[:2])
    return epoch, [str(receipt.handle) for receipt in receipts]


def _same_last(before: State, after: State) -> bool:
    """Whether both remember the same last decision; which sinks can prove it may change."""
    if before.last is None or after.last is None:
        return before.last is after.last
    return (before.last.epoch, before.last.offsets) == (after.last.epoch, after.last.offsets)


def _facts(decision: Decision) -> object:
    return decision.epoch, decision.offsets, set(decision.receipts)


def _sum(receipts: Sequence[Receipt]) -> object:
    return total(receipt.fingerprint for receipt in receipts)
