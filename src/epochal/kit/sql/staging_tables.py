"""Staging: where the rows of attempts wait, durable and invisible, until their epoch is decided.

`OwnTables` gives each attempt a table, named by its handle. PostgreSQL recycles tables instead
(`sinks.postgres.slots`), MySQL and MariaDB those of small attempts (`sinks.mysql.slots`). Oracle
does not: slots rest on locks that are skipped and on what DDL and dumps wait for, and none of it
was ever run there.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from epochal.kit.sql.client import Session
from epochal.kit.sql.dialect import OwnTablesDialect
from epochal.kit.sql.names import staging_name
from epochal.terms import Handle, Identity, InDoubt, Receipt


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The staged rows of one attempt, which nobody else changes while a transaction holds them."""

    handle: Handle
    table: str
    rows_apart: int = 0
    """How many rows were set apart since they were staged, where that is counted."""
    shape: str = ""
    """What stands for its columns, where tables are recycled."""


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
