"""
`Coordinator`: carries out what the protocol asks, for one driver and one pipeline.

    start      claim, carry out what is decided, abort what is not
    begin      may this epoch go on (I10)?
    examine    rehearse and ask gates, for what is prepared before the last sinks prepare
    conclude   rehearse, ask gates, decide (the commit point), commit every sink, settle
    abort      throw the open epoch away
    rewrite    prepare again what a target lost after the decision
    sweep      between epochs: abort what late tasks have prepared, learn of a pause
    hand_over  let another process go on with the pipeline that is claimed here
    stop       abort what is open, clear up, write STOP, close

The Spark pipeline and the session call these verbs, one after the other and never at the same time.
After an error that leaves an outcome unknown the journal is halted, and this coordinator neither
appends nor aborts any more: only a new start, which claims, goes on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from epochal.contract import Begin, EngineAbility, EngineWrites, Rows, Sink
from epochal.coordinator.cleanup import Cleanup
from epochal.coordinator.commit import (
    Commit,
    Lost,
    raise_if_lost,
    replace_lost,
    require_rewritable,
)
from epochal.coordinator.environment import Environment
from epochal.coordinator.gates import Gate
from epochal.coordinator.journal import EpochLog, Journal, StartToken
from epochal.coordinator.rehearsal import Rehearsal, require_same_offsets
from epochal.coordinator.retry import prepare_on_driver, require_usable
from epochal.coordinator.targets import Targets, by_name, identity_of
from epochal.coordinator.tracker import Tracker
from epochal.errors import (
    EpochalError,
    Misconfigured,
    Refused,
    TryAgain,
    Unsettled,
    WentBack,
)
from epochal.protocol.admission import (
    Admission,
    Position,
    Start,
    admit_epoch,
    admit_marks,
    admit_start,
    newborn,
    require_not_back,
)
from epochal.protocol.machine import Move, Phase, advance
from epochal.protocol.recovery import Judgement, give_up_command
from epochal.protocol.state import (
    RecordKind,
    State,
    bound,
    claimed,
    decided,
    settled,
    sinks_done,
    stopped,
)
from epochal.terms import (
    DEFAULT_LIMITS,
    NO_OFFSETS,
    Ability,
    Claim,
    Decision,
    EpochNumber,
    Identity,
    Json,
    Limits,
    Offsets,
    Receipt,
    Receipts,
    SinkName,
    Uid,
)

if TYPE_CHECKING:
    import pyarrow as pa

logger = logging.getLogger("epochal")

_OPEN = frozenset({Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED})
_ENDED = frozenset({Phase.COMMITTED, Phase.ABORTED})
_RESTING = _ENDED | {Phase.IDLE}

ReadPosition: TypeAlias = Callable[[], Position | None]
"""How far the engine's own checkpoint is at this moment."""


