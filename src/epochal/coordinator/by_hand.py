"""
What a person may change in the epoch log, without a running driver: each is one record.

Identity, without any target: `adopt` (the checkpoint moved), `fork` (it is a copy), `rename`.
In doubt: `give_up` one sink of the decided epoch, `finish` it, `abort_undecided` one handle.
`accept` that a target went back in time. Each record fences a driver that still runs, and nothing
that was decided is lost. `pause` and `resume`
don't fence: the driver ends its epoch and stops by itself.

Finishing a sink of a decided epoch needs the decision and nothing else (I7); it is recorded
afterwards. Aborting an undecided handle needs a claim first: only then can no decision that names
it come any more (I5). Nothing here commits what is not decided.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace

from epochal.contract import Committer, Sink
from epochal.coordinator.cleanup import abort_judged
from epochal.coordinator.commit import Commit
from epochal.coordinator.environment import Environment, new_claim, this_driver
from epochal.coordinator.journal import EpochLog, Journal
from epochal.coordinator.targets import Targets, identity_of
from epochal.errors import Refused, Unsettled
from epochal.protocol.admission import (
    Position,
    Unfinished,
    after_unfinished,
    require_not_back,
)
from epochal.protocol.recovery import (
    Judgement,
    Verdict,
    finish_command,
    give_up_command,
    judge,
)
from epochal.protocol.state import (
    Accepted,
    GivenUp,
    Pause,
    RecordKind,
    State,
    accepted,
    adopted,
    claimed,
    forked,
    gave_up,
    renamed,
    settled,
    sinks_done,
)
from epochal.terms import DEFAULT_LIMITS, EpochNumber, Limits, SinkName, is_same_place

# Identity


def adopt(
    log: EpochLog,
    *,
    location: str,
    query_id: str | None,
    position: Position,
    unfinished: Unfinished = Unfinished.ASK,
    dry_run: bool = False,
    environment: Environment | None = None,
) -> State:
    """
    Bind the log to a checkpoint that was moved here, or that other code ran meanwhile. The expected
    epoch only moves forward.

    A log without a query (a session's, a once-only load's) has no engine whose position counts.
    """

    def follow(state: State) -> State:
        expected = (
            None if state.query_id is None else _gone_on_at(state, position, unfinished, location)
        )
        return adopted(
            state, location=location, query_id=query_id or state.query_id, expected=expected
        )

    return _change(log, follow, environment, dry_run=dry_run)


def _gone_on_at(
    state: State, position: Position, unfinished: Unfinished, location: str
) -> EpochNumber | None:
    """The epoch at which other code left the checkpoint; None where the log left it there."""
    upcoming = position.upcoming
    if upcoming in (state.expected, state.expected - 1):
        return None
    if upcoming < state.expected:
        raise Refused(
            f"{location} goes on at epoch {upcoming}, the epoch log has decided up to "
            f"{state.expected - 1}: a log never goes back",
            "bring Spark's part of the checkpoint (offsets, commits, state) here as well",
        )
    return after_unfinished(unfinished, position, location) if position.has_unfinished else upcoming


def fork(
    log: EpochLog,
    *,
    location: str,
    is_original_alive: bool = False,
    dry_run: bool = False,
    environment: Environment | None = None,
) -> State:
    """
    Make a copied checkpoint a pipeline of its own, under a new uid.

    What is decided and not carried out stays with the original, so there must be one (I4).
    """
    environment = environment or Environment()
    uid = environment.new_uid()

    def follow(state: State) -> State:
        if is_same_place(state.location, location):
            raise Refused(
                f"{location} is where this log belongs: it is the original, not a copy",
                "copy the checkpoint, then fork the copy",
            )
        if state.unsettled is not None and not is_original_alive:
            raise Refused(
                f"epoch {state.unsettled.epoch} is decided and not carried out on "
                f"{', '.join(state.pending)}; a fork leaves that to the original",
                "if the original is there and will be started: `--original-lives`; if this is the "
                f"only copy: `epochal adopt {location}`",
            )
        return forked(state, uid=uid, location=location)

    return _change(log, follow, environment, dry_run=dry_run)


def give_up(log: EpochLog, given_up: GivenUp, *, environment: Environment | None = None) -> State:
    """Record a person's decision that the unsettled epoch is not carried out on one sink (I4)."""

    def follow(state: State) -> State:
        if state.unsettled is None or given_up.sink not in state.pending:
            raise Refused(
                f"nothing of sink {given_up.sink!r} is decided and waiting to be carried out",
                f"waiting are: {', '.join(state.pending) or 'none'}",
            )
        return gave_up(state, given_up)

    note = f"{given_up.by}: {given_up.because}"
    return _change(log, follow, environment, RecordKind.GAVE_UP, note=note)


