"""The interfaces of a sink.

A sink has three parts. The `Sink` is what a user declares: plain values that can be pickled,
nothing opened. Its `Writer` runs in a task on an executor and prepares rows. Its `Committer` runs
on the driver and carries decisions out. `epochal.testing.conformance` tests every promise written
here; it ships with the package, so that your own sink is judged like ours.

The class of an error says what the caller does next: raise `TryAgain` where nothing happened,
`OutcomeUnknown` where a reply was lost, `PreparedLost` where the target proves that it dropped
prepared rows, `Misconfigured` (or `RowRejected`) where only a person can help. An `OSError` counts
as `TryAgain` on a verb that may be repeated; anything else is a bug and stops the query.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, runtime_checkable

from epochal.errors import InvariantBroken
from epochal.terms import (
    DEFAULT_LIMITS,
    NO_OFFSETS,
    Ability,
    EpochNumber,
    Fingerprint,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Offsets,
    Proof,
    Receipt,
    Receipts,
    SinkName,
)

if TYPE_CHECKING:
    import pyarrow as pa

Rows: TypeAlias = Any
"""A DataFrame of the engine that runs the pipeline. Nothing here depends on an engine."""
Select: TypeAlias = Sequence[str] | Callable[[Rows], Rows] | None

APPEND_ONLY = frozenset({"append"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The attempt that a writer works for."""

    handle: Handle
    schema: pa.Schema
    handout: Json = None
    """What the driver's `Committer.begin` gave out for this epoch."""
    is_first: bool = False
    """
    Set for one attempt of a task only: it alone may use what the handout keeps for its
    partition. Never true of retries, of speculative copies, and where a stage may run
    again.
    """
    is_packed: bool = False
    """Batches have one column, `row`: bytes as the sink's `row_layout` (`kit.row_layout`) asks."""
    limits: Limits = DEFAULT_LIMITS


class Writer(Protocol):
    """
    Prepares the rows of one attempt of one task. Runs in one thread, on an executor; for rejected
    rows, and where the sink allows it for epochs of few rows, on the driver.
    """

    def write(self, batch: pa.RecordBatch) -> None:
        """
        Take one batch. Called any number of times before `prepare`, also not at all.

        Memory must not grow with the number of batches.
        """

    def prepare(self) -> Receipt:
        """
        Make every row written so far durable and invisible. Called once, last.

        After it returns: no reader sees a row (I1), and no crash loses one. Two attempts of one
        task may both succeed (I6). The receipt holds all that commits or aborts from another
        machine.
        """

    def abort(self) -> None:
        """
        Throw away what was written. Called at most once, instead of `prepare` or after it failed.

        A courtesy only: a killed task never gets here, and the driver clears up after it (I5).
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Begin:
    """What a committer is given when an epoch begins."""

    epoch: EpochNumber
    offsets: Offsets = NO_OFFSETS
    """Where in the sources the rows of this epoch end."""
    newest_committed: EpochNumber | None = None
    """
    The newest epoch that was committed at this sink, by the epoch log. None for a sink that is new,
    retargeted, forked or renamed: its target proves nothing yet.

    Where the target proves less, it went back in time: a backup was restored, or a replica that
    lagged behind took over. `begin` or `rehearse` then raises `WentBack`, before anything is
    removed or shown (`kit.require_still_committed`), and so does a `commit` that reads the ledger
    again, as another server may have taken over meanwhile.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadline:
    """The time until which a target surely keeps prepared rows."""

    at_s: float
    """By `time.monotonic` of the driver's process."""
    kept_s: float
    """How long the target keeps prepared rows in all."""
    hint: str
    """What to change where this is too short."""


