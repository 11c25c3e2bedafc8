"""Base classes of a sink and of its committer, with a default for everything that can have one.

Also what a sink may add: `Promises` for the docs, `Shape` for the engine, and `Operable`, the
operator's commands.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

from epochal.contract import (
    APPEND_ONLY,
    Begin,
    Committer,
    Deadline,
    Rows,
    Select,
    Sink,
    Task,
    Writer,
)
from epochal.errors import Misconfigured
from epochal.terms import (
    Ability,
    EpochNumber,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Proof,
    Receipt,
    SinkName,
)

if TYPE_CHECKING:
    import pyarrow as pa


Cannot: TypeAlias = Literal[
    "refuse rows",
    "be unreachable",
    "be misconfigured",
    "bound memory",
    "reach other processes",
    "name lost rows",
]
"""
refuse rows             no row that fits the schema is refused by its content
be unreachable          there is nothing between the sink and its target that could fail
be misconfigured        there is nothing that `check` could find
bound memory            a writer's memory grows with its rows
reach other processes   only the process that declared the sink reaches the target
name lost rows          a lost attempt looks like one that was committed long ago
"""


def cast_hint(column: str, kind: str) -> str:
    """The way to cast one column of a sink: beside `"*"` a cast makes a second one of its name."""
    return f'select=lambda df: df.withColumn("{column}", df["{column}"].cast("{kind}"))'


@dataclass(frozen=True, slots=True, kw_only=True)
class Promises:
    """
    What a sink, in one of its strategies, promises its readers, and what it can't do, as data.

    Each of our sinks declares its `PROMISES` beside its class. The tables of
    docs/concepts/promises.md are made from them, and the conformance suite leaves out what is in
    `cannot`, for the reason that is given there.
    """

    sink: str
    """As the docs name it."""
    at_one_instant: str
    """How much becomes visible at once."""
    readers_must: str = "nothing"
    proof: str
    """What the ledger is."""
    append: str = "yes"
    by_key: str = ""
    deletes: str = ""
    output_modes: str = "append"
    limits: Sequence[str] = ()
    cannot: Mapping[Cannot, str] = field(default_factory=dict)
    """What the conformance suite does not ask for, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapedColumn:
    """A column that the engine makes for a sink's tasks."""

    name: str
    sql: str
    option: str
    """The sink's option that it comes from, as its user wrote it, for messages: `key='id'`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the engine makes of a sink's rows, after `where` and `select`, before tasks get them."""

    select: Sequence[ShapedColumn]
    """All columns that cross to the tasks."""
    cluster_by: str | None = None
    """An expression whose equal rows must meet in one task."""
    order_by: Sequence[str] = ()
    """How each task's rows are sorted."""


@runtime_checkable
class Shaped(Protocol):
    """A sink that has a part of its work done by the engine. Where none is, rows come whole."""

    @property
    def shape(self) -> Shape: ...


@dataclass(frozen=True, kw_only=True)
class SinkBase(ABC):
    """
    A sink's declaration. Derive a frozen dataclass from it; its fields are the sink's options, in
    Python and in YAML. Set `kind` and define `target`, `writer` and `committer`.
    """

    kind: ClassVar[str]
    """What the sink is called in YAML, in the log and in messages."""
    writes_on_driver: ClassVar[bool] = False
    """
    Whether `writer` may also be called in the driver's process, for epochs of few rows (see
    `Limits.driver_rows_max`): it runs no code of its user, and its target is in reach there.
    """
    moves_rows: ClassVar[bool] = False
    """Whether the jobs that write its rows move them between partitions of Spark."""

    name: SinkName = SinkName("")
    """Unique within a pipeline; kind and target where it is not given."""
    where: str | None = None
    """A SQL condition: the rows this sink takes."""
    select: Select = None
    """SQL expressions or a function of the DataFrame: the columns this sink takes."""

    def __post_init__(self) -> None:
        if isinstance(self.select, str):
            raise Misconfigured(
                f"{self.kind}: select={self.select!r} is one string, not a list of expressions",
                f"select=[{self.select!r}]",
            )
        if not self.name:
            object.__setattr__(self, "name", SinkName(f"{self.kind}:{self.target}"))

    @property
    @abstractmethod
    def target(self) -> str:
        """Where the rows go, for names and messages. Never a secret."""

    @abstractmethod
    def writer(self, task: Task) -> Writer:
        """See `Sink.writer`."""

    @abstractmethod
    def committer(self, identity: Identity, limits: Limits) -> Committer:
        """See `Sink.committer`."""

    def describe(self) -> Mapping[str, Json]:
        return {"kind": self.kind, "target": self.target}

    @property
    def output_modes(self) -> frozenset[str]:
        return APPEND_ONLY

    @property
    def prepares_last(self) -> bool:
        return False

    @property
    def rejects_to(self) -> Sink | None:
        return None

    @property
    def transaction_key(self) -> str | None:
        return None

    @property
    def writers_max(self) -> int | None:
        """
        How many tasks of an epoch may prepare rows for this sink: the engine puts further
        partitions together. None: any number. Where it is given, the committer is `LimitsAttempts`.
        """
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Recount:
    """What readers of a target see of one sink."""

    rows: int | None
    """None where it can't be counted."""
    because: str
    """What was counted, or why nothing was."""
    epochs: Mapping[EpochNumber, int] | None = None
    """The same by epoch, where the target keeps the epoch of a row."""
    is_alone: bool = True
    """False where rows of other writers can't be distinguished and are counted in."""
    faults: Sequence[str] = ()
    """What is wrong by itself: a file that a manifest names and that is not there, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    removed: Sequence[str] = ()
    """What was removed, or would be, one text per thing."""
    kept: str = ""
    """What stays and why; empty where nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Compacted:
    """What became of a target's small files."""

    files_before: int = 0
    files_after: int = 0
    """Files in the place of those; before a compaction, about as many."""
    because: str = ""
    """Why none was compacted; empty where some were, or where none is small."""


