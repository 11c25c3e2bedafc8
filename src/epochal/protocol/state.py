"""
`State`: what the epoch log holds, and how each record changes it.

Every record carries the whole state, so only the newest record is read, and all below it may be
deleted. A state is never edited: each function here returns the next one. In steady state there is
one record per epoch: that an epoch is settled is written with the decision of the next one.

    record   kind     expected   unsettled        newest_committed
    11       claim    7          -                orders 6
    12       commit   8          7: orders …      orders 6
                      8          - (in memory)    orders 7
    13       commit   9          8: orders …      orders 7
    14       stop     9          -                orders 8

A driver that crashes after record 12 leaves 7 unsettled: the next start commits it again, which a
target does once (I7), and writes SETTLED.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum

from epochal.errors import Refused
from epochal.protocol.invariants import broken
from epochal.protocol.receipts import sum_of
from epochal.terms import (
    NO_ROWS,
    Claim,
    Decision,
    EpochNumber,
    Fingerprint,
    Generation,
    Handle,
    Json,
    Offsets,
    Receipt,
    Receipts,
    SinkName,
    Uid,
)

NO_GENERATION = Generation(0)
CLAIMS_KEPT = 32
"""How many starts back a driver recognises what was prepared under this log."""
ENDS_KEPT = 32
"""Of how many epochs the log keeps where they end in the sources."""
ENDS_CHARS_MAX = 32_768
"""The text that these may take in a record; older ones are left out."""
FIRST_EPOCH = EpochNumber(0)


class RecordKind(Enum):
    """
    Why a record was written. Only the state counts, and this is for people, but for one thing: a
    driver goes on above a `PAUSE` or `RESUME`.
    """

    CLAIM = "claim"
    COMMIT = "commit"
    PROGRESS = "progress"
    REWRITE = "rewrite"
    SETTLED = "settled"
    GAVE_UP = "gave-up"
    STOP = "stop"
    IDENTITY = "identity"
    RESOLVED = "resolved"
    PAUSE = "pause"
    RESUME = "resume"
    ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True, kw_only=True)
class LastEpoch:
    """The newest decided epoch: what a replay must match (I10)."""

    epoch: EpochNumber
    generation: Generation
    offsets: Offsets
    rows: Mapping[SinkName, int]
    decided_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochEnd:
    """Where a decided epoch ends in each source, and the next one begins."""

    epoch: EpochNumber
    sources: tuple[str, ...]
    """As the engine writes it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp:
    """A person's decision not to carry one decided epoch out on one sink (I4)."""

    epoch: EpochNumber
    sink: SinkName
    kept_at: str
    """Where the rows are kept."""
    by: str
    because: str
    evidence: str = ""
    """What the target could prove at that time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause:
    """A person's request that the driver stops after its epoch, and that none starts."""

    by: str
    because: str
    since: float

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC)
        return f"paused by {self.by} at {since:%Y-%m-%d %H:%M:%S} UTC: {self.because}"


