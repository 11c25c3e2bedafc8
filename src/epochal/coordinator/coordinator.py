"""
The coordinator: carries out what the protocol asks, for one driver and one pipeline.

    start      claim, recover what is decided, abort what is not
    begin      may this epoch go on (I10)?
    examine    rehearse and gates, for what is prepared while a late sink is still to come
    conclude   rehearse, gates, decide (the commit point), commit every sink, settle
    abort      throw the open epoch away
    rewrite    prepare again what a target lost after the decision
    stop       leave in good order

Spark's doors and the session call these verbs, one after the other and never at the same time.
After an error the coordinator says nothing more to the log: whoever goes on starts anew, and so
claims.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from epochal.contract import (
    DEFAULT_LIMITS,
    Committer,
    EpochLog,
    Limits,
    OffsetsBound,
    Rows,
    Sink,
    TimeBound,
)
from epochal.coordinator.acting import Acts, acts_of, due
from epochal.coordinator.carrying import Carrier, Lost
from epochal.coordinator.gates import Early, Gate, PreparedEpoch, run_gates
from epochal.coordinator.journal import Journal
from epochal.coordinator.rejecting import Deliveries, check_schemas, require_same
from epochal.coordinator.starting import by_name, follow, identity_changed, identity_of
from epochal.coordinator.surroundings import Surroundings
from epochal.coordinator.sweeping import sweep
from epochal.coordinator.tracker import Tracker
from epochal.coordinator.waiting import Result, StillRunning
from epochal.errors import (
    EpochalError,
    Fenced,
    InvariantBroken,
    Misconfigured,
    Refused,
    Unsettled,
)
from epochal.protocol.admission import (
    Admission,
    Start,
    admit_epoch,
    admit_marks,
)
from epochal.protocol.invariants import require_own_receipts
from epochal.protocol.machine import Move, Phase, advance
from epochal.protocol.recovery import Judgement, plan_rewrite
from epochal.protocol.state import (
    RecordKind,
    State,
    bound,
    decided,
    rewritten,
    settled,
    sinks_done,
    stopped,
)
from epochal.terms import (
    NO_OFFSETS,
    Ability,
    Decision,
    EpochNumber,
    Identity,
    Json,
    Offsets,
    Receipts,
    SinkName,
)

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("epochal")

_OPEN = frozenset({Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED})


class Coordinator:
    def __init__(
        self,
        *,
        log: EpochLog,
        sinks: Sequence[Sink],
        gates: Iterable[Gate] = (),
        limits: Limits = DEFAULT_LIMITS,
        around: Surroundings | None = None,
    ) -> None:
        self._around = around or Surroundings()
        self._limits = limits
        self._sinks = by_name(sinks)
        self._gates = tuple(gates)
        self._journal = Journal(
            log,
            clock=self._around.clock,
            limits=limits,
            chance=self._around.chance,
            nonce=self._around.nonce,
        )
        self.tracker = Tracker(self._around.clock)
        self._committers: dict[SinkName, Committer] = {}
        self._acts: Acts = {}
        self._state: State | None = None
        self._phase = Phase.IDLE
        self._epoch: EpochNumber | None = None
        self._lost: Lost = {}
        self._left: tuple[Judgement, ...] = ()
        self._handouts: dict[SinkName, Json] = {}
        self._rehearsed: set[SinkName] = set()
        self._rejects = Deliveries(self._sinks, limits=limits, around=self._around)
        self._gates_left: Sequence[Gate] = ()
        self._is_silent = False
        self._swept_s = 0.0

    # What the doors ask

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def state(self) -> State:
        """What the log holds, and what this driver has settled since."""
        if self._state is None:
            raise Misconfigured("the coordinator has not been started", "call start() first")
        return self._state

    @property
    def lost(self) -> Lost:
        """What must be written again when the last epoch is replayed."""
        return self._lost

    @property
    def left_for_a_person(self) -> Sequence[Judgement]:
        """What the last sweep found and must not touch."""
        return self._left

    @property
    def record(self) -> int:
        """The number of the newest record that this coordinator has read or written."""
        return self._journal.number

    def identity(self, sink: SinkName) -> Identity:
        return identity_of(self.state, sink)

    def handout(self, sink: SinkName) -> Json:
        return self._handouts.get(sink)

    # The verbs

    def start(
        self, start: Start, schemas: Mapping[SinkName, pa.Schema] | None = None
    ) -> Sequence[Ability]:
        """
        Claim the pipeline and finish what was decided. Afterwards older drivers are fenced.

        Everything that can refuse without the claim does so before it: a driver with a wrong
        password must not push a healthy one aside.
        """
        uid = self._around.mint()
        hoped = follow(self._journal.peek(), start, uid)
        self._open_committers(hoped)
        abilities = self._check(schemas or {})
        self._state = self._journal.claim(lambda before: follow(before, start, uid))
        if identity_changed(hoped, self.state):
            self._open_committers(self.state)
        self.tracker.claimed(self.state)
        self._around.watch("claimed", None)
        self._compare_marks(start.run)
        self._recover()
        return abilities

    def begin(
        self,
        epoch: EpochNumber,
        *,
        query_id: str | None = None,
        offsets: Offsets = NO_OFFSETS,
        is_sweeping: bool = True,
    ) -> Admission:
        """
        Open an epoch, or learn that it is decided already and only its rows must be drained.

        `is_sweeping=False` is for a process that has put no record itself: another one of the same
        driver may be deciding on what a sweep would abort.
        """
        admission = admit_epoch(self.state, epoch, query_id=query_id, offsets=offsets)
        is_replay = admission is Admission.REPLAY
        # To drain a decided epoch that is not carried out would tell the engine that it is done.
        if self.state.unsettled is not None and not (is_replay and self._lost):
            raise Unsettled(
                f"epoch {epoch} can't begin: {self.state.unsettled.epoch} is decided and not "
                f"carried out on {', '.join(self.state.pending)}",
                "start again once the target answers; the decided epoch is carried out first",
            )
        if is_replay:
            self._require_rewritable(epoch)
            self._tell_offsets(epoch, offsets)
            self._hand_out(epoch, self._lost)
            return admission
        self._open(epoch)
        try:
            if query_id is not None:
                self._state = bound(self.state, query_id)
            if is_sweeping:
                self._sweep_if_due()
            self._tell_offsets(epoch, offsets)
            self._hand_out(epoch, self._committers)
        except Exception as error:
            self.abort({}, because=error)
            raise
        self._around.watch("begun", epoch)
        return admission

    def preparing(self) -> None:
        """Rows are on their way to the sinks."""
        self._move(Move.PREPARE)

    def examine(self, receipts: Receipts, *, frame: Rows = None) -> None:
        """
        Let the sinks that have prepared say no, and the gates that need no more, before the late
        ones prepare. An epoch that is refused here is aborted, and why is raised.
        """
        try:
            self._require_own(receipts, receipts)
            awaited = frozenset(self._committers) - receipts.keys()
            self._rehearse(self._open_epoch, receipts)
            self._ask_gates(Early(receipts, awaited), frame)
        except Exception as error:
            self.abort({**receipts, **self._rejects.receipts}, because=error)
            raise

    def conclude(
        self,
        receipts: Receipts,
        *,
        offsets: Callable[[], Offsets] = lambda: NO_OFFSETS,
        began_with: Offsets = NO_OFFSETS,
        frame: Rows = None,
    ) -> None:
        """Decide the open epoch and carry the decision out, or abort it and raise why."""
        try:
            self._examine(receipts, frame)
            receipts = {**receipts, **self._rejects.receipts}
            self._require_same_offsets(began_with, offsets())
            self._require_time(receipts)
        except Exception as error:
            self.abort({**receipts, **self._rejects.receipts}, because=error)
            raise
        self._decide(receipts, began_with)
        self._carry_out()
        self._raise_if_lost()

    def abort(self, receipts: Receipts, *, because: BaseException | None = None) -> None:
        """
        Throw the open epoch away. Only a fenced driver's abort raises: what can't be cleared now is
        listed by its target and cleared later (I5).
        """
        if because is not None:
            self.tracker.troubled(because)
        self._move(Move.ABORT)
        try:
            self._clear(receipts)
        finally:
            self._move(Move.CLEAR)

    def rewrite(self, again: Receipts) -> None:
        """Take receipts of a replay in the place of lost ones, where sums prove equal rows (I4)."""
        decision = self.state.unsettled
        if decision is None or not self._lost:
            return
        try:
            state, surplus = self._replaced(again)
        except Exception:
            self._clear(again)
            raise
        self._append(RecordKind.REWRITE, state)
        self._lost = {}
        self._clear(surplus)
        self._carry_out()
        self._raise_if_lost()

    def stop(self) -> None:
        """Leave in good order: nothing open, losers cleared, SETTLED written, all closed."""
        try:
            if self._phase in _OPEN:
                self.abort({})
            elif self._phase is Phase.COMMITTED:
                self._clear({})
            if self._state is not None and not self._is_silent and not self._state.is_stopped:
                self._append(RecordKind.STOP, stopped(self._state))
        except EpochalError as error:
            logger.warning("%s: could not stop in good order: %s", self._journal.place, error)
        finally:
            self.leave()

    # One driver in several processes: where tasks are planned, and where they are committed

    def resume(self, driver: str, *, record: int | None = None) -> None:
        """
        Go on under the claim that another process of the same driver made. Where the newest record
        is another driver's, or is not `record`, this one is fenced.
        """
        number, state = self._journal.resume()
        if state is None or state.driver != driver or record not in (None, number):
            raise Fenced(
                f"{self._journal.place}: record {number} is not what this driver left there"
                f"{'' if state is None else f'; it is of {state.driver}'}",
                "another driver has taken this pipeline over: leave this one stopped",
            )
        self._state = state
        self._open_committers(state)
        self.tracker.claimed(state)

    def recover(self) -> None:
        """Carry out what the last process left decided, and clear up."""
        self._recover()

    def take_up(self, epoch: EpochNumber, *, query_id: str | None, offsets: Offsets) -> Admission:
        """Go on with an epoch that another process of this driver began: its rows are prepared."""
        admission = admit_epoch(self.state, epoch, query_id=query_id, offsets=offsets)
        if admission is Admission.FRESH:
            self._open(epoch)
            self._tell_offsets(epoch, offsets)
            self._move(Move.PREPARE)
            if query_id is not None:
                self._state = bound(self.state, query_id)
        return admission

    def restate(self, kind: RecordKind = RecordKind.SETTLED) -> None:
        """
        Put the state on record as it stands, for a process that has only the log to go by. It also
        closes the slot that an unanswered put of another process might yet have filled.
        """
        self._append(kind, self.state)

    def leave(self) -> None:
        """Close connections and say nothing: another process of this driver goes on."""
        self._close_committers()
        self._journal.close()
        self.tracker.close()

    # Starting

    def _open_committers(self, state: State) -> None:
        self._close_committers()
        for name, sink in self._sinks.items():
            self._committers[name] = sink.committer(identity_of(state, name), self._limits)
        self._acts = acts_of(self._sinks, self._committers, alone=self._rejects.takers)

    def _close_committers(self) -> None:
        for name, committer in self._committers.items():
            try:
                committer.close()
            except (EpochalError, OSError) as error:
                logger.warning("sink %s could not be closed: %s", name, error)
        self._committers = {}

    def _check(self, schemas: Mapping[SinkName, pa.Schema]) -> Sequence[Ability]:
        told = check_schemas(self._sinks, self._committers, schemas)
        return [
            ability
            for name, committer in self._committers.items()
            for ability in committer.check(told.get(name))
        ]

    def _compare_marks(self, run: str | None) -> None:
        marks = {name: committer.newest() for name, committer in self._committers.items()}
        admit_marks(self.state, marks, run)

    def _recover(self) -> None:
        if self.state.unsettled is not None:
            self._epoch = self.state.unsettled.epoch
            self._move(Move.RESUME)
            self.tracker.prepared(self.state.unsettled.receipts)
            self._carry_out()
            if not self._lost:
                self._append(RecordKind.SETTLED, self.state)
        self._sweep()

    # One epoch

    @property
    def _open_epoch(self) -> EpochNumber:
        if self._epoch is None:
            raise Misconfigured("no epoch has begun", "call begin() first")
        return self._epoch

    def _open(self, epoch: EpochNumber) -> None:
        self._epoch = epoch
        self._rehearsed = set()
        self._rejects.begin()
        self._gates_left = self._gates
        self._move(Move.BEGIN)

    def _move(self, move: Move) -> None:
        self._phase = advance(self._phase, move, self._epoch)
        if self._epoch is not None:
            self.tracker.enter(self._epoch, self._phase)

    def _tell_offsets(self, epoch: EpochNumber, offsets: Offsets) -> None:
        for committer in self._committers.values():
            if isinstance(committer, OffsetsBound):
                committer.source_offsets(epoch, offsets)

    def _hand_out(self, epoch: EpochNumber, sinks: Iterable[SinkName]) -> None:
        self._handouts = {sink: self._committers[sink].begin(epoch) for sink in sinks}

    def _examine(self, receipts: Receipts, frame: Rows) -> None:
        """Everything that can still say no, before the decision (I3)."""
        self._move(Move.GATHER)
        self.tracker.prepared(receipts)
        self._require_own(receipts, self._committers.keys() - self._rejects.takers)
        self._around.watch("prepared", self._epoch)
        self._rehearse(self._open_epoch, receipts)
        # Last, as only now all that the others refuse is known.
        self._rehearse(self._open_epoch, self._rejects.receipts)
        self.tracker.prepared(self._rejects.receipts)
        self._ask_gates({**receipts, **self._rejects.receipts}, frame)
        self._around.watch("gated", self._epoch)

    def _require_own(self, receipts: Receipts, sinks: Collection[SinkName]) -> None:
        require_own_receipts(
            receipts,
            uid=self.state.uid,
            generation=self.state.generation,
            epoch=self._open_epoch,
            sinks=sinks,
        )

    def _ask_gates(self, shown: Receipts, frame: Rows) -> None:
        """Ask the gates that have not passed yet."""
        epoch = self._open_epoch
        self._around.watch("rehearsed", epoch)
        self._gates_left = run_gates(
            self._gates_left, PreparedEpoch(number=epoch, prepared=shown, frame=frame)
        )

    def _rehearse(self, epoch: EpochNumber, receipts: Receipts) -> None:
        asked = {sink: some for sink, some in receipts.items() if sink not in self._rehearsed}
        self._at_once(
            [partial(act.rehearse, epoch, some) for act, some in due(self._acts, asked)],
            give_up_s=max(self._limits.commit_retry_max_s, self._limits.commit_timeout_s),
        )
        self._rehearsed.update(asked)
        for sink in asked:
            self._rejects.deliver(
                epoch,
                sink,
                self._committers[sink],
                identity=self.identity,
                handout=partial(self._handout_anew, epoch),
            )

    def _handout_anew(self, epoch: EpochNumber, sink: SinkName) -> Json:
        """Also where another process of this driver began the epoch."""
        if sink not in self._handouts:
            self._handouts[sink] = self._committers[sink].begin(epoch)
        return self._handouts[sink]

    def _require_time(self, receipts: Receipts) -> None:
        for sink, some in receipts.items():
            committer = self._committers[sink]
            if isinstance(committer, TimeBound):
                committer.require_time(self._open_epoch, some)

    def _require_same_offsets(self, began_with: Offsets, now: Offsets) -> None:
        if began_with.digest != now.digest:
            raise Refused(
                f"epoch {self._epoch}: the checkpoint's offsets changed while it was written:\n"
                f"  begun with: {began_with.text}\n  now:        {now.text}",
                "another driver works on this checkpoint: find it and stop one of the two",
            )

    def _decide(self, receipts: Receipts, offsets: Offsets) -> None:
        """The commit point. Whatever goes wrong here, nothing may be aborted by this driver."""
        decision = Decision(
            epoch=self._open_epoch,
            generation=self.state.generation,
            offsets=offsets,
            receipts={sink: tuple(some) for sink, some in receipts.items()},
            decided_at=self._around.clock.now(),
        )
        self._append(RecordKind.COMMIT, decided(self.state, decision))
        self._move(Move.DECIDE)
        self._around.watch("decided", decision.epoch)

    def _append(self, kind: RecordKind, state: State) -> None:
        # Silent until the log has answered: an unanswered put may yet win its slot.
        self._is_silent = True
        self._journal.append(kind, state)
        # In this order: an interrupt between the two must not let an old state speak.
        self._state = state
        self._is_silent = False

    def _carry_out(self) -> None:
        epoch = self._open_epoch
        self._move(Move.COMMIT)
        carrier = Carrier(
            epoch=epoch,
            committers=self._committers,
            acts=self._acts,
            limits=self._limits,
            around=replace(self._around, together=self._together),
            note_done=self._note_done,
            timing=partial(self.tracker.timing, phase=Phase.COMMITTING),
        )
        try:
            self._lost = carrier.carry_out(self.state.pending)
        except BaseException as error:
            self.tracker.troubled(error)
            self._move(Move.FAIL)
            raise
        if self._lost:
            self._move(Move.FAIL)
            return
        for sink in self.state.last.rows if self.state.last else ():
            self.tracker.sink_committed(sink)
        self._state = settled(sinks_done(self.state, frozenset(self.state.pending)))
        self._move(Move.SETTLE)
        self._around.watch("settled", epoch)

    def _note_done(self, sinks: frozenset[SinkName]) -> None:
        self._append(RecordKind.PROGRESS, sinks_done(self.state, sinks))

    def _raise_if_lost(self) -> None:
        if self._lost:
            raise Unsettled(
                f"epoch {self._epoch} is decided, and {', '.join(self._lost)} threw its prepared "
                "rows away: they must be written again",
                "start again: the epoch is replayed and its rows are compared with those decided",
            )

    def _replaced(self, again: Receipts) -> tuple[State, Receipts]:
        decision = self.state.unsettled
        if decision is None:
            raise Misconfigured("nothing is waiting to be written again")
        require_own_receipts(
            again,
            uid=self.state.uid,
            generation=self.state.generation,
            epoch=decision.epoch,
            sinks=self._lost.keys(),
        )
        state, surplus = self.state, {}
        for sink, some in again.items():
            plan = plan_rewrite(sink, decision.receipts[sink], self._lost[sink], some)
            state = rewritten(state, sink, plan.receipts)
            surplus[sink] = plan.surplus
        for act, receipts in due(self._acts, state.pending):
            if receipts.keys() & again.keys():
                act.rehearse(decision.epoch, receipts)
        for sink in again:
            require_same(self._sinks[sink], self._committers[sink], decision)
        return state, surplus

    def _require_rewritable(self, epoch: EpochNumber) -> None:
        """Rows that a sink refused come from no source: they can't be written again."""
        gone = self._rejects.takers & self._lost.keys()
        if gone:
            raise Unsettled(
                f"epoch {epoch} is decided, and {', '.join(gone)} threw away the refused rows that "
                "were prepared there: no replay brings them back",
                "bring them to the target by hand, from the source; then `epochal resolve give-up` "
                "says where they are",
            )

    def _at_once(self, jobs: Sequence[Callable[[], None]], *, give_up_s: float) -> None:
        """Ask several sinks at the same time; the first error is raised once all have answered."""
        slow_s = min(give_up_s, self._limits.commit_timeout_s)
        for error in self._together(jobs, slow_s=slow_s, give_up_s=give_up_s):
            if error is not None:
                raise error

    def _together(
        self, jobs: Sequence[Callable[[], None]], *, slow_s: float, give_up_s: float
    ) -> Sequence[Result]:
        results = self._around.together(jobs, slow_s=slow_s, give_up_s=give_up_s)
        # A committer that still works on something is not called again: its calls never overlap.
        if any(isinstance(result, StillRunning) for result in results):
            self._is_silent = True
            self._committers = {}
        return results

    # Clearing up

    def _sweep_if_due(self) -> None:
        if self._around.clock.monotonic() - self._swept_s < self._limits.sweep_every_s:
            return
        try:
            self._sweep()
        except (Fenced, InvariantBroken):
            raise
        except (EpochalError, OSError) as error:
            logger.warning("%s: not all could be cleared yet: %s", self._journal.place, error)

    def _clear(self, receipts: Receipts) -> None:
        """
        Abort receipts that no decision names, and what else is listed. What can't be cleared now is
        cleared later (I5); only a driver that is fenced, or finds a rule broken, raises.
        """
        # A decision whose put went unanswered may yet stand: what it names is not ours to abort.
        if self._is_silent:
            return
        try:
            self._journal.require_newest()
            self._at_once(
                [
                    partial(self._committers[sink].abort, self._open_epoch, some)
                    for sink, some in receipts.items()
                ],
                give_up_s=self._limits.abort_timeout_s,
            )
            self._sweep()
        except (Fenced, InvariantBroken):
            self._is_silent = True
            raise
        except (EpochalError, OSError) as error:
            logger.warning("epoch %s: not all could be cleared yet: %s", self._epoch, error)

    def _sweep(self) -> None:
        """Abort what no decision names, as the targets list it (I5), and forget old proofs."""
        self._swept_s = self._around.clock.monotonic()
        self._journal.require_newest()
        self._left = sweep(
            self._committers,
            self.state,
            alarm_s=self._limits.in_doubt_alarm_s,
            note=self.tracker.swept,
        )
        if self.state.last is not None:
            for committer in self._committers.values():
                committer.prune(self.state.last.epoch)
        self._journal.tidy()