class Coordinator:
    def __init__(
        self,
        *,
        log: EpochLog,
        sinks: Sequence[Sink],
        gates: Iterable[Gate] = (),
        limits: Limits = DEFAULT_LIMITS,
        environment: Environment | None = None,
        tracker: Tracker | None = None,
    ) -> None:
        """A `tracker` that is given outlives this coordinator, and is not closed with it."""
        require_usable(limits)
        self._environment = environment = environment or Environment()
        self._limits = limits
        self._sinks = by_name(sinks)
        self.tracker = tracker or Tracker(environment.clock)
        self._is_tracker_own = tracker is None
        self._journal = Journal(log, limits=limits, environment=environment)
        self._targets = Targets(
            self._sinks, limits=limits, environment=environment, on_hang=self._journal.halt
        )
        self._rehearsal = Rehearsal(
            self._sinks,
            self._targets,
            gates=gates,
            limits=limits,
            environment=environment,
            tracker=self.tracker,
            note_late=self.note_late_tasks,
        )
        self._cleanup = Cleanup(
            self._journal,
            self._targets,
            limits=limits,
            clock=environment.clock,
            note=self.tracker.swept,
            note_room=self.tracker.has_room,
        )
        self._phase = Phase.IDLE
        self._epoch: EpochNumber | None = None
        self._lost: Lost = {}

    # What callers ask

    @property
    def phase(self) -> Phase:
        return self._phase

    @property
    def state(self) -> State:
        """What the log holds, and what this driver has settled since."""
        return self._journal.state

    @property
    def lost(self) -> Lost:
        """What must be written again when the last epoch is replayed."""
        return self._lost

    @property
    def left_for_a_person(self) -> Sequence[Judgement]:
        """What the last sweep found and must not touch."""
        return self._cleanup.left

    @property
    def token(self) -> StartToken:
        """Names the newest record of this driver, for the process that goes on in its place."""
        return self._journal.token

    def identity(self, sink: SinkName) -> Identity:
        return identity_of(self.state, sink)

    def handout(self, sink: SinkName) -> Json:
        return self._targets.handout(sink)

    def engine_writes(self, sink: SinkName) -> EngineWrites | None:
        """The committer of a sink, where the engine's own writer may prepare its rows."""
        committer = self._targets.committers.get(sink)
        if not isinstance(committer, EngineWrites):
            return None
        return committer

    # The verbs

    def start(
        self,
        start: Start,
        schemas: Mapping[SinkName, pa.Schema] | None = None,
        engines: Mapping[SinkName, EngineAbility] | None = None,
        *,
        position: ReadPosition | None = None,
        above: StartToken | None = None,
    ) -> Sequence[Ability]:
        """
        Claim the pipeline and finish what was decided. Afterwards older drivers are fenced.
        `engines`: whether the engine's own writer can be used, by sink; None where no rows are to
        be written. `position`: reads that of the start at each look at the log, as an earlier
        driver may go on until the claim. `above`: see `Journal.claim`.

        Everything that can refuse without the claim does so before it: a driver with a wrong
        password must not fence a healthy one.
        """
        if above is not None:
            self._journal.require_newest_is(above)
        follow = self._follow(position)
        before, expected = self._journal.foresee(partial(follow, start))
        abilities, writers = self._check_start(expected, schemas or {}, engines)
        servers = self._targets.servers(before)
        start = replace(start, sinks=_described(start.sinks, writers, servers))
        self._journal.claim(partial(follow, start), above=above)
        if _identities(expected) != _identities(self.state):
            self._targets.open(self.state)
            self._targets.check(schemas or {})
        self._cleanup.was_clear(self._journal.was_clear)
        self.tracker.claimed(self.state)
        self._environment.on_step("claimed", None)
        try:
            admit_marks(self.state, self._targets.newest(), start.run)
            self._recover()
        except Exception as error:
            self.tracker.troubled(error)
            raise
        return abilities

    def check_start(
        self,
        start: Start,
        schemas: Mapping[SinkName, pa.Schema],
        engines: Mapping[SinkName, EngineAbility],
        *,
        position: ReadPosition | None = None,
    ) -> None:
        """
        Refuse what `start` would refuse before its claim; a pause does not count. Claims nothing:
        for a driver that is to start later, and stops this coordinator afterwards.
        """
        follow = self._follow(position)

        def follow_unpaused(before: State | None) -> State:
            return follow(start, None if before is None else replace(before, pause=None))

        _, expected = self._journal.foresee(follow_unpaused)
        self._check_start(expected, schemas, engines)

    def _follow(self, position: ReadPosition | None) -> Callable[[Start, State | None], State]:
        """Makes the state of this driver's claim, after the newest state of the log."""
        uid, claim = self._environment.new_uid(), self._environment.new_claim()

        def follow(start: Start, before: State | None) -> State:
            at = start if position is None else replace(start, position=position())
            return _claimed(before, at, uid, claim)

        return follow

    def _check_start(
        self,
        expected: State,
        schemas: Mapping[SinkName, pa.Schema],
        engines: Mapping[SinkName, EngineAbility] | None,
    ) -> tuple[Sequence[Ability], Mapping[SinkName, Ability]]:
        """What the targets promise, and what writes the rows of each sink."""
        self._targets.open(expected)
        abilities = self._targets.check(schemas)
        writers = {} if engines is None else self._targets.engine_abilities(schemas, engines)
        return [*abilities, *writers.values()], writers

    def check(self, schemas: Mapping[SinkName, pa.Schema]) -> Sequence[Ability]:
        """Check the targets again, for rows that were not known at the start; between epochs."""
        return self._targets.check(schemas)

    def begin(
        self,
        epoch: EpochNumber,
        *,
        query_id: str | None = None,
        offsets: Offsets = NO_OFFSETS,
    ) -> Admission:
        """Open an epoch, or learn that it is decided already and only its rows must be drained."""
        self._journal.require_not_halted(epoch)
        try:
            admission = admit_epoch(self.state, epoch, query_id=query_id, offsets=offsets)
        except Refused:
            # A driver that was superseded compares with a state that is no longer the log's.
            self._journal.require_newest()
            raise
        is_replay = admission is Admission.REPLAY
        # Draining a decided epoch that is not carried out would make the engine take it for done.
        if self.state.unsettled is not None and not (is_replay and self._lost):
            raise Unsettled(
                f"epoch {epoch} can't begin: {self.state.unsettled.epoch} is decided and not "
                f"carried out on {', '.join(self.state.pending)}",
                self._way_out(self.state.unsettled.epoch),
            )
        if is_replay:
            require_rewritable(epoch, self._lost, self._rehearsal.reject_sinks)
            if self._lost:
                self._cleanup.expect_prepared()
            self._targets.begin(self._begins(epoch, offsets, self._lost))
            return admission
        self._epoch = epoch
        self._move(Move.BEGIN)
        self._rehearsal.begin()
        try:
            if query_id is not None:
                self._journal.remember(bound(self.state, query_id))
            self._cleanup.sweep_if_due(is_needed=self._targets.have_leftovers())
            self._targets.begin(self._begins(epoch, offsets, self._targets.committers))
        except Exception as error:
            self.abort({}, because=error)
            self._say_what_is_missing(error)
            raise
        self._environment.on_step("begun", epoch)
        return admission

    def _way_out(self, unsettled: EpochNumber) -> str:
        """What to do where a decided epoch is not carried out, and the next one can't begin."""
        record = give_up_command(next(iter(self._lost or self.state.pending)), unsettled)
        if self._lost:
            return (
                f"replay epoch {unsettled} with the same rows, as {', '.join(self._lost)} threw "
                f"them away; or keep them elsewhere and record it: {record}"
            )
        return (
            "start again once the target answers; the decided epoch is carried out first. If it "
            f"never will, keep its rows elsewhere and record it: {record}"
        )

    def preparing(self) -> None:
        """Rows are on their way to the sinks."""
        self._cleanup.expect_prepared()
        self._move(Move.PREPARE)

    def prepare_here(self, prepare: Callable[[bool], Receipt]) -> Receipt:
        """Prepare few rows of the open epoch without a task: see `retry.prepare_on_driver`."""
        return prepare_on_driver(
            prepare,
            limits=self._limits,
            clock=self._environment.clock,
            random=self._environment.random,
            note_late=self.note_late_tasks,
        )

    def note_late_tasks(self) -> None:
        """
        Tasks of this driver may go on, and prepare, although their job has ended.

        What they prepare is aborted by the next start's sweep, if not by one of this driver. Until
        then no sink may be removed:

            driver                               a task, on an executor
            job 7 is cancelled, collect() fails  its input ends early, it goes on to prepare
            aborts epoch 7, sweeps: all clear
            STOP, is_clear=False                 PREPARE TRANSACTION g4-e7-p0-t9
            ---- next start, same sinks: sweeps, and aborts g4-e7-p0-t9

        Spark reports a task as ended when its JVM thread is interrupted, while the Python worker
        still runs, so no fact that the driver could wait for says that none will prepare.
        """
        self._cleanup.has_late_tasks = True

    def examine(self, receipts: Receipts, *, frame: Rows = None) -> None:
        """
        Let the sinks that have prepared say no, and the gates that need no more, before the late
        ones prepare. An epoch that is refused here is aborted, and why is raised.
        """
        try:
            self._rehearsal.examine_early(self.state, self._open_epoch, receipts, frame)
        except Exception as error:
            self.abort({**receipts, **self._rehearsal.rejected}, because=error)
            self._say_what_is_missing(error)
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
            self._rehearsal.examine(self.state, self._open_epoch, receipts, frame)
            receipts = {**receipts, **self._rehearsal.rejected}
            require_same_offsets(self._open_epoch, began_with, offsets())
            self._rehearsal.confirm(self._open_epoch, receipts)
            self._rehearsal.require_time(self._open_epoch)
        except Exception as error:
            self.abort({**receipts, **self._rehearsal.rejected}, because=error)
            self._say_what_is_missing(error)
            raise
        self._decide(receipts, began_with)
        self._carry_out()
        raise_if_lost(self._open_epoch, self._lost)

    def abort(self, receipts: Receipts, *, because: BaseException | None = None) -> None:
        """
        Throw the open epoch away. Raises only where this driver is fenced: what can't be cleared
        now is listed by its target and cleared later (I5).
        """
        if because is not None:
            self.tracker.troubled(because)
        self._move(Move.ABORT)
        try:
            self._cleanup.clear(self._open_epoch, receipts)
        finally:
            self._move(Move.CLEAR)

    def rewrite(self, again: Receipts) -> None:
        """Take receipts of a replay in the place of lost ones, where sums prove equal rows (I4)."""
        decision = self.state.unsettled
        if decision is None or not self._lost:
            return
        try:
            state, surplus = replace_lost(
                self.state,
                decision,
                again,
                lost=self._lost,
                sinks=self._sinks,
                targets=self._targets,
                rehearsal=self._rehearsal,
            )
        except Exception:
            self._cleanup.clear(self._open_epoch, again)
            raise
        self._journal.append(RecordKind.REWRITE, state)
        self._lost = {}
        self._cleanup.clear(self._open_epoch, surplus)
        self._carry_out()
        raise_if_lost(self._open_epoch, self._lost)

    def sweep(self) -> None:
        """
        While no epoch is open: abort what late tasks and older drivers have prepared since (I5).

        Called at any time between epochs; does nothing where no sweep is due. Raises `Fenced` where
        another driver has taken over, and whatever else ends this one.
        """
        if self._phase not in _RESTING or self._journal.is_halted:
            return
        try:
            self._cleanup.sweep_if_due()
        except EpochalError as error:
            self._journal.halt(error)
            self.tracker.troubled(error)
            raise

    def hand_over(self) -> StartToken:
        """
        After `start`: let another process go on, which claims above this one's newest record.

        Closes the targets. Where the other process could not be started, `stop` is called as ever;
        else `leave`.
        """
        self._targets.close()
        return self.token

    def leave(self) -> None:
        """Close without a record: after `hand_over`, the log is another process's."""
        self._close()

    def stop(self) -> None:
        """
        Stop cleanly: nothing open, losers cleared, STOP or SETTLED written, everything closed.

        STOP also says whether all is clear. Where losers could not be cleared, or may still come, a
        start without their sink is refused, as no later sweep would list them (I5).
        """
        try:
            if self._phase in _OPEN:
                self.abort({})
            elif self._phase in _ENDED and not self._cleanup.is_clear:
                self._cleanup.clear(self._open_epoch, {})
            if self._journal.has_claimed and not self._journal.is_halted:
                self._write_stop()
        except EpochalError as error:
            logger.warning("%s: did not stop cleanly: %s", self._journal.place, error)
        finally:
            self._close()

    def _write_stop(self) -> None:
        if self.state.unsettled is None:
            is_clear = self._cleanup.is_clear
            self._journal.append(RecordKind.STOP, stopped(self.state, is_clear=is_clear))
        elif self._journal.has_unwritten_state:
            self._journal.append(RecordKind.SETTLED, self.state)
        # Lists of the last epoch: no record names them from here on.
        self._journal.tidy_if_many()

    def _close(self) -> None:
        self._targets.close()
        self._journal.close()
        if self._is_tracker_own:
            self.tracker.close()

    def _say_what_is_missing(self, error: BaseException) -> None:
        """Raise what a sink found, that its target went back, with what only the log knows."""
        committer = (
            self._targets.committers.get(error.sink) if isinstance(error, WentBack) else None
        )
        if isinstance(error, WentBack) and committer is not None:
            require_not_back(self.state, error.sink, committer.newest())

    # Starting

    def _recover(self) -> None:
        if self.state.unsettled is not None:
            self._epoch = self.state.unsettled.epoch
            self._move(Move.RESUME)
            self.tracker.prepared(self.state.unsettled.receipts)
            self._carry_out()
            if not self._lost:
                self._journal.append(RecordKind.SETTLED, self.state)
        self._cleanup.sweep_as_far_as_possible()

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
        """The commit point. Unless the log says that nothing was written, no error aborts here."""
        decision = Decision(
            epoch=self._open_epoch,
            generation=self.state.generation,
            offsets=offsets,
            receipts={sink: tuple(some) for sink, some in receipts.items()},
            decided_at=self._environment.clock.now(),
        )
        try:
            self._journal.append(RecordKind.COMMIT, decided(self.state, decision))
        except (TryAgain, Misconfigured) as error:
            # Nothing was written, and nothing will be: the epoch is not decided.
            self.abort(receipts, because=error)
            raise
        except EpochalError as error:
            self.tracker.troubled(error)
            raise
        self.tracker.keeps("log", self._journal.records, limit=self._journal.records_max)
        self._move(Move.DECIDE)
        self._environment.on_step("decided", decision.epoch)

    def _carry_out(self) -> None:
        epoch = self._open_epoch
        self._move(Move.COMMIT)
        commit = Commit(
            epoch=epoch,
            targets=self._targets,
            limits=self._limits,
            environment=self._environment,
            note_done=self._note_done,
            on_committed=self.tracker.sink_committed,
            on_retry=lambda sink, error, left_s: self.tracker.sink_retried(
                sink, error, give_up_in_s=left_s
            ),
            require_newest=self._journal.require_newest,
            timing=partial(self.tracker.timing, phase=Phase.COMMITTING),
        )
        for sink in self.state.done:
            self.tracker.sink_committed(sink)
        try:
            self._lost = commit.carry_out(self.state.pending)
        except BaseException as error:
            self.tracker.troubled(error)
            self._move(Move.FAIL)
            self._say_what_is_missing(error)
            raise
        self.tracker.rows_lost(self._lost)
        if self._lost:
            self._move(Move.FAIL)
            return
        self._journal.remember(settled(sinks_done(self.state, frozenset(self.state.pending))))
        self._move(Move.SETTLE)
        self._environment.on_step("settled", epoch)

    def _note_done(self, sinks: frozenset[SinkName]) -> None:
        self._journal.append(RecordKind.PROGRESS, sinks_done(self.state, sinks))


def _identities(state: State) -> Sequence[object]:
    """What committers are made for."""
    return state.uid, state.generation, state.newest_committed


def _claimed(before: State | None, start: Start, uid: Uid, claim: Claim) -> State:
    """The state of this driver's claim, after the newest state of the log."""
    if before is not None:
        admit_start(before, start)
    return claimed(
        newborn(start, uid) if before is None else before,
        claim=claim,
        driver=start.driver,
        sinks=start.sinks,
        query_id=start.query_id,
        run=start.run,
    )


def _described(
    sinks: Mapping[SinkName, Mapping[str, Json]],
    writers: Mapping[SinkName, Ability],
    servers: Mapping[SinkName, Mapping[str, Json]],
) -> Mapping[SinkName, Mapping[str, Json]]:
    """The sinks as the log describes them, each with its server and with what writes its rows."""
    found: dict[SinkName, Mapping[str, Json]] = {}
    for name, described in sinks.items():
        writer = {"writer": _text(writers[name])} if name in writers else {}
        found[name] = {**described, **writer, **servers.get(name, {})}
    return found


def _text(by_engine: Ability) -> str:
    return "Spark" if by_engine.granted else f"tasks: {by_engine.because}"
