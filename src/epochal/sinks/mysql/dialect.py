"""MySQL's and MariaDB's words."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import ClassVar

from epochal.kit.sql.apply import Apply
from epochal.kit.sql.dialect import Dialect, Session
from epochal.kit.sql.ledger import NAME_CHARS_MAX
from epochal.kit.sql.names import NameRule, parse_staging_name, staging_prefix
from epochal.sinks.mysql.sorting import MySQLFaults
from epochal.terms import Identity, InDoubt

NAMES = NameRule(database="MySQL", length_max=64, unit="characters", quotes="`")
DETACH_AT_PREPARE = "SET SESSION pseudo_slave_mode = 1"
"""
MariaDB only: XA PREPARE lets go of the transaction before it answers, as MySQL's does by itself.

Without it, it is let go of while its connection is closed, and in two steps: whoever commits it in
between is told OK, and the rows stay in the engine, where nothing lists them until a restart.
"""
_GENERATIONS_BACK = 100
"""How far back a driver that was left behind is looked for."""


class MySQLDialect(MySQLFaults, Dialect):
    names: ClassVar[NameRule] = NAMES
    at: ClassVar[str] = "epochal_at"

    def literal(self, value: str | int | None) -> str:
        if value is None:
            return "NULL"
        if isinstance(value, int):
            return str(value)
        escaped = value.replace("\\", "\\\\").replace("'", "''").replace("\0", "\\0")
        return f"'{escaped}'"

    def first(self, query: str, count: int) -> str:
        return f"{query} LIMIT {count}"

    def create_ledger(self, schema: str) -> list[str]:
        name = f"VARCHAR({NAME_CHARS_MAX}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        ascii_ = "CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
        return [
            f"CREATE TABLE IF NOT EXISTS {self.quote(schema, self.ledger)} ("
            f"`uid` CHAR(12) {ascii_}, `sink` CHAR(8) {ascii_}, `epoch` BIGINT NOT NULL,"
            " `part` INT NOT NULL, `generation` BIGINT NOT NULL, `attempt` BIGINT NOT NULL,"
            f" `pipeline` {name} NOT NULL, `sink_name` {name} NOT NULL, `run` {name} NULL,"
            " `row_count` BIGINT NOT NULL,"
            " `written_at` TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),"
            " PRIMARY KEY (`uid`, `sink`, `epoch`, `part`, `generation`, `attempt`),"
            " KEY `by_name` (`pipeline`, `sink_name`, `uid`, `epoch`)) ENGINE=InnoDB"
        ]

    # By key

    def upsert(self, apply: Apply) -> str:
        changes = [f"{self.quote(v.column)} = i.{apply.alias(v)}" for v in apply.values]
        if not changes:
            key = self.quote(apply.keys[0].column)
            changes = [f"{key} = {apply.target}.{key}"]
        return f"{apply.insert()} ON DUPLICATE KEY UPDATE {', '.join(changes)}"

    def delete(self, apply: Apply, *, marked_only: bool) -> str:
        marked = " WHERE i.is_delete = 1" if marked_only else ""
        return (
            f"DELETE t FROM {apply.target} t JOIN ({apply.winners()}) i"
            f" ON {apply.matches('t', 'i')}{marked}"
        )

    # Staging tables

    def staged(self, session: Session, schema: str, identity: Identity) -> list[InDoubt]:
        rows = session.query(
            "SELECT table_name, TIMESTAMPDIFF(MICROSECOND, create_time, UTC_TIMESTAMP(6)) / 1e6"
            f" FROM information_schema.tables WHERE table_schema = {self.literal(schema)}"
            f" AND LEFT(table_name, {len(staging_prefix(identity))}) ="
            f" {self.literal(staging_prefix(identity))} ORDER BY table_name"
        )
        return [
            InDoubt(
                name=name,
                handle=parse_staging_name(name),
                age_s=None if age_s is None else max(0.0, float(age_s)),
            )
            for name, age_s in rows
        ]

    def present(self, session: Session, schema: str, tables: Collection[str]) -> frozenset[str]:
        if not tables:
            return frozenset()
        listed = ", ".join(map(self.literal, tables))
        rows = session.query(
            "SELECT table_name FROM information_schema.tables"
            f" WHERE table_schema = {self.literal(schema)} AND table_name IN ({listed})"
        )
        return frozenset(name for (name,) in rows)

    def columns(self, session: Session, schema: str, table: str) -> list[str]:
        rows = session.query(
            f"SELECT column_name FROM information_schema.columns WHERE table_schema ="
            f" {self.literal(schema)} AND table_name = {self.literal(table)}"
            " ORDER BY ordinal_position"
        )
        return [name for (name,) in rows]

    def drop(self, session: Session, schema: str, tables: Sequence[str]) -> None:
        listed = ", ".join(self.quote(schema, name) for name in tables)
        session.execute(f"DROP TABLE IF EXISTS {listed}")

    # Prepared transactions

    def prepared(self, session: Session) -> list[str]:
        listed = [data for *_, data in session.query("XA RECOVER")]
        return [one if isinstance(one, str) else one.decode(errors="replace") for one in listed]

    def end_prepared(self, session: Session, name: str, *, is_commit: bool) -> None:
        session.execute(f"XA {'COMMIT' if is_commit else 'ROLLBACK'} {self.literal(name)}")

    # Sessions that were left behind

    def driver_lock(self, identity: Identity, generation: int) -> str:
        """A named lock that only says whose session it is, and ends with it."""
        return f"epochal-{identity.uid}-s{identity.tag}-g{generation}"

    def end_older_sessions(self, session: Session, identity: Identity) -> None:
        """Up to one's own generation: of a later one, this driver is the zombie."""
        mine = identity.generation
        locks = [
            f"IS_USED_LOCK({self.literal(self.driver_lock(identity, generation))})"
            for generation in range(mine, max(-1, mine - _GENERATIONS_BACK), -1)
        ]
        ((own, *holders),) = session.query(f"SELECT CONNECTION_ID(), {', '.join(locks)}")
        for holder in holders:
            if holder is not None and holder != own:
                session.execute(f"KILL CONNECTION {int(holder)}")


DIALECT = MySQLDialect()