def accept(log: EpochLog, word: Accepted, *, environment: Environment | None = None) -> State:
    """Record a person's decision to go on at a target that went back in time."""

    def follow(state: State) -> State:
        committed = state.newest_committed.get(word.sink)
        if committed != word.through:
            raise Refused(
                f"sink {word.sink!r}: epoch {committed} is the newest that was committed there, "
                f"not {word.through}",
                "a driver went on meanwhile: look again with --dry-run",
            )
        return accepted(state, word)

    note = f"{word.by}: {word.because}"
    return _change(log, follow, environment, RecordKind.ACCEPTED, note=note)


def rename(
    log: EpochLog,
    *,
    pipeline: str,
    dry_run: bool = False,
    environment: Environment | None = None,
) -> State:
    """Give the pipeline another name."""
    return _change(log, lambda state: renamed(state, pipeline), environment, dry_run=dry_run)


def pause(log: EpochLog, *, by: str, because: str, environment: Environment | None = None) -> State:
    """
    Let the driver end its epoch and stop, and refuse every start until `resume`.

    A pipeline that is paused already stays so, by whom and why it was.
    """
    environment = environment or Environment()
    with closing(Journal(log, environment=environment)) as journal:
        state = _require_log(journal.peek(), log)
        if state.pause is not None:
            return state
        wanted = Pause(by=by, because=because, since=environment.clock.now())
        return journal.set_pause(wanted, note=f"{by}: {because}")


def resume(log: EpochLog, *, by: str, environment: Environment | None = None) -> State:
    """Let the pipeline start again. A driver that has not stopped yet goes on."""
    with closing(Journal(log, environment=environment)) as journal:
        _require_log(journal.peek(), log)
        return journal.set_pause(None, note=by)


def _change(
    log: EpochLog,
    follow: Callable[[State], State],
    environment: Environment | None,
    kind: RecordKind = RecordKind.IDENTITY,
    *,
    note: str = "",
    dry_run: bool = False,
) -> State:
    """The state after the change; with `dry_run` no record is appended."""
    with closing(Journal(log, environment=environment)) as journal:
        if dry_run:
            return follow(_require_log(journal.peek(), log))
        return journal.claim(lambda before: follow(_require_log(before, log)), kind, note=note)


# What is in doubt


def finish(
    log: EpochLog,
    sink: Sink,
    *,
    epoch: EpochNumber,
    note: str,
    limits: Limits = DEFAULT_LIMITS,
    environment: Environment | None = None,
) -> State:
    """Carry the unsettled decision out on one sink, and record that."""
    environment = environment or Environment()
    with closing(Journal(log, limits=limits, environment=environment)) as journal:
        state = _require_pending(journal.peek(), log, sink.name, epoch)
        with closing(Targets({sink.name: sink}, limits=limits, environment=environment)) as targets:
            targets.open(state)
            require_not_back(state, sink.name, targets.committers[sink.name].newest())
            commit = Commit(epoch=epoch, targets=targets, limits=limits, environment=environment)
            lost = commit.carry_out({sink.name: state.pending[sink.name]})
        if lost:
            raise Unsettled(
                f"epoch {epoch}: sink {sink.name!r} threw prepared rows of the decided epoch away: "
                f"{', '.join(lost[sink.name])}",
                "start the pipeline, which writes them again where sums prove them equal; or keep "
                f"them elsewhere and record it: {give_up_command(sink.name, epoch)}",
            )

        def follow(before: State | None) -> State:
            pending = _require_pending(before, log, sink.name, epoch)
            done = sinks_done(pending, frozenset({sink.name}))
            return done if done.pending else settled(done)

        return journal.claim(follow, RecordKind.PROGRESS, note=note)


