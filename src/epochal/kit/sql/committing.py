"""What committers of all strategies share, where DDL commits by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TypeVar

import pyarrow as pa

from epochal.contract import Dropped, Limits, Operable, Recount
from epochal.kit.sql.auditing import forget, recount, recountable
from epochal.kit.sql.declaring import TableSink
from epochal.kit.sql.dialect import Dialect, Pool, Session
from epochal.kit.sql.ledger import Ledger
from epochal.terms import Ability, EpochNumber, Identity, Json, Mark

T = TypeVar("T")


def abilities(sink: TableSink) -> list[Ability]:
    """What follows from the strategy, on every database."""
    is_staged = sink.strategy == "staged"
    return [
        Ability(
            name="whole epochs",
            granted=is_staged,
            because="one transaction makes an epoch visible"
            if is_staged
            else "each task's rows become visible by themselves, within milliseconds",
        ),
        Ability(
            name="proof",
            granted=True,
            because=f"a ledger row in {sink.meta} is written with the rows",
        ),
    ]


def handout(table: Json, identity: Identity) -> Json:
    """What tasks must know: the table, and under whose name they write."""
    return {"table": table, "pipeline": identity.pipeline, "run": identity.run}


class Checker(ABC):
    """Asks a server what it can promise, and makes what is missing once the start is sure."""

    is_ready: bool = False

    @abstractmethod
    def check(self, session: Session, schema: pa.Schema | None) -> list[Ability]: ...

    @abstractmethod
    def make_ready(self, session: Session) -> None:
        """Our schema, and the table or columns where that was asked. May commit by itself."""

    @abstractmethod
    def handout(self, session: Session) -> Json:
        """What tasks must know of the table."""

    @abstractmethod
    def columns(self, session: Session) -> dict[str, bool]:
        """The columns of the table, and whether each is NOT NULL."""


class Committing(Operable):
    """What all strategies share: the pool, the ledger, the checks."""

    def __init__(
        self,
        *,
        sink: TableSink,
        identity: Identity,
        limits: Limits,
        dialect: Dialect,
        pool: Pool,
        checker: Checker,
    ) -> None:
        self._sink = sink
        self._identity = identity
        self._limits = limits
        self._dialect = dialect
        self._pool = pool
        self._checker = checker
        self._ledger = Ledger(schema=sink.meta, identity=identity, dialect=dialect)
        self._handout: Json = None

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        return self._ask("check", lambda session: self._checker.check(session, schema))

    def newest(self) -> Sequence[Mark]:
        return self._ask("read the ledger", self._ledger.newest, missing=[])

    def prune(self, below: EpochNumber) -> None:
        self._in_transaction(
            "prune the ledger",
            lambda session: self._ledger.prune(session, below),
            missing=0,
        )

    def recount(self) -> Recount:
        if because := recountable(self._sink.write_mode):
            return Recount(rows=None, because=because)
        table = self._dialect.quote(*self._sink.table_name.parts)
        absent = Recount(rows=None, because=f"there is no table {self._sink.table}")
        return self._ask(
            "count rows", lambda ask: recount(ask, table, self._sink.table), missing=absent
        )

    def drop(self, *, is_dry_run: bool) -> Dropped:
        return self._in_transaction(
            "forget",
            lambda session: forget(session, self._ledger, is_dry_run=is_dry_run),
            missing=Dropped(),
        )

    def close(self) -> None:
        self._pool.close()

    def _doing(self, verb: str) -> str:
        return f"sink {self._identity.sink!r} on {self._sink.place}: {verb}"

    def _get_ready(self) -> Json:
        """Make what is missing, once a start; what tasks must know of the table."""
        if not self._checker.is_ready or self._handout is None:
            self._ask("make what is missing", self._checker.make_ready)
            self._handout = self._ask("read the table", self._checker.handout)
            self._checker.is_ready = True
        return self._handout

    def _forget(self) -> None:
        """After an epoch that failed the table is looked at again: perhaps it was altered."""
        self._checker.is_ready = False

    def _ask(self, verb: str, ask: Callable[[Session], T], *, missing: T | None = None) -> T:
        """Ask on the primary; a schema that nobody made yet holds nothing."""
        session = self._pool.take()
        try:
            return ask(session)
        except self._dialect.errors as error:
            if missing is not None and self._dialect.is_missing(error):
                return missing
            raise self._dialect.sort(error, self._doing(verb)) from error
        finally:
            self._pool.give_back(session)

    def _in_transaction(
        self, verb: str, work: Callable[[Session], T], *, missing: T | None = None
    ) -> T:
        """A short transaction, committed at its end."""

        def whole(session: Session) -> T:
            session.begin()
            try:
                done = work(session)
            except BaseException:
                session.roll_back()
                raise
            with self._dialect.sorting(self._doing(verb), is_commit=True):
                session.commit()
            return done

        return self._ask(verb, whole, missing=missing)