class Committer(Protocol):
    """
    Carries decisions out at one target. Runs on the driver; calls never overlap, and may come from
    different threads.
    """

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        """
        Ask the target what it can promise, before the first row. Called at every start.

        Raises `Misconfigured` with the fact and the way out where the sink can't keep the promise.
        Changes nothing that a reader of the target sees.
        """

    def begin(self, begin: Begin) -> Json:
        """
        Get ready for an epoch. Called once per epoch, and again before rows of a decided epoch are
        written again. What is returned reaches every writer as `Task.handout`. Raises `WentBack`
        where the target no longer proves `begin.newest_committed`, if `rehearse` does not.
        """

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Deadline | None:
        """
        Show that `commit` can't be refused by content any more (I3). Called once, before a
        decision.

        Readers still see nothing. What was applied may stay open for `commit`, and must be given up
        when `abort` comes instead, or `begin`, or nothing at all. Returns until when the target
        keeps these rows, None where it keeps them without limit: too close to that time the epoch
        is aborted instead of decided.
        """

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Make the rows of these receipts visible. Called only for a durable decision (I3).

        After it returns, all of them are visible once, and the target can prove it (`outcome`,
        `newest`), also where `receipts` is empty (I8). May be repeated at any time, from any
        process, by a driver that is no longer the newest (I7), with the same result.
        """

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """
        Throw away what these receipts name. Never called for a receipt that a decision names.

        May be repeated. A handle that the target has committed is left alone.
        """

    def in_doubt(self) -> Sequence[InDoubt]:
        """List what the target holds prepared under this pipeline's uid and this sink (I5, I6)."""

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        """
        Ask the target what became of a receipt: the handle first, the ledger after it (I9).

        ABORTED is final: nothing that arrives late brings the handle back. Where all receipts of an
        epoch are COMMITTED, `newest` shows that epoch.
        """

    def newest(self) -> Sequence[Mark] | None:
        """
        The newest epoch that the target proves, per uid, for this pipeline's and this sink's
        *name*.

        The uid of another life of the same pipeline is how a reset checkpoint is found (I10). None
        where the target keeps no such proof: then neither a reset nor a restore can be found there.
        """

    def prune(self, below: EpochNumber) -> None:
        """Forget proofs of epochs under `below`, all settled. The newest is always kept."""

    def close(self) -> None:
        """Let connections go. Nothing that is prepared changes."""


@runtime_checkable
class Rejecting(Protocol):
    """A committer that sets rows apart which its target will never take: see `Sink.rejects_to`."""

    @property
    def rejected_schema(self) -> pa.Schema:
        """
        The columns of rejected rows, with which the sink that gets them is checked. One column,
        `row`, is the row itself as text.
        """

    def rejected(self, epoch: EpochNumber) -> pa.Table | None:
        """
        The rows that the last `rehearse` set apart, each with the reason; None where there are
        none.

        Asked once a rehearsal has passed. By then it is durable that they are set apart: a
        commit of these receipts, from any process, leaves out exactly these rows.
        """


@runtime_checkable
class Confirming(Protocol):
    """A committer, or a shared transaction, that holds a rehearsal open and may lose it."""

    def confirm(self, epoch: EpochNumber, receipts: Any) -> None:
        """
        Ask whether what `rehearse` applied is still held, and apply it again where it is lost.
        Called just before the decision, however long gates and other sinks took.

        Raises what `rehearse` does: then there is no decision, and the epoch is aborted.
        """