def epochs_text(first: EpochNumber, last: EpochNumber) -> str:
    return f"epoch {last}" if first == last else f"epochs {first} to {last}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepted:
    """A person's decision to go on at a target that has lost epochs which were committed there."""

    sink: SinkName
    after: EpochNumber | None
    """The newest epoch that the target still proved; None where it proved none."""
    since: EpochNumber
    """The first that was missing: above `after` + 1 where earlier ones were accepted before."""
    through: EpochNumber
    """The newest that was committed there: those since `since` are lost, or were brought back."""
    by: str
    because: str
    run: str | None = None
    """The load that brought their rows back; None where a person saw to them."""

    def __str__(self) -> str:
        return f"{epochs_text(self.since, self.through)}, accepted by {self.by}: {self.because}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Total:
    """All that was decided for one sink, less what was given up: what an audit must find."""

    since: EpochNumber
    """The first epoch counted."""
    epochs: int
    fingerprint: Fingerprint
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    uid: Uid
    pipeline: str
    location: str
    """The checkpoint this log is bound to."""
    run: str | None = None
    forked_from: Uid | None = None
    query_id: str | None = None
    generation: Generation = NO_GENERATION
    claims: tuple[Claim, ...] = ()
    """
    The claims of this generation and of those before it, newest first. Two copies of one log have
    the same up to the copy and different ones after it; see `recovery`.
    """
    driver: str = ""
    """Who claimed this generation: for people."""
    first: EpochNumber = FIRST_EPOCH
    """The epoch this log begins at: above zero where a checkpoint was taken over."""
    last: LastEpoch | None = None
    unsettled: Decision | None = None
    done: frozenset[SinkName] = frozenset()
    """Sinks of `unsettled` that are proven done, whose own proof may expire meanwhile."""
    sinks: Mapping[SinkName, Mapping[str, Json]] = field(default_factory=dict)
    given_up: tuple[GivenUp, ...] = ()
    accepted: tuple[Accepted, ...] = ()
    totals: Mapping[SinkName, Total] = field(default_factory=dict)
    newest_committed: Mapping[SinkName, EpochNumber] = field(default_factory=dict)
    """
    By sink, the newest epoch that was committed at its target. Not there for a sink that is new,
    retargeted, forked or renamed, whose target proves nothing yet; giving up and adopting leave it.
    """
    pause: Pause | None = None
    ends: tuple[EpochEnd, ...] = ()
    """
    Of the newest epochs, oldest first. By it rows are found in the source again that a target has
    lost; the engine's own notes and older records of the log may be gone by then.
    """
    is_stopped: bool = True
    """The driver of this generation has stopped, with everything that it decided carried out."""
    is_clear: bool = True
    """
    No target holds prepared rows of this driver or of one before it, and none of its tasks can
    prepare any more: a sink may be removed.
    """

    @property
    def expected(self) -> EpochNumber:
        """The epoch that comes after the last decided one."""
        return self.first if self.last is None else EpochNumber(self.last.epoch + 1)

    @property
    def has_decided(self) -> bool:
        """Whether the driver of this generation has decided an epoch."""
        return self.last is not None and self.last.generation == self.generation

    @property
    def named(self) -> frozenset[Handle]:
        """Every handle that the unsettled decision names: not to be aborted by anyone (I5)."""
        return frozenset() if self.unsettled is None else self.unsettled.handles

    @property
    def pending(self) -> Mapping[SinkName, Sequence[Receipt]]:
        """What of the unsettled decision is still to be carried out."""
        if self.unsettled is None:
            return {}
        return {
            sink: receipts
            for sink, receipts in self.unsettled.receipts.items()
            if sink not in self.done
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    kind: RecordKind
    nonce: str
    """Shows a writer whose put was not answered whether the record in the slot is its own."""
    written_at: float
    state: State
    note: str = ""
    """Who did it, why, and on what evidence, where a person did: for people."""


def claimed(
    state: State,
    *,
    claim: Claim,
    driver: str,
    sinks: Mapping[SinkName, Mapping[str, Json]],
    query_id: str | None,
    run: str | None,
) -> State:
    """A new driver takes over: from here on no earlier generation decides (I7)."""
    staying = [sink for sink in state.sinks if not _moves(state, sink, sinks)]
    return replace(
        state,
        generation=Generation(state.generation + 1),
        claims=(claim, *state.claims[: CLAIMS_KEPT - 1]),
        driver=driver,
        sinks={**sinks},
        last=_proven_by(state, staying),
        # What a sink brought to another target is not at its new one.
        totals={sink: total for sink, total in state.totals.items() if sink in staying},
        newest_committed={
            sink: epoch for sink, epoch in state.newest_committed.items() if sink in staying
        },
        query_id=query_id or state.query_id,
        run=run or state.run,
        is_stopped=False,
        is_clear=False,
    )


def _moves(state: State, sink: SinkName, sinks: Mapping[SinkName, Mapping[str, Json]]) -> bool:
    return sink in sinks and sinks[sink].get("target") != state.sinks[sink].get("target")


def _proven_by(state: State, sinks: Collection[SinkName]) -> LastEpoch | None:
    """The last epoch, as far as these sinks can be asked to prove it: a new target can't."""
    if state.last is None:
        return None
    rows = {sink: rows for sink, rows in state.last.rows.items() if sink in sinks}
    return replace(state.last, rows=rows)


def bound(state: State, query_id: str) -> State:
    """The query this log belongs to became known: its first epoch begins."""
    return state if state.query_id == query_id else replace(state, query_id=query_id)


def decided(state: State, decision: Decision) -> State:
    """COMMIT (I2): the one step after which nothing is thrown away any more."""
    if state.unsettled is not None:
        raise broken("I2", f"epoch {decision.epoch} decided before {state.unsettled.epoch} settled")
    if decision.epoch != state.expected:
        raise broken("I2", f"epoch {decision.epoch} decided where {state.expected} is next")
    last = LastEpoch(
        epoch=decision.epoch,
        generation=decision.generation,
        offsets=decision.offsets,
        rows={sink: sum_of(some).fingerprint.rows for sink, some in decision.receipts.items()},
        decided_at=decision.decided_at,
    )
    return replace(
        state,
        last=last,
        unsettled=decision,
        done=frozenset(),
        totals=_counted(state, decision.epoch, decision.receipts),
        ends=_with_end(state.ends, decision),
    )


def _with_end(ends: Sequence[EpochEnd], decision: Decision) -> tuple[EpochEnd, ...]:
    """With the end of this epoch, as many of the newest as a record takes."""
    offsets = decision.offsets
    sources = offsets.sources or ((offsets.text,) if offsets.text else ())
    if not sources:
        return tuple(ends)
    newest = EpochEnd(epoch=decision.epoch, sources=sources)
    kept: list[EpochEnd] = []
    chars = 0
    for end in (newest, *reversed(ends[-ENDS_KEPT + 1 :])):
        chars += sum(map(len, end.sources))
        if chars > ENDS_CHARS_MAX:
            break
        kept.append(end)
    return tuple(reversed(kept))


def _counted(state: State, epoch: EpochNumber, receipts: Receipts) -> Mapping[SinkName, Total]:
    totals = {**state.totals}
    for sink, some in receipts.items():
        so_far = totals.get(sink) or Total(since=epoch, epochs=0, fingerprint=NO_ROWS, bytes=0)
        totals[sink] = replace(
            so_far,
            epochs=so_far.epochs + 1,
            fingerprint=so_far.fingerprint + sum_of(some).fingerprint,
            bytes=so_far.bytes + sum_of(some).bytes,
        )
    return totals


def sinks_done(state: State, sinks: frozenset[SinkName]) -> State:
    """The unsettled decision is carried out on these sinks."""
    epoch = _require_unsettled(state).epoch
    return replace(
        state,
        done=state.done | sinks,
        newest_committed={**state.newest_committed, **dict.fromkeys(sinks, epoch)},
    )


def rewritten(state: State, sink: SinkName, receipts: Sequence[Receipt]) -> State:
    """The rows a target lost were prepared again: the decision stands, under new handles (I4)."""
    unsettled = _require_unsettled(state)
    renewed = replace(unsettled, receipts={**unsettled.receipts, sink: tuple(receipts)})
    return replace(state, unsettled=renewed)


def gave_up(state: State, given_up: GivenUp) -> State:
    unsettled = _require_unsettled(state)
    if given_up.epoch != unsettled.epoch or given_up.sink not in state.pending:
        raise broken("I4", f"{given_up.sink} of epoch {given_up.epoch} has nothing left to give up")
    return replace(
        state,
        given_up=(*state.given_up, given_up),
        done=state.done | {given_up.sink},
        totals=_uncounted(state, given_up.sink, unsettled.receipts[given_up.sink]),
    )


def _uncounted(
    state: State, sink: SinkName, receipts: Sequence[Receipt]
) -> Mapping[SinkName, Total]:
    if sink not in state.totals:
        return state.totals
    so_far = state.totals[sink]
    less = replace(
        so_far,
        epochs=so_far.epochs - 1,
        fingerprint=so_far.fingerprint - sum_of(receipts).fingerprint,
        bytes=so_far.bytes - sum_of(receipts).bytes,
    )
    return {**state.totals, sink: less}


def accepted(state: State, word: Accepted) -> State:
    """From here on the target need not prove more than it did when a person looked."""
    newest = {sink: epoch for sink, epoch in state.newest_committed.items() if sink != word.sink}
    if word.after is not None:
        newest[word.sink] = word.after
    return replace(state, accepted=(*state.accepted, word), newest_committed=newest)


def settled(state: State) -> State:
    """Everything the decision asked for is carried out."""
    if state.pending:
        raise broken("I4", f"settled with {', '.join(state.pending)} not carried out")
    return replace(state, unsettled=None, done=frozenset())


def stopped(state: State, *, is_clear: bool) -> State:
    return replace(state, is_stopped=True, is_clear=is_clear)


def adopted(
    state: State, *, location: str, query_id: str | None, expected: EpochNumber | None
) -> State:
    """
    A person confirms that this checkpoint moved here, or that other code ran it meanwhile, and
    that what the last driver left prepared need not be cleared at a sink that is then removed.
    """
    moved = replace(state, location=location, query_id=query_id, is_stopped=True, is_clear=True)
    if expected is None or expected == state.expected:
        return moved
    if state.unsettled is not None:
        raise Refused(
            f"epoch {state.unsettled.epoch} is decided and unsettled: it can't be stepped over",
            "start the pipeline on the checkpoint as it was, so that it is carried out, then adopt",
        )
    return replace(moved, first=expected, last=None)


def forked(state: State, *, uid: Uid, location: str) -> State:
    """A copy starts a life of its own; what the original left unsettled stays the original's."""
    return replace(
        state,
        uid=uid,
        claims=(),
        forked_from=state.uid,
        location=location,
        last=_proven_by(state, ()),
        unsettled=None,
        done=frozenset(),
        given_up=(),
        accepted=(),
        totals={},
        newest_committed={},
        pause=None,
        is_stopped=True,
        is_clear=True,
    )


def renamed(state: State, pipeline: str) -> State:
    """The same life under another name, under which no target proves anything yet."""
    return replace(state, pipeline=pipeline, last=_proven_by(state, ()), newest_committed={})


def _require_unsettled(state: State) -> Decision:
    if state.unsettled is None:
        raise broken("I4", "no decision is waiting to be carried out")
    return state.unsettled
