"""What differs between databases whose DDL commits by itself (MySQL, Oracle): behind one face.

Statements travel as plain text with every name quoted and every value written as a literal. No row
of a user passes through here: rows are loaded by a task and moved by the server.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from epochal.kit.sql.faults import Faults
from epochal.kit.sql.names import NameRule
from epochal.terms import Identity, InDoubt

if TYPE_CHECKING:
    from epochal.kit.sql.apply import Apply


UNFIT = ("epochal_row", "epochal_why")
"""
Columns of a staging table whose sink sends refused rows elsewhere: a row that its own columns could
not hold, as text, and why not. Such rows stand below 0 in the order in which rows came.
"""


class Session(Protocol):
    """One connection of the driver's. What the database's library throws passes through."""

    def execute(self, statement: str) -> int:
        """Run it; how many rows it touched."""

    def query(self, statement: str) -> list[tuple[Any, ...]]: ...

    def begin(self, *, lock_wait_s: float | None = None) -> None:
        """Begin a transaction, READ COMMITTED, with this patience for locks."""

    def wait_for_locks(self, seconds: float | None = None) -> None:
        """Change the patience, until the session is given back; None is the declared one."""

    def commit(self) -> None: ...

    def roll_back(self) -> None:
        """End the transaction, whatever its state; a connection that can't do it is closed."""


class Pool(Protocol):
    def take(self) -> Session: ...

    def give_back(self, session: Session) -> None: ...

    def close(self) -> None: ...


class Dialect(Faults):
    """One database's words, and what its errors mean."""

    names: ClassVar[NameRule]
    ledger: ClassVar[str] = "ledger"
    at: ClassVar[str]
    """The column of a staging table that says in which order its rows came."""

    def quote(self, *parts: str) -> str:
        return self.names.quote(*parts)

    @abstractmethod
    def literal(self, value: str | int | None) -> str:
        """A value as it stands in a statement."""

    def descending(self, expression: str) -> str:
        """Highest first, nulls last."""
        return f"{expression} DESC"

    @abstractmethod
    def create_ledger(self, schema: str) -> list[str]:
        """Statements that make the ledger; run only where it is missing."""

    @abstractmethod
    def upsert(self, apply: Apply) -> str: ...

    @abstractmethod
    def delete(self, apply: Apply, *, marked_only: bool) -> str: ...

    @abstractmethod
    def first(self, query: str, count: int) -> str:
        """The same query, cut to so many rows."""

    # Staging tables

    @abstractmethod
    def staged(self, session: Session, schema: str, identity: Identity) -> list[InDoubt]: ...

    @abstractmethod
    def present(self, session: Session, schema: str, tables: Collection[str]) -> frozenset[str]: ...

    @abstractmethod
    def columns(self, session: Session, schema: str, table: str) -> list[str]:
        """The columns of a staging table, in their order."""

    @abstractmethod
    def drop(self, session: Session, schema: str, tables: Sequence[str]) -> None:
        """Drop those that are there. Commits by itself."""

    def end_older_sessions(self, session: Session, identity: Identity) -> None:
        """End transactions that an earlier driver of this sink left open, where that may be done.

        Nothing is lost: what was decided is applied again from staging, by whoever comes (I7).
        """

    # Prepared transactions

    @abstractmethod
    def prepared(self, session: Session) -> list[str]:
        """The names of all that are prepared, whoever did it."""

    @abstractmethod
    def end_prepared(self, session: Session, name: str, *, is_commit: bool) -> None:
        """Commit or roll back one that this session did not prepare."""