@runtime_checkable
class LimitsAttempts(Protocol):
    """A committer whose target has room for a fixed number of attempts (`SinkBase.writers_max`)."""

    def has_leftovers(self) -> bool:
        """
        Whether attempts of earlier epochs take up room. Called before each epoch begins; a sweep
        follows where it is so, whenever the last one was.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """How much a target keeps of prepared rows."""

    used_bytes: int
    limit_bytes: int | None = None
    """Beyond it rows are prepared only once others were removed. None: there is no limit."""


@runtime_checkable
class MeasuresRoom(Protocol):
    """A committer that knows how many bytes of prepared rows its target keeps."""

    def room(self) -> Room | None:
        """Called in every sweep, for metrics. None where nothing is kept that has a size."""


@runtime_checkable
class Identified(Protocol):
    """A committer whose server can say which one it is, and how far its history goes."""

    def server(self) -> Mapping[str, Json]:
        """
        The server's identity, and the end of its history. Called at every start, and kept in the
        log with the claim. Without an answer, as rights may be missing, a part is left out.
        """

    def server_change(self, before: Mapping[str, Json]) -> str:
        """
        What it means that the server is another than `before`, an earlier `server()` of it; empty
        where it is the same, and its history goes on from there. Called by `epochal doctor`.
        """


class SharedTransaction(Protocol):
    """
    Several sinks of a pipeline whose rows become visible by one act of their target.

    Given for some or all of the sinks that share it, in any order; it works in the order in which
    they are declared. The promises are those of `Committer.rehearse` and `Committer.commit`. What
    it holds open is given up when any of its committers aborts, begins or closes.
    """

    def rehearse(self, epoch: EpochNumber, receipts: Receipts) -> Deadline | None: ...

    def commit(self, epoch: EpochNumber, receipts: Receipts) -> None: ...


@runtime_checkable
class SharesTransaction(Protocol):
    """A committer that can share one transaction with others: see `Sink.transaction_key`."""

    def share(self, members: Sequence[Committer]) -> SharedTransaction:
        """
        Called once per start, on the first of `members`, all of one key, in order of declaration.

        Everything else is still asked of each by itself: proofs, listings, aborts.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWrite:
    """One job of the engine's own writer, as a committer asks for it."""

    handle: Handle
    """Of the job (I6): see `Identity.job_handle`."""
    format: str
    """As the engine names it."""
    folder: str
    """A URL. Of this job alone: nothing is there yet. With a `table`: that of the table."""
    is_listed: bool = False
    """
    Files stay where tasks have put them, under names of their own, and the engine lists those that
    count, see `EngineWritten.reports`: for stores that can't rename. Else they are moved into the
    folder when the job is committed.
    """
    partition_by: Sequence[str] = ()
    sort_by: Sequence[str] = ()
    """The order of rows within a task, partitions first: `SQL ASC NULLS FIRST`."""
    options: Mapping[str, str] = field(default_factory=dict)
    """Of the engine's writer."""
    select: Mapping[str, str] = field(default_factory=dict)
    """The columns to write, each as SQL over those of the rows; empty: the rows as they are."""
    required: Sequence[str] = ()
    """Columns of the rows without nulls: a row that has one is rejected, and fails the job."""
    keys: Sequence[str] = ()
    """
    Of several rows with the same values of these columns the highest by `order_by` is written.
    Where two are the highest, the job fails.
    """
    order_by: Sequence[str] = ()
    field_ids: Mapping[str, int] = field(default_factory=dict)
    """The number of each column in the files, and of each field of a struct, by its path."""
    table: str = ""
    """
    For a format that is written for a table: the table, or the instant of its timeline that the
    rows are written for, in the format's own words.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineWritten:
    """A job of the engine's own writer that succeeded."""

    handle: Handle
    schema: pa.Schema
    fingerprint: Fingerprint
    """Of the rows as the writer got them, each counted once however often its task ran."""
    files: int = 0
    """
    How many the attempts that count have written, by the writer's own statistics; 0 where a log
    lists them.
    """
    bytes: int = 0
    """The sizes of these files together, each as it was when its task closed it."""
    reports: Sequence[str] | None = None
    """
    What a writer, or its log, says of each file that counts, or of all in one text; None where
    their folder shows which do.
    """


