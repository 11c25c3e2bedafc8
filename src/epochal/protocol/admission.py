"""
Admission of starts and epochs (I10): same uid, same query, same offsets, the next number.

Rows are lost or repeated silently when a log, a checkpoint and a target that don't belong together
are combined: a checkpoint that was copied, reset or restored, a second pipeline on the folder of
the first, other code that ran a few batches meanwhile. Each function here compares what a driver
brings with what the log or a target holds, and refuses with the facts and the ways out. Nothing
guesses what the user meant.

The engine's checkpoint, the log and the targets advance one after the other, so a crash leaves them
at most one epoch apart. "plan" and "finish" are Spark's `offsets/7` and `commits/7`:

    engine plans 7 | tasks prepare | log: COMMIT 7 | targets commit 7 | engine finishes 7
                   ^ a             ^ b             ^ c                ^ d

    crash at   engine's next epoch   log expects    admitted as
    a, b       7                     7              FRESH: rows are written; what was prepared is
                                                    named by no decision and aborted (I5)
    c, d       7                     8              REPLAY: 7 is decided; its rows are drained and
                                                    not written, after the start has committed it
    later      8                     8              FRESH

So only the expected epoch and the one before it are admitted. Everything else is refused:

    engine   log expects   what happened
    5        8             the checkpoint was restored from a backup, or rolled back
    0        8             it was reset: Spark has another query id
    12       8             other code ran 8 to 11, or the log was restored
    7        8             and other offsets than the decision has: 7 now means other rows

And of the targets, by the newest epoch that each proves for this uid:

    target   log            what happened
    9        8 is next      the log was restored: the target has an epoch that the log lost
    4        committed 7    the target went back in time: 5 to 7 are gone there
    3, by    new            the checkpoint was reset, or two pipelines have the same name
    another uid

The last but one is not only found at a start. A server may be replaced under a running driver, by a
replica that lagged or from a backup, and it then lists handles of settled epochs as prepared again:
a sweep would abort them. So this is compared before every sweep, and by each sink in every epoch.
What was committed is counted by sink (`State.newest_committed`): an epoch that was given up was
not, and the target of a sink that is new, retargeted or forked proves nothing yet.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from shlex import quote

from epochal.errors import Misconfigured, Refused, WentBack
from epochal.protocol.recovery import give_up_command
from epochal.protocol.state import Accepted, State, epochs_text
from epochal.terms import EpochNumber, Json, Mark, Offsets, SinkName, Uid, is_same_place

_SHOWN_CHARS_MAX = 500


class Admission(Enum):
    FRESH = "fresh"
    """Write this epoch."""
    REPLAY = "replay"
    """It is decided: drain its rows and write none."""


class Unfinished(Enum):
    """What to do with a batch that other code had planned and not finished."""

    ASK = "ask"
    REDO = "redo"
    SKIP = "skip"


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """How far the engine's own checkpoint is."""

    planned: EpochNumber | None = None
    """The newest epoch whose offsets are written down."""
    finished: EpochNumber | None = None
    """The newest epoch that the engine takes for done."""

    @property
    def upcoming(self) -> EpochNumber:
        """The epoch that the engine will run next."""
        if self.planned is None:
            return EpochNumber(0)
        if self.has_unfinished:
            return self.planned
        return EpochNumber(self.planned + 1)

    @property
    def has_unfinished(self) -> bool:
        """An epoch is planned, and the engine does not take it for done."""
        return self.planned is not None and self.planned != self.finished


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What a driver brings when it asks for a pipeline."""

    pipeline: str
    location: str
    sinks: Mapping[SinkName, Mapping[str, Json]]
    driver: str = ""
    query_id: str | None = None
    run: str | None = None
    position: Position | None = None
    """None where there is no engine with a checkpoint of its own."""
    unfinished: Unfinished = Unfinished.ASK
    retarget: Collection[SinkName] = ()
    fence: bool = True
    only_new: bool = False
    """Nobody claimed when the query was started: only a log without a record may be claimed."""

    def __post_init__(self) -> None:
        unknown = [sink for sink in self.retarget if sink not in self.sinks]
        if unknown:
            raise Misconfigured(
                f"{', '.join(map(repr, unknown))} is to be retargeted, and is none of the sinks",
                f"the sinks are {', '.join(map(repr, self.sinks))}",
            )


def newborn(start: Start, uid: Uid) -> State:
    """The state of a log that has no record yet, possibly on a checkpoint that other code used."""
    position = start.position or Position()
    first = position.upcoming
    if position.has_unfinished:
        first = after_unfinished(start.unfinished, position, start.location)
    return State(
        uid=uid, pipeline=start.pipeline, location=start.location, run=start.run, first=first
    )


def after_unfinished(unfinished: Unfinished, position: Position, location: str) -> EpochNumber:
    """Where to go on after a batch that other code planned and did not finish."""
    planned = position.upcoming
    if unfinished is Unfinished.ASK:
        raise Refused(
            f"{location}: batch {planned} was planned by code other than epochal and not "
            "finished; whether its rows arrived can't be known here",
            'look into the targets, then say unfinished="skip" if its rows are there, '
            'or unfinished="redo" if they are not (`epochal run` has --unfinished)',
        )
    return EpochNumber(planned + 1) if unfinished is Unfinished.SKIP else planned


def admit_start(state: State, start: Start) -> None:
    """Compare what a driver brings with what the log remembers. Asks nothing of any target."""
    _claimed_at_start(state, start)
    _not_paused(state)
    require_same_pipeline(state, start)
    _same_query(state, start)
    _next_in_line(state, start)
    _same_sinks(state, start)
    if not start.fence and not state.is_stopped:
        raise Refused(
            f"{state.location}: generation {state.generation} ({state.driver}) did not stop "
            "cleanly and may still be running; fence_on_start is off",
            "stop that driver, or start with fence_on_start=True to take over from it",
        )


def _claimed_at_start(state: State, start: Start) -> None:
    if start.only_new:
        raise Refused(
            f"{state.location}: the epoch log has records, and could not be claimed where the "
            "query was started, which does not reach it: a worker of an earlier start that wakes "
            "up can't be told from this one",
            "keep the log where the process that starts the query reaches it too: "
            "Pipeline(…, log='postgresql://…#name'), 's3://…'",
        )


def _not_paused(state: State) -> None:
    if state.pause is not None:
        raise Refused(
            f"pipeline {state.pipeline!r} is {state.pause}",
            f"`epochal resume {state.location}` (log= elsewhere: `epochal resume MODULE:PIPELINE`)",
        )


def require_same_pipeline(state: State, start: Start) -> None:
    """Refuse the log of another pipeline, another run, or another place."""
    if state.pipeline != start.pipeline:
        raise Refused(
            f"{start.location} belongs to the pipeline {state.pipeline!r}, not {start.pipeline!r}",
            f"give {start.pipeline!r} a checkpoint of its own, or, if it is the same pipeline "
            f"under a new name, `epochal rename {start.location} {start.pipeline}` (log= "
            "elsewhere: --log URL)",
        )
    if state.run != start.run and state.last is not None:
        raise Refused(
            f"{start.location} belongs to run {state.run!r}, not {start.run!r}",
            "a deliberate fresh start needs a fresh checkpoint (and a log= of its own where one is "
            f"given); to go on, start with run={state.run!r}",
        )
    if not is_same_place(state.location, start.location):
        raise Refused(
            f"the epoch log at {start.location} is bound to {state.location}: "
            "this checkpoint was copied or moved",
            f"after a move: `epochal adopt {start.location}` (log= elsewhere: --log URL); for a "
            f"copy that lives on beside the original: `epochal fork {start.location}` (log= "
            'elsewhere: a log= of its own, and run="…")',
        )


def _same_query(state: State, start: Start) -> None:
    if state.query_id is None or state.query_id == start.query_id:
        return
    if start.query_id is None and state.last is None:
        return
    last = "none" if state.last is None else state.last.epoch
    raise Refused(
        f"{start.location}: the epoch log remembers query {state.query_id} up to epoch {last}, "
        f"Spark's checkpoint has {'no query yet' if start.query_id is None else start.query_id}: "
        "it was reset or replaced",
        "put the old checkpoint back; or, to process everything again on purpose, start on a fresh "
        'checkpoint with run="…"',
    )


def _next_in_line(state: State, start: Start) -> None:
    position = start.position
    if position is None or (position.planned is None and state.last is None):
        return
    upcoming = position.upcoming
    if upcoming not in (state.expected, state.expected - 1):
        raise _out_of_line(state, upcoming)


def _out_of_line(state: State, asked: EpochNumber) -> Refused:
    if asked < state.expected:
        return Refused(
            f"{state.location}: Spark goes on at epoch {asked}, the epoch log has decided up to "
            f"{state.expected - 1}: the checkpoint is older than the log",
            "the checkpoint was restored or rolled back: put the newer one back; or, to process "
            'again on purpose, start on a fresh checkpoint with run="…"',
        )
    return Refused(
        f"{state.location}: Spark goes on at epoch {asked}, the epoch log has decided up to "
        f"{state.expected - 1}: other code ran the epochs between, or the log is an old one",
        f"if other code wrote them: `epochal adopt {state.location}` (log= elsewhere: --log URL); "
        "if the log was restored from a backup: put the newest one back",
    )


def _same_sinks(state: State, start: Start) -> None:
    gone = [sink for sink in state.pending if sink not in start.sinks]
    if gone:
        raise Refused(
            f"epoch {state.expected - 1} is decided and not yet carried out on {', '.join(gone)}, "
            "which this start no longer has",
            "start once with the sink still there, then remove it; if its target is gone for "
            f"good, record where the rows are: {give_up_command(gone[0], state.expected - 1)}",
        )
    removed = [sink for sink in state.sinks if sink not in start.sinks]
    _none_left_in_doubt(state, removed, "is no longer among the sinks", "remove it")
    for sink, declared in start.sinks.items():
        known = state.sinks.get(sink)
        if known is None or known.get("target") == declared.get("target"):
            continue
        moved = f"wrote to {known.get('target')} so far and now names {declared.get('target')}"
        if sink in state.pending:
            epoch = state.expected - 1
            raise Refused(
                f"sink {sink!r} {moved}, and epoch {epoch} is decided and not yet carried out "
                "where it wrote so far",
                "start once with the target as it was, then retarget it; if that target never "
                f"takes the rows, record where they are: {give_up_command(sink, epoch)}, and start "
                f"with retarget=[{sink!r}]",
            )
        if sink not in start.retarget:
            raise Refused(
                f"sink {sink!r} {moved}",
                f"if it is meant: start with retarget=[{sink!r}] (`epochal run` has --retarget) "
                "once nothing of it is in doubt; for a new sink beside the old one give it another "
                "name",
            )
        _none_left_in_doubt(state, [sink], moved, "retarget it")


def _none_left_in_doubt(state: State, sinks: Sequence[SinkName], fact: str, then: str) -> None:
    """After a sink is removed or retargeted, no sweep lists its old target any more (I5)."""
    if sinks and not state.is_clear:
        raise Refused(
            f"{', '.join(sinks)} {fact}, and the last driver was killed or stopped within an "
            "epoch: rows that it or its tasks left prepared there may not be cleared",
            "start once with the sink as it was and let it end between two epochs "
            f"(availableNow=True, spark.speculation off), then {then}; if that target is gone for "
            f"good: `epochal adopt {state.location}` (log= elsewhere: --log URL) lets go of what "
            "was there",
        )


def admit_marks(
    state: State, marks: Mapping[SinkName, Sequence[Mark] | None], run: str | None
) -> None:
    """Compare the log with what each target proves. None: the target keeps no proof."""
    for sink, proven in marks.items():
        if proven is None:
            continue
        _no_other_uid(state, sink, proven, run)
        _log_not_older(state, sink, own_epoch(state, proven))
        require_not_back(state, sink, proven)


def _no_other_uid(state: State, sink: SinkName, proven: Sequence[Mark], run: str | None) -> None:
    # A pipeline that has decided an epoch, or that this target knows, is not a new one.
    if state.last is not None or any(mark.uid == state.uid for mark in proven):
        return
    for mark in proven:
        if mark.run == run and mark.uid != state.forked_from:
            raise Refused(
                f"sink {sink!r} already holds {_text(state, run)} up to epoch {mark.epoch} under "
                f"another uid ({mark.uid}): the checkpoint was reset, or a second pipeline has the "
                "same name",
                'put the old checkpoint back; or give run="…" (a new key) to process everything '
                "again on purpose; or give the pipeline another name",
            )


def _text(state: State, run: str | None) -> str:
    return f"pipeline {state.pipeline!r}" if run is None else f"run {run!r} of {state.pipeline!r}"


def _log_not_older(state: State, sink: SinkName, own: EpochNumber | None) -> None:
    if own is not None and own >= state.expected:
        raise Refused(
            f"sink {sink!r} proves epoch {own}, the epoch log knows nothing after "
            f"{state.expected - 1}: the log is older than the target",
            "the checkpoint was restored from a backup: put the newest one back, or restore the "
            "target to the same moment",
        )


def own_epoch(state: State, proven: Sequence[Mark]) -> EpochNumber | None:
    """The newest epoch of this pipeline's own among what a target proves."""
    return max((mark.epoch for mark in proven if mark.uid == state.uid), default=None)