@runtime_checkable
class Operable(Protocol):
    """
    A committer that answers the operator's commands (`verify`, `drop`, `compact`, `doctor`).
    Optional: derive from this class and define what the target can do; the defaults say that the
    rest is not available. Nothing here takes part in an epoch.
    """

    def recount(self) -> Recount:
        """
        Count what readers see of this sink, from the rows themselves and not from a ledger.

        Called at any time, also while a driver works. Changes nothing.
        """
        return Recount(rows=None, because="this kind of target can't be recounted")

    def reread(self, engine: Any) -> Rows:  # noqa: ARG002  a default has no use for it
        """
        All visible rows of this sink, with the columns and types that it was given: a Spark
        session gives a DataFrame whose row hashes sum up to those of the receipts. None where the
        target does not give rows back as they were written.
        """
        return None

    def drop(self, *, is_dry_run: bool) -> Dropped:  # noqa: ARG002  a default removes nothing
        """
        Make the target forget this sink of this uid: ledger rows, ids, folders. Rows stay.

        Called for a pipeline that is dead for good, when nothing of it is in doubt any more. May
        be repeated.
        """
        return Dropped(kept="what this kind of target remembers of old epochs")

    def compact(self, *, target_bytes: int, is_dry_run: bool) -> Compacted:  # noqa: ARG002
        """
        Put few large files in the place of many small ones, by one commit of the target's own, so
        that every reader sees the same rows before and after.

        Called at any time, also while a driver works, on a committer of its own. Looks at nothing
        but what is visible. May be repeated.
        """
        return Compacted(because="this kind of target has no files that could be compacted")

    def server_time(self) -> float | None:
        """Seconds since 1970 by the target's clock; None where it has none to read."""
        return None

    def missing_ddl(self, schema: pa.Schema) -> Sequence[str]:  # noqa: ARG002
        """
        The statements by which somebody else makes what rows of this schema need at the target,
        where the sink is not to make it itself. Called by `epochal staging`. Changes nothing.
        """
        return []


class CommitterBase(Operable, ABC):
    """
    A committer without the verbs that every target must define for itself.

    `rehearse` and `check` have no default on purpose: an empty one breaks a promise that nothing
    else keeps (I3). The operator's verbs (`recount`, `reread`, `drop`, `compact`,
    `server_time`) are optional.
    """

    @abstractmethod
    def check(self, schema: pa.Schema | None) -> Sequence[Ability]: ...

    @abstractmethod
    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Deadline | None: ...

    @abstractmethod
    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None: ...

    @abstractmethod
    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None: ...

    @abstractmethod
    def in_doubt(self) -> Sequence[InDoubt]: ...

    @abstractmethod
    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof: ...

    @abstractmethod
    def newest(self) -> Sequence[Mark] | None: ...

    def begin(self, begin: Begin) -> Json:  # noqa: ARG002  most targets need no preparation
        return None

    def prune(self, below: EpochNumber) -> None:
        """Keep all proofs."""

    def close(self) -> None:
        """Nothing is kept open."""
