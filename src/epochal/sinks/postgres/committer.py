"""Carries decisions out, the staged way: one transaction an epoch (see `transaction`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import pyarrow as pa

from epochal.contract import Begin, Dropped, Limits, Operable, Recount
from epochal.errors import Fenced, OutcomeUnknown, Refused, TryAgain
from epochal.kit.sql.auditing import recountable
from epochal.kit.sql.insisting import HOLDER_WAIT_S, insist
from epochal.kit.sql.names import staging_name
from epochal.kit.sql.receipts import proven
from epochal.kit.sql.rejects import REJECTED, SetApart, rows_of
from epochal.kit.sql.staging import committed_elsewhere, staged_tables
from epochal.sinks.postgres import meta
from epochal.sinks.postgres.applying import apply_rows, read_apply
from epochal.sinks.postgres.auditing import forget, recount, server_time
from epochal.sinks.postgres.checking import Checker
from epochal.sinks.postgres.connecting import Pool, Server, driver_name
from epochal.sinks.postgres.ledger import Ledger
from epochal.sinks.postgres.rejects import removal
from epochal.sinks.postgres.sorting import is_missing, sorted_error, sorting
from epochal.sinks.postgres.transaction import Transaction
from epochal.terms import (
    Ability,
    EpochNumber,
    Identity,
    InDoubt,
    Json,
    Mark,
    Proof,
    Receipt,
)

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres

T = TypeVar("T")


class Committing(Operable):
    """What both strategies share: the pool, the ledger, the checks."""

    def __init__(self, sink: Postgres, identity: Identity, limits: Limits) -> None:
        self.sink = sink
        self.identity = identity
        self._limits = limits
        self.pool = Pool(sink.server, driver_name(identity))
        self._ledger = Ledger(schema=sink.meta_schema, identity=identity)
        self._checker = Checker(sink, self._ledger)

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        with self.pool.connection() as connection, sorting(self.doing("check")):
            return self._checker.check(connection, schema)

    def newest(self) -> Sequence[Mark]:
        return self._read("read the ledger", self._ledger.newest, missing=[])

    def prune(self, below: EpochNumber) -> None:
        self._read(
            "prune the ledger",
            lambda connection: connection.execute(self._ledger.prune(below)),
            missing=None,
        )

    def recount(self) -> Recount:
        if because := recountable(self.sink.write_mode):
            return Recount(rows=None, because=because)
        absent = Recount(rows=None, because=f"there is no table {self.sink.table}")
        return self._read("count rows", lambda ask: recount(ask, self.sink), missing=absent)

    def drop(self, *, is_dry_run: bool) -> Dropped:
        return self._read(
            "forget",
            lambda ask: forget(ask, self._ledger, is_dry_run=is_dry_run),
            missing=Dropped(),
        )

    def server_time(self) -> float:
        return self._read("ask for the time", server_time, missing=0.0)

    def doing(self, verb: str) -> str:
        return f"sink {self.identity.sink!r} on {self.sink.server.place}: {verb}"

    def _get_ready(self) -> None:
        """Make what is missing, once a start: our schema, and the table or columns if asked to."""
        if self._checker.is_ready:
            return
        with self.pool.transaction(self.doing("make what is missing")) as connection:
            self._checker.make_ready(connection)
        self._checker.is_ready = True

    def _read(self, verb: str, ask: Callable[[psycopg.Connection[Any]], T], *, missing: T) -> T:
        """Ask on the primary; a schema that nobody made yet holds nothing."""
        with self.pool.connection() as connection:
            try:
                return ask(connection)
            except psycopg.Error as error:
                if is_missing(error):
                    return missing
                raise sorted_error(error, self.doing(verb)) from error


class StagedCommitter(Committing):
    def __init__(self, sink: Postgres, identity: Identity, limits: Limits) -> None:
        super().__init__(sink, identity, limits)
        self.apart = SetApart(sink.table, sink.rejects_max)
        self._transaction = Transaction(limits)
        self._transaction.add(self)

    def begin(self, begin: Begin) -> Json:  # noqa: ARG002
        self._transaction.give_up()
        self._get_ready()
        return None

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._transaction.rehearse(epoch, {self.identity.sink: receipts})

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._transaction.commit(epoch, {self.identity.sink: receipts})

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._transaction.give_up()
        self._checker.is_ready = False
        tables = [staging_name(receipt.handle) for receipt in receipts]
        if tables:
            insist(lambda: self._drop(self.doing(f"abort epoch {epoch}"), tables), self._limits)

    def _drop(self, doing: str, tables: Sequence[str]) -> None:
        """An open rehearsal has dropped them, too: that of an earlier driver is ended."""
        try:
            with self.pool.transaction(doing, lock_wait_s=HOLDER_WAIT_S) as connection:
                # To DROP, a schema that is not there is an error.
                there = meta.present(connection, self.sink.meta_schema, tables)
                if there:
                    connection.execute(meta.drop(self.sink.meta_schema, sorted(there)))
        except TryAgain as error:
            self._transaction.end_holders(error.__cause__)
            raise

    def in_doubt(self) -> Sequence[InDoubt]:
        return self._read(
            "list what is staged",
            lambda connection: meta.staged(connection, self.sink.meta_schema, self.identity),
            missing=[],
        )

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:  # noqa: ARG002
        def ask(connection: psycopg.Connection[Any]) -> Proof:
            name = staging_name(receipt.handle)
            if meta.present(connection, self.sink.meta_schema, [name]):
                return Proof.UNKNOWN
            return proven(receipt, self._ledger.proof(connection, receipt.handle))

        return self._read("ask for proof", ask, missing=Proof.ABORTED)

    def close(self) -> None:
        self._transaction.give_up()
        self.pool.close()

    # Sharing a transaction (`SharesTransaction`)

    def share(self, members: Sequence[Any]) -> Transaction:
        shared = Transaction(self._limits)
        for member in members:
            member.join(shared)
        return shared

    def join(self, shared: Transaction) -> None:
        self._transaction.give_up()
        self._transaction = shared
        shared.add(self)

    # Rows that the table refuses (`Rejecting`)

    rejected_schema = REJECTED

    def rejected(self, epoch: EpochNumber) -> pa.Table | None:
        found = self.apart.rows
        return rows_of(self.identity.sink, epoch, found) if found else None

    def remove_apart(self) -> None:
        """Take out of staging, durably, what was set apart. May be repeated, so a lost reply is."""
        statements = [
            removal(self.sink.meta_schema, table, places) for table, places in self.apart.removals()
        ]
        if not statements:
            return
        try:
            with self.pool.transaction(self.doing("set rejected rows apart")) as connection:
                for statement in statements:
                    connection.execute(statement)
        except OutcomeUnknown as error:
            raise TryAgain(error.message, error.hint) from error
        self.apart.is_removed = True

    # What the transaction asks of each of its members

    @property
    def server(self) -> Server:
        return self.sink.server

    @property
    def table(self) -> str:
        return self.sink.table

    @property
    def takes_rejects(self) -> bool:
        return self.sink.rejects_to is not None

    def get_ready(self) -> None:
        self._get_ready()

    def claim_epoch(
        self, connection: psycopg.Connection[Any], epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> bool:
        """Write the epoch's row of the ledger; False where it is committed already."""
        return self._ledger.claim_epoch(connection, epoch, sum(one.rows for one in receipts))

    def apply(
        self, connection: psycopg.Connection[Any], epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> None:
        tables = self.staged(connection, epoch, receipts)
        if tables:
            rows = sum(receipt.rows for receipt in receipts)
            apply_rows(connection, read_apply(connection, self.sink, tables), epoch, rows)
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if receipts:
            connection.execute(self._ledger.record(receipts))
        if tables:
            connection.execute(meta.drop(self.sink.meta_schema, list(tables)))

    def staged(
        self, connection: psycopg.Connection[Any], epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> dict[str, int]:
        """The staging tables of these receipts, with their partitions."""
        schema = self.sink.meta_schema
        return staged_tables(
            epoch, receipts, schema, lambda names: meta.present(connection, schema, names)
        )

    def committed_elsewhere(self, epoch: EpochNumber) -> Fenced | Refused:
        by = self._read(
            "read the ledger",
            lambda connection: self._ledger.holds(connection, epoch),
            missing=None,
        )
        return committed_elsewhere(self.sink.table, epoch, by, self.identity)
