"""Staging: where the rows of attempts wait, durable and invisible, until their epoch is decided.

`OwnTables` gives each attempt a table, named by its handle. PostgreSQL recycles tables instead
(`sinks.postgres.slots`), MySQL and MariaDB those of small attempts (`sinks.mysql.slots`). Oracle
does not: slots rest on locks that are skipped and on what DDL and dumps wait for, and none of it
was ever run there.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, TypeVar

from epochal.errors import TryAgain
from epochal.kit.sql.client import Session
from epochal.kit.sql.dialect import OwnTablesDialect
from epochal.kit.sql.names import staging_name
from epochal.terms import Handle, Identity, InDoubt, Receipt, quantity

T = TypeVar("T")
_CLAIM_WAITS_S = (0.02, 0.1, 0.5)
"""Between two looks for a free slot, the last one again and again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """Something that a DBA is to make, with staging="fixed"."""

    what: str
    ddl: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotsInUse:
    """The slots of a fixed number that rows of one attempt could use."""

    place: str
    """The schema and the table that they are for, for people."""
    slots: int
    held: int
    """Those that hold an attempt, not decided yet or of a pipeline that does not run any more."""
    oldest_s: float

    def error(self) -> TryAgain:
        if not self.slots:
            return TryAgain(
                f"no slot in {self.place} has the columns of these rows",
                "the table was altered: the next start says what a DBA is to make",
            )
        return TryAgain(
            f"none of {quantity(self.slots, 'slot')} in {self.place} is free: "
            f"{self.held} hold attempts, the oldest for {self.oldest_s:.0f} s, and the others are "
            "in use",
            "more slots (slots=…, and `epochal staging` prints what a DBA is to make): all sinks "
            "that write to this table share them; attempts of dead pipelines are removed by "
            "`epochal drop`",
        )


def claim_in_time(
    claim: Callable[[], T | None], in_use: Callable[[], SlotsInUse], *, wait_max_s: float
) -> T:
    """
    In a task: claim one of a fixed number of slots. Copies of tasks that are about to be killed,
    and attempts that fail, let theirs go: so one that finds none waits for a while.
    """
    ends_s, waits = time.monotonic() + wait_max_s, iter(_CLAIM_WAITS_S)
    while True:
        claimed = claim()
        if claimed is not None:
            return claimed
        used = in_use()
        if not used.slots or time.monotonic() >= ends_s:
            raise used.error()
        time.sleep(next(waits, _CLAIM_WAITS_S[-1]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The staged rows of one attempt, which nobody else changes while a transaction holds them."""

    handle: Handle
    table: str
    rows_apart: int = 0
    """How many rows were set apart since they were staged, where that is counted."""
    shape: str = ""
    """What stands for its columns, where tables are recycled."""
    file: int = 0
    """Another one where rows have got other places, if the database ever moves rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Taking:
    """Staged attempts that a transaction is about to take, by what their receipts say."""

    held: Sequence[Held]
    changes: Sequence[tuple[str, int]]
    """Statements that take them, each with the rows that it changes: others were there before."""


class Staging(ABC):
    """The driver's side. Everything runs in a session that the caller ends or gives back."""

    schema: str
    counts_rows_apart: ClassVar[bool] = False
    """Whether it is known how many rows were set apart, in any process."""

    @abstractmethod
    def listed(self, session: Session, identity: Identity) -> Sequence[InDoubt]:
        """Every staged attempt of this sink, found by its handle alone (I6)."""

    @abstractmethod
    def is_listed(self, session: Session, handle: Handle) -> bool: ...

    @abstractmethod
    def hold(self, session: Session, handles: Collection[Handle]) -> Mapping[Handle, Held]:
        """Those of these attempts that are staged, held until the transaction ends."""

    def take(self, session: Session, handles: Collection[Handle]) -> Mapping[Handle, Held]:
        """The same for the transaction that applies their rows."""
        return self.hold(session, handles)

    def taking(self, receipts: Sequence[Receipt], shape: str) -> Taking | None:  # noqa: ARG002
        """
        How to take attempts of this shape without asking where they are; None where their receipts
        do not say it.
        """
        return None

    def note_apart(self, session: Session, table: str, rows: int) -> None:
        """Count rows that were deleted from a table that is held."""

    @abstractmethod
    def throw_away(self, session: Session, handles: Collection[Handle]) -> None:
        """Remove those of these attempts that are still staged."""

    def is_clearing_due(self, receipts: Sequence[Receipt]) -> bool:  # noqa: ARG002
        """Asked after each COMMIT, with the receipts whose rows were applied."""
        return False

    def clear_up(self, session: Session) -> None:
        """Make room where that is due and nobody is in the way: it may fail, and comes again."""

    def size(self, session: Session) -> int:
        """
        The bytes of all staging tables of the table. Only asked where they are limited
        (`TableSink.staging_limit_bytes`).
        """
        raise NotImplementedError

    def remove_unused(self, session: Session, *, is_dry_run: bool) -> int:  # noqa: ARG002
        """Remove tables that no attempt uses; how many there are."""
        return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnTables(Staging):
    """
    A table for each attempt, where DDL commits by itself: tables are dropped after the COMMIT, and
    one that the ledger proves committed is only a leftover.
    """

    schema: str
    dialect: OwnTablesDialect

    def listed(self, session: Session, identity: Identity) -> Sequence[InDoubt]:
        return self.dialect.staged(session, self.schema, identity)

    def is_listed(self, session: Session, handle: Handle) -> bool:
        return bool(self.dialect.present(session, self.schema, [staging_name(handle)]))

    def hold(self, session: Session, handles: Collection[Handle]) -> Mapping[Handle, Held]:
        names = {staging_name(handle): handle for handle in handles}
        there = self.dialect.present(session, self.schema, names)
        return {
            handle: Held(handle=handle, table=name)
            for name, handle in names.items()
            if name in there
        }

    def throw_away(self, session: Session, handles: Collection[Handle]) -> None:
        names = [staging_name(handle) for handle in handles]
        there = self.dialect.present(session, self.schema, names)
        if there:
            self.dialect.drop(session, self.schema, sorted(there))
