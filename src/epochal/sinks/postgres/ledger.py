"""The ledger: the server's own proof of what was committed, written with the rows (I9).

One row a handle, so that an attempt that lost never stands in the way of the one that won (I6), and
for staged epochs one row for the epoch itself (partition -1): whoever inserts that one applies the
epoch, whoever comes second waits for the first and then finds it done. The newest epoch of a uid is
never pruned, so "older than the newest" always means "settled long ago".
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psycopg
from psycopg import sql

from epochal.terms import (
    EpochNumber,
    Handle,
    Identity,
    Mark,
    Proof,
    Receipt,
    Uid,
)

LEDGER = "ledger"
_WHOLE_EPOCH = -1
_CREATE = """
CREATE TABLE IF NOT EXISTS {ledger} (
  uid text NOT NULL,
  sink text NOT NULL,
  epoch bigint NOT NULL,
  partition integer NOT NULL,
  generation bigint NOT NULL,
  attempt bigint NOT NULL,
  pipeline text NOT NULL,
  sink_name text NOT NULL,
  run text,
  rows bigint NOT NULL,
  written_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (uid, sink, epoch, partition, generation, attempt));
CREATE INDEX IF NOT EXISTS {index} ON {ledger} (pipeline, sink_name, uid, epoch)
"""
_COLUMNS = "uid, sink, epoch, partition, generation, attempt, pipeline, sink_name, run, rows"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledger:
    """The ledger in one schema, as one sink of one pipeline sees it."""

    schema: str
    identity: Identity

    @property
    def table(self) -> sql.Identifier:
        return sql.Identifier(self.schema, LEDGER)

    # Writing

    def create(self) -> sql.Composed:
        return sql.SQL(_CREATE).format(ledger=self.table, index=sql.Identifier("ledger_by_name"))

    def claim_epoch(
        self, connection: psycopg.Connection[Any], epoch: EpochNumber, rows: int
    ) -> bool:
        """
        Write the epoch's own row: False where the epoch is committed already.

        Waits for another transaction that is about to write the same row, until the lock timeout.
        """
        values = self._row((self.identity.uid, self.identity.tag, epoch, _WHOLE_EPOCH, 0, 0), rows)
        claim = sql.SQL(
            "INSERT INTO {0} ({1}) SELECT {2} WHERE NOT EXISTS (SELECT FROM {0} l"
            " WHERE l.uid = {3} AND l.sink = {4} AND l.epoch > {5}) ON CONFLICT DO NOTHING"
        ).format(
            self.table,
            sql.SQL(_COLUMNS),
            values,
            sql.Literal(self.identity.uid),
            sql.Literal(self.identity.tag),
            sql.Literal(epoch),
        )
        return connection.execute(claim).rowcount == 1

    def record(self, receipts: Sequence[Receipt]) -> sql.Composed:
        """One row for each handle, in the transaction that makes its rows visible."""
        rows = [
            sql.SQL("({})").format(self.row_of(receipt.handle, receipt.rows))
            for receipt in receipts
        ]
        return sql.SQL("INSERT INTO {} ({}) VALUES {}").format(
            self.table, sql.SQL(_COLUMNS), sql.SQL(", ").join(rows)
        )

    def row_of(self, handle: Handle, rows: int) -> sql.Composed:
        numbers = (handle.epoch, handle.partition, handle.generation, handle.attempt)
        return self._row((handle.uid, handle.sink, *numbers), rows)

    def _row(self, key: Sequence[str | int], rows: int) -> sql.Composed:
        who = self.identity
        values = (*key, who.pipeline, who.sink, who.run, rows)
        return sql.SQL(", ").join(sql.Literal(value) for value in values)

    def prune(self, below: EpochNumber) -> sql.Composed:
        return sql.SQL(
            "DELETE FROM {0} WHERE uid = {1} AND sink = {2} AND epoch < {3}"
            " AND epoch < (SELECT max(epoch) FROM {0} WHERE uid = {1} AND sink = {2})"
        ).format(
            self.table,
            sql.Literal(self.identity.uid),
            sql.Literal(self.identity.tag),
            sql.Literal(below),
        )

    # Reading

    def proof(self, connection: psycopg.Connection[Any], handle: Handle) -> Proof:
        """What the ledger shows of a handle that is no longer prepared."""
        row = connection.execute(
            sql.SQL(
                "SELECT EXISTS (SELECT FROM {0} WHERE uid = {1} AND sink = {2} AND epoch = {3}"
                " AND partition = {4} AND generation = {5} AND attempt = {6}),"
                " COALESCE({3} < (SELECT min(epoch) FROM {0} WHERE uid = {1} AND sink = {2}),"
                " false)"
            ).format(
                self.table,
                sql.Literal(handle.uid),
                sql.Literal(handle.sink),
                sql.Literal(handle.epoch),
                sql.Literal(handle.partition),
                sql.Literal(handle.generation),
                sql.Literal(handle.attempt),
            )
        ).fetchone()
        is_written, is_forgotten = row or (False, False)
        if is_written:
            return Proof.COMMITTED
        return Proof.UNKNOWN if is_forgotten else Proof.ABORTED

    def holds(self, connection: psycopg.Connection[Any], epoch: EpochNumber) -> int | None:
        """The highest generation that committed this epoch or a later one; None where none did."""
        row = connection.execute(
            sql.SQL(
                "SELECT max(generation) FROM {} WHERE uid = {} AND sink = {} AND epoch >= {}"
            ).format(
                self.table,
                sql.Literal(self.identity.uid),
                sql.Literal(self.identity.tag),
                sql.Literal(epoch),
            )
        ).fetchone()
        return None if row is None or row[0] is None else int(row[0])

    def newest(self, connection: psycopg.Connection[Any]) -> list[Mark]:
        """Per uid that ever wrote under this pipeline's and this sink's name."""
        rows = connection.execute(
            sql.SQL(
                "SELECT uid, max(epoch), (array_agg(run ORDER BY epoch DESC))[1] FROM {}"
                " WHERE pipeline = {} AND sink_name = {} GROUP BY uid ORDER BY uid"
            ).format(
                self.table, sql.Literal(self.identity.pipeline), sql.Literal(self.identity.sink)
            )
        ).fetchall()
        return [Mark(uid=Uid(uid), epoch=EpochNumber(epoch), run=run) for uid, epoch, run in rows]
