"""Carries decisions out, the staged way, where DDL commits by itself.

`rehearse` applies the staging tables to the table and writes the ledger, and leaves the transaction
open; `commit` commits it, and drops the staging tables after that, as dropping them would commit.
Where the transaction was lost, or another process commits, the same is applied again from the
staging tables, unless the ledger shows that it is done: a staging table that the ledger proves
committed is only litter, and goes with the next commit of its epoch.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

import pyarrow as pa

from epochal.contract import Dropped, Limits, Recount
from epochal.errors import Fenced, PreparedLost, Refused, TryAgain
from epochal.sinks.sql.apply import Apply, Mapped, Source
from epochal.sinks.sql.auditing import forget, recount, recountable
from epochal.sinks.sql.columns import columns_of
from epochal.sinks.sql.declaring import TableSink
from epochal.sinks.sql.dialect import Dialect, Pool, Session
from epochal.sinks.sql.ledger import Ledger
from epochal.sinks.sql.names import staging_name
from epochal.sinks.sql.search import Rejected, Search, refusal
from epochal.terms import (
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Mark,
    Proof,
    Receipt,
)

T = TypeVar("T")
_CLAIM_WAIT_S = 2.0
"""How long to wait for another driver's open transaction before it is looked for and ended."""


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


class Committing:
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
            lambda session: session.execute(self._ledger.prune(below)),
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

    def _insist(self, attempt: Callable[[], T]) -> T:
        """Repeat what the server marks as transient: a new transaction has no memory of the old."""
        for wait_ms in self._limits.retry_backoff_ms:
            try:
                return attempt()
            except TryAgain:
                time.sleep(wait_ms / 1000)
        return attempt()


@dataclass(frozen=True, slots=True)
class _Open:
    """A rehearsed epoch: everything is done but the COMMIT."""

    epoch: EpochNumber
    handles: frozenset[Handle]
    session: Session