def abort_undecided(
    log: EpochLog,
    sink: Sink,
    *,
    name: str,
    note: str,
    limits: Limits = DEFAULT_LIMITS,
    environment: Environment | None = None,
) -> Judgement:
    """Claim, then abort one thing that the target lists and no decision names."""
    with closing(Journal(log, limits=limits, environment=environment)) as journal:
        state = journal.claim(lambda before: as_successor(_require_log(before, log)))
        with closing(sink.committer(identity_of(state, sink.name), limits)) as committer:
            judgement = require_abortable(state, sink.name, committer, name)
            abort_judged(committer, [judgement], state)
        journal.append(RecordKind.RESOLVED, state, note=note)
        return judgement


def take_over(log: EpochLog, limits: Limits, environment: Environment | None = None) -> State:
    """Claim for a person: from here on no earlier driver can decide."""
    with closing(Journal(log, limits=limits, environment=environment)) as journal:
        return journal.claim(lambda before: as_successor(_require_log(before, log)))


def require_abortable(state: State, sink: SinkName, committer: Committer, name: str) -> Judgement:
    """What the target lists under a name, if it may be thrown away."""
    if sink in state.pending:
        # Some targets list names that don't tell attempts apart: only a commit can.
        epoch = state.expected - 1
        raise Refused(
            f"epoch {epoch} is decided and not carried out on sink {sink!r}: until it is, nothing "
            "there may be aborted (I5)",
            f"commit it: {finish_command(sink, epoch)}; if that never works, keep its rows "
            f"elsewhere and record it: {give_up_command(sink, epoch)}",
        )
    listed = {one.name: one for one in committer.in_doubt()}
    require_not_back(state, sink, committer.newest())
    if name not in listed:
        raise Refused(
            f"sink {sink!r} lists nothing named {name}",
            f"it lists: {', '.join(listed) or 'nothing'}; what is not listed is not in doubt",
        )
    judgement = judge(listed[name], state)
    if judgement.verdict is not Verdict.ABORT:
        raise Refused(
            f"{name} can't be judged: {judgement.because}",
            "find out whose it is; if no pipeline needs it, remove it with the target's own tools",
        )
    return judgement


def as_successor(state: State) -> State:
    """
    The state as a person's tool claims it. The tool prepares nothing and does not clear all
    targets, so it keeps how the last driver stopped.
    """
    mine = claimed(
        state,
        claim=new_claim(),
        driver=this_driver(),
        sinks=state.sinks,
        query_id=state.query_id,
        run=state.run,
    )
    return replace(mine, is_stopped=state.is_stopped, is_clear=state.is_clear)


def _require_log(state: State | None, log: EpochLog) -> State:
    if state is None:
        raise Refused(
            f"{log.place} holds no epoch log",
            "give the checkpoint of a pipeline that has been started with epochal before",
        )
    return state


def _require_pending(
    state: State | None, log: EpochLog, sink: SinkName, epoch: EpochNumber
) -> State:
    state = _require_log(state, log)
    decided = None if state.unsettled is None else state.unsettled.epoch
    if decided != epoch or sink not in state.pending:
        raise Refused(
            f"epoch {epoch} does not wait to be carried out on sink {sink!r}",
            "nothing is decided and unsettled: there is nothing to finish"
            if decided is None
            else f"epoch {decided} does, on: {', '.join(state.pending) or 'none'}",
        )
    return state