@runtime_checkable
class EngineWrites(Protocol):
    """
    A committer whose rows the engine's own writer may prepare: one job writes the files of an epoch
    into a folder of its own, and no row is handed to a task's `Writer`.

        driver    engine_write ── the engine's job: write, commit of its tasks ── gather ── receipt

    The engine decides which attempts of the job's tasks count, and `gather` looks at what they left
    right after the job. A task of a job that failed or was cancelled may go on to write into the
    folder: what is there without a decision is listed by `in_doubt`, again and again (I5).
    """

    @property
    def engine_formats(self) -> Sequence[str]:
        """
        The formats of an `EngineWrite`, the best first: the first that the engine has is taken, and
        given to `engine_refusal` and `engine_write`.
        """

    @property
    def engine_location(self) -> str:
        """The URL below which every `EngineWrite` writes: whether the engine reaches it, too."""

    @property
    def tasks_refusal(self) -> str | None:
        """
        Why tasks can't prepare the rows; None where they can. Where the engine's writer can't
        either, or there is no engine, the start is refused with both reasons.
        """

    def engine_refusal(self, schema: pa.Schema | None, form: str) -> str | None:
        """
        Why rows of this schema must go to tasks; None where the engine's writer can prepare them.
        Without a schema: as far as that is known before the first row. Called on the driver, also
        by `Pipeline.check`.
        """

    def engine_write(self, handle: Handle, schema: pa.Schema, form: str) -> EngineWrite:
        """
        Get ready for a job. Called once per job, before it, on the driver.

        After it returns, what the job leaves behind is listed by `in_doubt`, whatever is killed.
        """

    def gather(self, written: EngineWritten) -> Receipt:
        """
        Make the rows of a job that succeeded durable. Called once, right after it, on the driver.

        Looks at every file: they must be as many as the writer says, of the same size, and hold the
        rows that it was given where a footer counts them. After it returns: no reader sees a row
        (I1), and no crash loses one.
        """


EngineAbility: TypeAlias = Callable[[str, str], Ability]
"""Whether the engine's own writer could write one sink's rows in a format to a URL, and why."""


class Sink(Protocol):
    """What a user declares. Picklable; opens nothing by itself; its repr shows no secret."""

    @property
    def name(self) -> SinkName:
        """Unique within a pipeline. Receipts and ledgers go by it."""

    @property
    def where(self) -> str | None:
        """A SQL condition: the rows this sink takes."""

    @property
    def select(self) -> Select:
        """SQL expressions or a function of the DataFrame: the columns this sink takes."""

    @property
    def output_modes(self) -> frozenset[str]:
        """Which of Spark's output modes (append, update, complete) this sink can honour."""

    @property
    def prepares_last(self) -> bool:
        """
        Whether prepared rows block others at the target until they are decided. Such a sink
        prepares after the others, and after the gates that don't ask about it.
        """

    @property
    def rejects_to(self) -> Sink | None:
        """
        Another sink, which gets the rows that this one's target refuses, in the same epoch and
        under the same decision. Its committer is then `Rejecting`.
        """

    @property
    def transaction_key(self) -> str | None:
        """
        Sinks of a pipeline with the same key, which holds no secret, become visible in one
        transaction, in the order of their declaration. Their committers are `SharesTransaction`.
        """

    def describe(self) -> Mapping[str, Json]:
        """Kind, target and mode for the log and the operator: never a secret."""

    def writer(self, task: Task) -> Writer:
        """Called once per attempt, where the rows are: see `Writer`."""

    def committer(self, identity: Identity, limits: Limits) -> Committer:
        """Called on the driver, once per start, and by tools that reach a target without Spark."""


def prepare_rows(sink: Sink, task: Task, batches: Iterable[pa.RecordBatch]) -> Receipt:
    """
    Write the rows of one attempt and prepare them; the writer is aborted where that fails.

    Every row that is prepared goes through this: in tasks, and on the driver those that a target
    rejects and those of small epochs.
    """
    writer = sink.writer(task)
    rows = 0
    try:
        for batch in batches:
            writer.write(batch)
            rows += batch.num_rows
        receipt = writer.prepare()
    except BaseException:
        with suppress(Exception):
            writer.abort()
        raise
    if receipt.rows != rows:
        raise InvariantBroken(
            f"sink {sink.name!r}: {rows} rows were written, and the receipt of {task.handle} "
            f"counts {receipt.rows}",
            "this is a defect of the sink; nothing was decided",
        )
    return receipt
