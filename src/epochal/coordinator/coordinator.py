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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from epochal.contract import DEFAULT_LIMITS, Begin, EpochLog, Limits, Rows, Sink
from epochal.coordinator.carrying import Carrier, Lost
from epochal.coordinator.clearing import Clearing
from epochal.coordinator.examining import Examiner, require_same_offsets
from epochal.coordinator.gates import Gate
from epochal.coordinator.journal import Journal
from epochal.coordinator.rejecting import takers
from epochal.coordinator.rewriting import raise_if_lost, replaced, require_rewritable
from epochal.coordinator.starting import by_name, follow, identity_changed, identity_of
from epochal.coordinator.surroundings import Surroundings
from epochal.coordinator.targets import Targets
from epochal.coordinator.tracker import Tracker
from epochal.coordinator.voice import Voice
from epochal.errors import EpochalError, Misconfigured, Unsettled
from epochal.protocol.admission import Admission, Start, admit_epoch, admit_marks
from epochal.protocol.machine import Move, Phase, advance
from epochal.protocol.recovery import Judgement
from epochal.protocol.state import (
    RecordKind,
    State,
    bound,
    decided,
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
_ENDED = frozenset({Phase.COMMITTED, Phase.ABORTED})


class Coordinator:
    def __init__(
        self,
        *,
        log: EpochLog,
        sinks: Sequence[Sink],
        gates: Iterable[Gate] = (),
        limits: Limits = DEFAULT_LIMITS,
        around: Surroundings | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        """`tracker` is one that outlives this coordinator, and is not closed with it."""
        self._around = around or Surroundings()
        self._limits = limits
        self._sinks = by_name(sinks)
        clock = self._around.clock
        self.tracker = tracker or Tracker(clock)
        self._is_tracker_own = tracker is None
        self._voice = Voice(
            Journal(
                log,
                clock=clock,
                limits=limits,
                chance=self._around.chance,
                nonce=self._around.nonce,
            )
        )
        self._targets = Targets(
            self._sinks,
            alone=takers(self._sinks),
            limits=limits,
            together=self._around.together,
            let_go=self._voice.fall_silent,
        )
        self._examiner = Examiner(
            self._sinks,
            self._targets,
            gates=gates,
            limits=limits,
            around=self._around,
            tracker=self.tracker,
        )
        self._clearing = Clearing(
            self._voice, self._targets, limits=limits, clock=clock, note=self.tracker.swept
        )
        self._phase = Phase.IDLE
        self._epoch: EpochNumber | None = None
        self._lost: Lost = {}

    # What the doors ask

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def state(self) -> State:
        """What the log holds, and what this driver has settled since."""
        return self._voice.state

    @property
    def lost(self) -> Lost:
        """What must be written again when the last epoch is replayed."""
        return self._lost

    @property
    def left_for_a_person(self) -> Sequence[Judgement]:
        """What the last sweep found and must not touch."""
        return self._clearing.left

    def identity(self, sink: SinkName) -> Identity:
        return identity_of(self.state, sink)

    def handout(self, sink: SinkName) -> Json:
        return self._targets.handout(sink)

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
        hoped = follow(self._voice.journal.peek(), start, uid)
        self._targets.open(hoped)
        abilities = self._targets.check(schemas or {})
        self._voice.claim(lambda before: follow(before, start, uid))
        if identity_changed(hoped, self.state):
            self._targets.open(self.state)
        self._clearing.is_clear = self._voice.found_good_order
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
    ) -> Admission:
        """Open an epoch, or learn that it is decided already and only its rows must be drained."""
        self._voice.require_voice(epoch)
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
            require_rewritable(epoch, self._lost, self._examiner.takers)
            if self._lost:
                self._clearing.expect_prepared()
            self._targets.begin(self._begins(epoch, offsets, self._lost))
            return admission
        self._epoch = epoch
        self._move(Move.BEGIN)
        self._examiner.begin()
        try:
            if query_id is not None:
                self._voice.keep(bound(self.state, query_id))
            self._clearing.sweep_if_due()
            self._targets.begin(self._begins(epoch, offsets, self._targets.committers))
        except Exception as error:
            self.abort({}, because=error)
            raise
        self._around.watch("begun", epoch)
        return admission

    def preparing(self) -> None:
        """Rows are on their way to the sinks."""
        self._clearing.expect_prepared()
        self._move(Move.PREPARE)

    def examine(self, receipts: Receipts, *, frame: Rows = None) -> None:
        """
        Let the sinks that have prepared say no, and the gates that need no more, before the late
        ones prepare. An epoch that is refused here is aborted, and why is raised.
        """
        try:
            self._examiner.examine_early(self.state, self._open_epoch, receipts, frame)
        except Exception as error:
            self.abort({**receipts, **self._examiner.refused}, because=error)
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
            self._move(Move.GATHER)
            self._examiner.examine(self.state, self._open_epoch, receipts, frame)
            receipts = {**receipts, **self._examiner.refused}
            require_same_offsets(self._open_epoch, began_with, offsets())
            self._examiner.require_time(self._open_epoch)
        except Exception as error:
            self.abort({**receipts, **self._examiner.refused}, because=error)
            raise
        self._decide(receipts, began_with)
        self._carry_out()
        raise_if_lost(self._open_epoch, self._lost)

    def abort(self, receipts: Receipts, *, because: BaseException | None = None) -> None:
        """
        Throw the open epoch away. Only a fenced driver's abort raises: what can't be cleared now is
        listed by its target and cleared later (I5).
        """
        if because is not None:
            self.tracker.troubled(because)
        self._move(Move.ABORT)
        try:
            self._clearing.clear(self._open_epoch, receipts)
        finally:
            self._move(Move.CLEAR)

    def rewrite(self, again: Receipts) -> None:
        """Take receipts of a replay in the place of lost ones, where sums prove equal rows (I4)."""
        decision = self.state.unsettled
        if decision is None or not self._lost:
            return
        try:
            state, surplus = replaced(
                self.state,
                decision,
                again,
                lost=self._lost,
                sinks=self._sinks,
                targets=self._targets,
            )
        except Exception:
            self._clearing.clear(self._open_epoch, again)
            raise
        self._voice.append(RecordKind.REWRITE, state)
        self._lost = {}
        self._clearing.clear(self._open_epoch, surplus)
        self._carry_out()
        raise_if_lost(self._open_epoch, self._lost)

    def stop(self) -> None:
        """
        Leave in good order: nothing open, losers cleared, SETTLED written, all closed.

        Where losers could not be cleared, STOP is not said: a start that leaves their sink out is
        then refused, as nobody would list them any more (I5).
        """
        try:
            if self._phase in _OPEN:
                self.abort({})
            elif self._phase in _ENDED and not self._clearing.is_clear:
                self._clearing.clear(self._open_epoch, {})
            if self._voice.has_claimed and not self._voice.is_silent:
                self._say_last_word()
        except EpochalError as error:
            place = self._voice.journal.place
            logger.warning("%s: could not stop in good order: %s", place, error)
        finally:
            self._close()

    def _say_last_word(self) -> None:
        if self._clearing.is_clear and not self.state.is_stopped:
            self._voice.append(RecordKind.STOP, stopped(self.state))
        elif self._voice.has_news:
            self._voice.append(RecordKind.SETTLED, self.state)

    def _close(self) -> None:
        self._targets.close()
        self._voice.journal.close()
        if self._is_tracker_own:
            self.tracker.close()

    # Starting

    def _compare_marks(self, run: str | None) -> None:
        marks = {name: committer.newest() for name, committer in self._targets.committers.items()}
        admit_marks(self.state, marks, run)

    def _recover(self) -> None:
        if self.state.unsettled is not None:
            self._epoch = self.state.unsettled.epoch
            self._move(Move.RESUME)
            self.tracker.prepared(self.state.unsettled.receipts)
            self._carry_out()
            if not self._lost:
                self._voice.append(RecordKind.SETTLED, self.state)
        self._clearing.sweep()

    # One epoch

    @property
    def _open_epoch(self) -> EpochNumber:
        if self._epoch is None:
            raise Misconfigured("no epoch has begun", "call begin() first")
        return self._epoch

    def _begins(
        self, epoch: EpochNumber, offsets: Offsets, sinks: Iterable[SinkName]
    ) -> Mapping[SinkName, Begin]:
        newest = self.state.newest_committed
        return {
            sink: Begin(epoch=epoch, offsets=offsets, newest_committed=newest.get(sink))
            for sink in sinks
        }

    def _move(self, move: Move) -> None:
        self._phase = advance(self._phase, move, self._epoch)
        if self._epoch is not None:
            self.tracker.enter(self._epoch, self._phase)

    def _decide(self, receipts: Receipts, offsets: Offsets) -> None:
        """The commit point. Whatever goes wrong here, nothing may be aborted by this driver."""
        decision = Decision(
            epoch=self._open_epoch,
            generation=self.state.generation,
            offsets=offsets,
            receipts={sink: tuple(some) for sink, some in receipts.items()},
            decided_at=self._around.clock.now(),
        )
        self._voice.append(RecordKind.COMMIT, decided(self.state, decision))
        self._move(Move.DECIDE)
        self._around.watch("decided", decision.epoch)

    def _carry_out(self) -> None:
        epoch = self._open_epoch
        self._move(Move.COMMIT)
        carrier = Carrier(
            epoch=epoch,
            committers=self._targets.committers,
            acts=self._targets.acts,
            limits=self._limits,
            around=replace(self._around, together=self._targets.together),
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
        self._voice.keep(settled(sinks_done(self.state, frozenset(self.state.pending))))
        self._move(Move.SETTLE)
        self._around.watch("settled", epoch)

    def _note_done(self, sinks: frozenset[SinkName]) -> None:
        self._voice.append(RecordKind.PROGRESS, sinks_done(self.state, sinks))