class StagedCommitter(Committing):
    _open: _Open | None = None

    def begin(self, epoch: EpochNumber) -> Json:  # noqa: ARG002
        self._give_up()
        return self._get_ready()

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._give_up()
        self._insist(lambda: self._rehearse(epoch, receipts))

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        handles = frozenset(receipt.handle for receipt in receipts)
        open_ = self._open
        if open_ is None or (open_.epoch, open_.handles) != (epoch, handles):
            self._give_up()
            self._get_ready()
            open_ = self._insist(lambda: self._apply(epoch, receipts))
        self._open = None
        if open_ is not None:
            try:
                with self._dialect.sorting(self._doing(f"commit epoch {epoch}"), is_commit=True):
                    open_.session.commit()
            finally:
                self._pool.give_back(open_.session)
        self._drop(f"clear up after epoch {epoch}", receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._give_up()
        self._forget()
        self._drop(f"abort epoch {epoch}", receipts)

    def in_doubt(self) -> Sequence[InDoubt]:
        return self._ask(
            "list what is staged",
            lambda session: self._dialect.staged(session, self._sink.meta, self._identity),
            missing=[],
        )

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:  # noqa: ARG002
        def ask(session: Session) -> Proof:
            name = staging_name(receipt.handle)
            is_there = self._dialect.present(session, self._sink.meta, [name])
            proof = self._ledger.proof(session, receipt.handle)
            # A task without rows leaves no table: that there is none proves nothing.
            is_open = is_there or not receipt.token.get("staged", True)
            return Proof.UNKNOWN if proof is Proof.ABORTED and is_open else proof

        return self._ask("ask for proof", ask, missing=Proof.ABORTED)

    def close(self) -> None:
        self._give_up()
        super().close()

    # The one transaction

    def _give_up(self) -> None:
        """Let go of a rehearsed transaction that will not be committed."""
        if self._open is not None:
            self._let_go(self._open.session)
            self._open = None

    def _let_go(self, session: Session) -> None:
        session.roll_back()
        self._pool.give_back(session)

    def _rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        try:
            self._open = self._apply(epoch, receipts)
        except PreparedLost as error:
            raise TryAgain(
                f"{error.message}; no decision was made", "the epoch is tried again whole"
            ) from error
        if self._open is None:
            raise self._committed_elsewhere(epoch)

    def _committed_elsewhere(self, epoch: EpochNumber) -> Fenced | Refused:
        generation = self._ask(
            "read the ledger", lambda session: self._ledger.holds(session, epoch) or 0, missing=0
        )
        fact = f"epoch {epoch} is being written, and {self._sink.table} proves it committed"
        if generation > self._identity.generation:
            return Fenced(
                f"{fact} by generation {generation}; this driver is {self._identity.generation}",
                "another driver has taken this checkpoint over: leave this one stopped",
            )
        return Refused(
            f"{fact} already: the epoch log is older than the table",
            "the log or the checkpoint was restored from a backup: start with the newer one, or "
            "with a run= of its own",
        )

    def _apply(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> _Open | None:
        """Everything but COMMIT, in a new transaction; None where it is committed already."""
        session = self._pool.take()
        try:
            if self._applied(session, epoch, receipts):
                return _Open(epoch, frozenset(one.handle for one in receipts), session)
        except self._dialect.errors as error:
            self._let_go(session)
            raise self._explained(epoch, receipts, error) from error
        except BaseException:
            self._let_go(session)
            raise
        self._let_go(session)
        return None

    def _applied(self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]) -> bool:
        session.begin(lock_wait_s=_CLAIM_WAIT_S)
        rows = sum(receipt.rows for receipt in receipts)
        if not self._ledger.claim_epoch(session, epoch, rows):
            return False
        session.wait_for_locks()
        tables = self._staged(session, epoch, receipts)
        if tables:
            self._read_apply(session, tables).run(session, epoch)
        for statement in self._ledger.record(receipts):
            session.execute(statement)
        return True

    def _read_apply(self, session: Session, tables: dict[str, int]) -> Apply:
        """What is to be done, by what the catalog says now: staging tables describe themselves."""
        sink, dialect = self._sink, self._dialect
        there = self._checker.columns(session)
        known = dialect.columns(session, sink.meta, next(iter(tables)))
        fields = [name for name in known if name != dialect.at]
        wanted = columns_of(fields, there, sink.column_map, sink.write_mode)
        return Apply(
            dialect=dialect,
            mode=sink.write_mode,
            target=dialect.quote(*sink.table_name.parts),
            mapped=[
                Mapped(field=name, column=column, is_not_null=there.get(column, False))
                for name, column in wanted.items()
            ],
            sources=[
                Source(schema=sink.meta, table=name, part=part) for name, part in tables.items()
            ],
        )

    def _staged(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> dict[str, int]:
        """The staging tables of these receipts, with their partitions."""
        wanted = {
            staging_name(receipt.handle): receipt
            for receipt in receipts
            if receipt.token.get("staged", True)
        }
        there = self._dialect.present(session, self._sink.meta, wanted)
        lost = tuple(str(wanted[name].handle) for name in wanted if name not in there)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: {len(lost)} of {len(receipts)} staging tables are not in "
                f"{self._sink.meta}, and the ledger does not prove them committed",
                "somebody dropped them, or the server was restored from a backup",
                handles=lost,
            )
        return {name: receipt.handle.partition for name, receipt in wanted.items()}

    def _drop(self, verb: str, receipts: Sequence[Receipt]) -> None:
        tables = [staging_name(receipt.handle) for receipt in receipts]
        if not tables:
            return

        def drop(session: Session) -> bool:
            there = self._dialect.present(session, self._sink.meta, tables)
            if there:
                # A task that still writes to it is asked after later, not waited for.
                session.wait_for_locks(_CLAIM_WAIT_S)
                try:
                    self._dialect.drop(session, self._sink.meta, sorted(there))
                finally:
                    with suppress(*self._dialect.errors):
                        session.wait_for_locks()
            return True

        def drop_or_end_the_holder() -> None:
            try:
                self._ask(verb, drop, missing=True)
            except TryAgain as error:
                self._end_older_sessions(error.__cause__)
                raise

        self._insist(drop_or_end_the_holder)

    # Trouble

    def _explained(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], error: Exception
    ) -> Exception:
        """Why an epoch could not be applied; a zombie that stood in the way is ended."""
        self._end_older_sessions(error)
        if self._dialect.is_data_error(error):
            found = self._ask("find refused rows", lambda one: self._search(one, epoch, receipts))
            return refusal(self._sink.table, epoch, found, self._dialect.told(error))
        return self._dialect.sort(error, self._doing(f"apply epoch {epoch}"))

    def _end_older_sessions(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and self._dialect.is_lock_wait(error):
            session = self._pool.take()
            with suppress(*self._dialect.errors):
                self._dialect.end_older_sessions(session, self._identity)
            self._pool.give_back(session)

    def _search(
        self, session: Session, epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> list[Rejected]:
        """In a transaction that is thrown away."""
        session.begin()
        try:
            tables = self._staged(session, epoch, receipts)
            return Search(session, self._read_apply(session, tables), limit=1).run()
        finally:
            session.roll_back()
