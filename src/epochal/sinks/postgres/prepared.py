"""Carries decisions out, the prepared way: each task left a transaction that only waits for COMMIT.

A gid that is gone was committed or rolled back, and the server tells the same of both (42704): the
ledger row, written inside that transaction, tells them apart (I9).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
from psycopg import sql

from epochal.contract import Begin
from epochal.errors import Misconfigured, TryAgain
from epochal.kit.sql.committing import handout
from epochal.kit.sql.ending import each, require_listed, require_none_lost
from epochal.kit.sql.receipts import has_rows, proven
from epochal.sinks.postgres.catalog import read_table, to_json
from epochal.sinks.postgres.committer import Committing
from epochal.sinks.postgres.sorting import (
    OBJECT_BUSY,
    UNDEFINED_OBJECT,
    sorted_error,
    sqlstate_of,
)
from epochal.terms import (
    EpochNumber,
    Handle,
    InDoubt,
    Json,
    Proof,
    Receipt,
    handle_prefix,
)

_LISTED = """
SELECT gid, EXTRACT(EPOCH FROM clock_timestamp() - prepared)::float8 FROM pg_prepared_xacts
WHERE database = current_database() AND starts_with(gid, %s) ORDER BY gid
"""
_IS_LISTED = "SELECT FROM pg_prepared_xacts WHERE gid = %s AND database = current_database()"


class PreparedCommitter(Committing):
    _handout: Json = None

    def begin(self, begin: Begin) -> Json:  # noqa: ARG002
        self._get_ready()
        if self._handout is None:
            self._handout = self._read_handout()
        return self._handout

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Every constraint was met when it was prepared: only that all is still there is asked."""
        require_listed(epoch, receipts, {one.handle for one in self.in_doubt()})

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._get_ready()
        prepared = [receipt for receipt in receipts if has_rows(receipt)]
        lost = each(
            lambda one: self._commit(epoch, one), prepared, at_once_max=self.sink.server.pool_max
        )
        require_none_lost(epoch, receipts, lost)
        if len(prepared) < len(receipts) or not receipts:
            self._record_empty(epoch, [one for one in receipts if not has_rows(one)])

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        self._handout = None
        self._checker.is_ready = False
        each(
            lambda one: self._roll_back(epoch, one), receipts, at_once_max=self.sink.server.pool_max
        )

    def in_doubt(self) -> Sequence[InDoubt]:
        def ask(connection: psycopg.Connection[Any]) -> Sequence[InDoubt]:
            rows = connection.execute(_LISTED, (handle_prefix(self.identity.uid),)).fetchall()
            listed = [
                InDoubt(
                    name=gid,
                    handle=Handle.parse(gid),
                    age_s=age_s,
                    blocks="vacuum in this database, and whoever needs the rows it has locked",
                )
                for gid, age_s in rows
            ]
            mine = self.identity.tag
            return [one for one in listed if one.handle is None or one.handle.sink == mine]

        return self._read("list prepared transactions", ask, missing=[])

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:  # noqa: ARG002
        def ask(connection: psycopg.Connection[Any]) -> Proof:
            gid = str(receipt.handle)
            if connection.execute(_IS_LISTED, (gid,)).fetchone() is not None:
                return Proof.UNKNOWN
            return proven(receipt, self._ledger.proof(connection, receipt.handle))

        return self._read("ask for proof", ask, missing=Proof.ABORTED)

    def close(self) -> None:
        self.pool.close()

    def _read_handout(self) -> Json:
        """What tasks must know of the table: its columns, and under whose name they write."""
        table = self._read(
            "read the table",
            lambda connection: read_table(connection, self.sink.table_name),
            missing=None,
        )
        if table is None:
            raise Misconfigured(
                f"there is no table {self.sink.table}", "create it, or create_table='if_missing'"
            )
        return handout(to_json(table), self.identity)

    def _commit(self, epoch: EpochNumber, receipt: Receipt) -> Handle | None:
        """The handle where its rows were thrown away, else None."""
        with self.pool.connection() as connection:
            try:
                self._end(connection, "COMMIT PREPARED {}", receipt.handle)
            except psycopg.Error as error:
                if sqlstate_of(error) != UNDEFINED_OBJECT:
                    raise self._sorted(error, epoch, receipt.handle) from error
            else:
                return None
            proof = self._ledger.proof(connection, receipt.handle)
        # Forgotten means settled long ago: an epoch is pruned only after that.
        return receipt.handle if proof is Proof.ABORTED else None

    def _roll_back(self, epoch: EpochNumber, receipt: Receipt) -> None:
        with self.pool.connection() as connection:
            try:
                self._end(connection, "ROLLBACK PREPARED {}", receipt.handle)
            except psycopg.Error as error:
                if sqlstate_of(error) != UNDEFINED_OBJECT:
                    raise self._sorted(error, epoch, receipt.handle) from error

    def _end(self, connection: psycopg.Connection[Any], verb: str, handle: Handle) -> None:
        connection.execute(sql.SQL(verb).format(sql.Literal(str(handle))))

    def _sorted(self, error: psycopg.Error, epoch: EpochNumber, handle: Handle) -> Exception:
        doing = self.doing(f"end {handle} of epoch {epoch}")
        if sqlstate_of(error) == OBJECT_BUSY:
            return TryAgain(f"{doing}: another process is at it", "it is asked again")
        return sorted_error(error, doing, is_commit=True)

    def _record_empty(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        """Tasks without rows prepared nothing: their epoch is proven all the same (I8)."""
        with self.pool.transaction(self.doing(f"record epoch {epoch}")) as connection:
            if self._ledger.claim_epoch(connection, epoch, 0) and receipts:
                connection.execute(self._ledger.record(receipts))
