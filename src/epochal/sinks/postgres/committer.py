"""Carries decisions out, the staged way: one transaction an epoch, rehearsed before the decision.

`rehearse` applies the staging tables to the table and writes the ledger, and leaves the transaction
open; `commit` commits it. Where that transaction was lost, or another process commits, the same is
applied again from the staging tables, which disappear in the very transaction that makes their rows
visible: as long as one is listed, its rows are not in the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import psycopg
import pyarrow as pa

from epochal.contract import Limits
from epochal.errors import Fenced, Misconfigured, PreparedLost, Refused, RowRejected, TryAgain
from epochal.sinks.postgres import meta
from epochal.sinks.postgres.applying import apply_rows, find_rejected, read_apply
from epochal.sinks.postgres.checking import Checker
from epochal.sinks.postgres.connecting import Pool, driver_name, roll_back
from epochal.sinks.postgres.ledger import Ledger
from epochal.sinks.postgres.names import staging_name
from epochal.sinks.postgres.rejects import Rejected, refusal, removals, rows_of
from epochal.sinks.postgres.sorting import (
    is_data_error,
    is_lock_wait,
    is_missing,
    sorted_error,
    sorting,
)
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

if TYPE_CHECKING:
    from epochal.sinks.postgres.sink import Postgres

T = TypeVar("T")
_CLAIM_WAIT_S = 2.0
"""How long to wait for another driver's open transaction before it is looked for and ended."""


@dataclass(frozen=True, slots=True)
class _Open:
    """A rehearsed epoch: everything is done but the COMMIT."""

    epoch: EpochNumber
    handles: frozenset[Handle]
    connection: psycopg.Connection[Any]


class Committing:
    """What both strategies share: the pool, the ledger, the checks."""

    def __init__(self, sink: Postgres, identity: Identity, limits: Limits) -> None:
        self._sink = sink
        self._identity = identity
        self._limits = limits
        self._pool = Pool(sink.server, driver_name(identity))
        self._ledger = Ledger(schema=sink.meta_schema, identity=identity)
        self._checker = Checker(sink, self._ledger)

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        with self._pool.connection() as connection, sorting(self._doing("check")):
            return self._checker.check(connection, schema)

    def newest(self) -> Sequence[Mark]:
        return self._read("read the ledger", self._ledger.newest, missing=[])

    def prune(self, below: EpochNumber) -> None:
        self._read(
            "prune the ledger",
            lambda connection: connection.execute(self._ledger.prune(below)),
            missing=None,
        )

    def _doing(self, verb: str) -> str:
        return f"sink {self._identity.sink!r} on {self._sink.server.place}: {verb}"

    def _get_ready(self) -> None:
        """Make what is missing, once a start: our schema, and the table or columns if asked to."""
        if self._checker.is_ready:
            return
        with self._pool.transaction(self._doing("make what is missing")) as connection:
            self._checker.make_ready(connection)
        self._checker.is_ready = True

    def _read(self, verb: str, ask: Callable[[psycopg.Connection[Any]], T], *, missing: T) -> T:
        """Ask on the primary; a schema that nobody made yet holds nothing."""
        with self._pool.connection() as connection:
            try:
                return ask(connection)
            except psycopg.Error as error:
                if is_missing(error):
                    return missing
                raise sorted_error(error, self._doing(verb)) from error