def is_back(state: State, sink: SinkName, proven: Sequence[Mark] | None) -> bool:
    """
    Whether a target proves less than was committed there.

    More is no sign of it: an epoch that was given up may be there all the same, and that of a
    decision whose reply was lost is.
    """
    committed = state.newest_committed.get(sink)
    if committed is None or proven is None:
        return False
    own = own_epoch(state, proven)
    return own is None or own < committed


def require_not_back(state: State, sink: SinkName, proven: Sequence[Mark] | None) -> None:
    """Refuse a target that went back in time, with what is missing there and the ways out."""
    if proven is None or not is_back(state, sink, proven):
        return
    lost = lost_epochs(state, sink, own_epoch(state, proven))
    raise WentBack(
        f"sink {sink!r} proves {lost.proven_text}, and epoch {lost.through} was committed there: "
        "the target went back in time, as a backup was restored or a replica that lagged behind "
        f"took over. Missing there: {lost.text}",
        "put the target back that has these epochs; or bring their rows back from the source, if "
        f"the query keeps no state: `epochal repair PIPELINE --sink {quote(sink)}`; or go on "
        "without them, on record: "
        f"`epochal resolve accept PIPELINE --sink {quote(sink)} --because …`",
        sink,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LostEpochs:
    """What a target that went back in time has lost."""

    after: EpochNumber | None
    """The newest epoch that the target still proves."""
    since: EpochNumber
    """The first that is missing."""
    through: EpochNumber
    """The newest that was committed there."""
    begins: tuple[str, ...] = ()
    """Where the first of them begins in each source; empty where the log does not know it."""
    ends: tuple[str, ...] = ()
    """Where the last of them ends in each source."""
    accepted: tuple[Accepted, ...] = ()
    """Which epochs after `after` were missing before, and what became of them."""

    @property
    def proven_text(self) -> str:
        return "no epoch" if self.after is None else f"epochs up to {self.after}"

    @property
    def text(self) -> str:
        """Which epochs, where their rows are in the sources, and which were missing before."""
        epochs = epochs_text(self.since, self.through)
        where = (
            f", in the source {_from(self.begins)}up to {_cut(self.ends)}"
            if self.ends
            else " (offsets: not in the log)"
        )
        before = "".join(f"; missing before: {word}" for word in self.accepted)
        return f"{epochs}{where}{before}"


def _from(begins: Sequence[str]) -> str:
    return f"from {_cut(begins)} " if begins else ""


def _cut(offsets: Sequence[str]) -> str:
    text = "; ".join(offsets)
    return text if len(text) <= _SHOWN_CHARS_MAX else f"{text[:_SHOWN_CHARS_MAX]}…"


def lost_epochs(
    state: State,
    sink: SinkName,
    after: EpochNumber | None,
    *,
    is_loaded: Callable[[str], bool] = lambda _run: False,
) -> LostEpochs:
    """
    The epochs that were committed at a sink and are newer than what its target proves. `is_loaded`:
    whether the target has the rows of a load, which brought epochs back that it had lost before.

        ledger  log                                  repair-5-7   missing
        … 4     accepted 5 to 7, committed 8         is there     8
        … 4     accepted 5 to 7, committed 8         is not       5 to 8

    What a person accepted without a load is not asked of the target again.
    """
    through = state.newest_committed[sink]
    first = state.totals[sink].since if sink in state.totals else state.first
    since = first if after is None else EpochNumber(after + 1)
    words = [word for word in state.accepted if word.sink == sink and word.through >= since]
    for word in words:
        if word.since == since and (word.run is None or is_loaded(word.run)):
            since = EpochNumber(word.through + 1)
    ends = {end.epoch: end.sources for end in state.ends}
    return LostEpochs(
        after=after,
        since=since,
        through=through,
        begins=() if since == first else ends.get(EpochNumber(since - 1), ()),
        ends=ends.get(through, ()),
        accepted=tuple(words),
    )


def admit_epoch(
    state: State, epoch: EpochNumber, *, query_id: str | None, offsets: Offsets
) -> Admission:
    """Only the last epoch again, with the same offsets, or the one after it; none once paused."""
    _not_paused(state)
    if None not in (state.query_id, query_id) and state.query_id != query_id:
        raise Refused(
            f"epoch {epoch} comes from query {query_id}; the epoch log belongs to {state.query_id}",
            "one checkpoint belongs to one query: give the other one a checkpoint of its own",
        )
    if epoch == state.expected:
        return Admission.FRESH
    if epoch != state.expected - 1:
        raise _out_of_line(state, epoch)
    if state.last is not None and state.last.offsets.digest != offsets.digest:
        raise Refused(
            f"epoch {epoch} was decided for other offsets than it now has:\n"
            f"  decided: {state.last.offsets.text}\n  now:     {offsets.text}",
            "the checkpoint was restored or edited: put the one that belongs to the log back",
        )
    return Admission.REPLAY