class StagedCommitter(Committing):
    def __init__(self, sink: Postgres, identity: Identity, limits: Limits) -> None:
        super().__init__(sink, identity, limits)
        self._open: _Open | None = None
        self.deliver_rejected: Callable[[pa.Table], None] | None = None
        """Takes rejected rows of the epoch that is being rehearsed to another sink."""

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        if self._sink.on_reject != "fail" and self.deliver_rejected is None:
            raise Misconfigured(
                f"{self._sink.table}: on_reject=<sink>, and nothing here takes rejected rows there",
                'on_reject="fail" stops the query and names the rows and the reasons',
            )
        return super().check(schema)

    def begin(self, epoch: EpochNumber) -> Json:  # noqa: ARG002
        self._give_up()
        self._get_ready()
        return None

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
        if open_ is None:
            return
        try:
            with sorting(self._doing(f"commit epoch {epoch}"), is_commit=True):
                done = open_.connection.execute("COMMIT").statusmessage
            if done != "COMMIT":
                raise TryAgain(
                    f"{self._doing(f'commit epoch {epoch}')}: the server answered {done}"
                )
        finally:
            self._pool.give_back(open_.connection)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._give_up()
        self._checker.is_ready = False
        tables = [staging_name(receipt.handle) for receipt in receipts]
        if not tables:
            return
        doing = self._doing(f"abort epoch {epoch}")
        with self._pool.transaction(doing) as connection:
            # Names that are not there are left out: a schema that is not there is an error to DROP.
            there = meta.present(connection, self._sink.meta_schema, tables)
            if there:
                connection.execute(meta.drop(self._sink.meta_schema, sorted(there)))

    def in_doubt(self) -> Sequence[InDoubt]:
        return self._read(
            "list what is staged",
            lambda connection: meta.staged(connection, self._sink.meta_schema, self._identity),
            missing=[],
        )

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:  # noqa: ARG002
        def ask(connection: psycopg.Connection[Any]) -> Proof:
            name = staging_name(receipt.handle)
            if meta.present(connection, self._sink.meta_schema, [name]):
                return Proof.UNKNOWN
            proof = self._ledger.proof(connection, receipt.handle)
            # A task without rows leaves no table: that there is none proves nothing.
            is_nothing = proof is Proof.ABORTED and not receipt.token.get("staged", True)
            return Proof.UNKNOWN if is_nothing else proof

        return self._read("ask for proof", ask, missing=Proof.ABORTED)

    def close(self) -> None:
        self._give_up()
        self._pool.close()

    # The one transaction

    def _give_up(self) -> None:
        """Let go of a rehearsed transaction that will not be committed."""
        if self._open is not None:
            self._let_go(self._open.connection)
            self._open = None

    def _rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        try:
            self._open = self._apply(epoch, receipts)
        except PreparedLost as error:
            raise TryAgain(
                f"{error.message}; no decision was made", "the epoch is tried again whole"
            ) from error
        except RowRejected:
            if self._sink.on_reject == "fail" or self.deliver_rejected is None:
                raise
            self._set_rejected_apart(epoch, receipts)
            self._open = self._apply(epoch, receipts)
        if self._open is None:
            raise self._committed_elsewhere(epoch)

    def _committed_elsewhere(self, epoch: EpochNumber) -> Fenced | Refused:
        generation = self._read(
            "read the ledger",
            lambda connection: self._ledger.holds(connection, epoch),
            missing=None,
        )
        fact = f"epoch {epoch} is being written, and {self._sink.table} proves it committed"
        if generation is not None and generation > self._identity.generation:
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
        connection = self._pool.take()
        try:
            if self._applied(connection, epoch, receipts):
                handles = frozenset(receipt.handle for receipt in receipts)
                return _Open(epoch, handles, connection)
        except psycopg.Error as error:
            self._let_go(connection)
            raise self._explained(epoch, receipts, error) from error
        except BaseException:
            self._let_go(connection)
            raise
        self._let_go(connection)
        return None

    def _let_go(self, connection: psycopg.Connection[Any]) -> None:
        roll_back(connection)
        self._pool.give_back(connection)

    def _explained(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], error: psycopg.Error
    ) -> Exception:
        """Why an epoch could not be applied; a zombie that stood in the way is ended."""
        if is_lock_wait(error):
            with self._pool.connection() as connection, suppress(psycopg.Error):
                meta.end_older_sessions(connection, self._identity)
        if is_data_error(error):
            limit = 1 if self._sink.on_reject == "fail" else self._sink.rejects_max
            found = self._find_rejected(epoch, receipts, limit)
            return refusal(self._sink.table, epoch, found, error)
        return sorted_error(error, self._doing(f"apply epoch {epoch}"))

    def _applied(
        self, connection: psycopg.Connection[Any], epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> bool:
        server = self._sink.server
        connection.execute(server.begin(lock_timeout_s=min(_CLAIM_WAIT_S, server.lock_timeout_s)))
        rows = sum(receipt.rows for receipt in receipts)
        if not self._ledger.claim_epoch(connection, epoch, rows):
            return False
        connection.execute(server.settings())
        tables = self._staged(connection, epoch, receipts)
        if tables:
            apply_rows(connection, read_apply(connection, self._sink, tables), epoch, rows)
        connection.execute("SET CONSTRAINTS ALL IMMEDIATE")
        if receipts:
            connection.execute(self._ledger.record(receipts))
        if tables:
            connection.execute(meta.drop(self._sink.meta_schema, list(tables)))
        return True

    def _staged(
        self, connection: psycopg.Connection[Any], epoch: EpochNumber, receipts: Sequence[Receipt]
    ) -> dict[str, int]:
        """The staging tables of these receipts, with their partitions."""
        wanted = {
            staging_name(receipt.handle): receipt
            for receipt in receipts
            if receipt.token.get("staged", True)
        }
        there = meta.present(connection, self._sink.meta_schema, wanted)
        lost = tuple(str(wanted[name].handle) for name in wanted if name not in there)
        if lost:
            raise PreparedLost(
                f"epoch {epoch}: {len(lost)} of {len(receipts)} staging tables are not in schema "
                f"{self._sink.meta_schema}, and the ledger does not prove them committed",
                "somebody dropped them, or the server was restored from a backup",
                handles=lost,
            )
        return {name: receipt.handle.partition for name, receipt in wanted.items()}

    # Rows that the table refuses

    def _find_rejected(
        self, epoch: EpochNumber, receipts: Sequence[Receipt], limit: int
    ) -> list[Rejected]:
        """Search in a transaction that is thrown away."""
        with self._pool.connection() as connection, sorting(self._doing("find refused rows")):
            connection.execute(self._sink.server.begin())
            try:
                tables = self._staged(connection, epoch, receipts)
                return find_rejected(connection, self._sink, tables, limit=limit)
            finally:
                roll_back(connection)

    def _set_rejected_apart(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Take bad rows out of staging, for good and before the decision, and hand them over."""
        limit = self._sink.rejects_max
        found = self._find_rejected(epoch, receipts, limit + 1)
        if not found or len(found) > limit or self.deliver_rejected is None:
            raise RowRejected(
                f"epoch {epoch}: {self._sink.table} refuses more than {limit} rows, among them "
                f"{found[0] if found else 'rows that exclude each other'}",
                "so many are not bad rows but a wrong query or table; rejects_max= is the limit",
            )
        self.deliver_rejected(rows_of(self._identity.sink, epoch, found))
        with self._pool.transaction(self._doing("set rejected rows apart")) as connection:
            for statement in removals(found):
                connection.execute(statement)

    # Trying again

    def _insist(self, attempt: Callable[[], T]) -> T:
        """Repeat what the server marks as transient: a new transaction has no memory of the old."""
        for wait_ms in self._limits.retry_backoff_ms:
            try:
                return attempt()
            except TryAgain:
                time.sleep(wait_ms / 1000)
        return attempt()
