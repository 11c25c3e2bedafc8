"""MySQL's and MariaDB's SQL: DDL commits, and staged rows are numbered."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import ClassVar

from epochal.kit.sql.apply import Apply, Source
from epochal.kit.sql.client import Session
from epochal.kit.sql.dialect import OwnTablesDialect, Query
from epochal.kit.sql.ledger_rows import NAME_CHARS_MAX
from epochal.kit.sql.names import NameRule, parse_staging_name, staging_prefix
from epochal.sinks.mysql.errors import MySQLErrors
from epochal.terms import EpochNumber, Handle, Identity, InDoubt, SinkTag, Uid

NAMES = NameRule(database="MySQL", length_max=64, unit="characters", quotes="`")
AT = "epochal_at"
"""The column of a staging table that numbers its rows."""
DETACH_AT_PREPARE = "SET SESSION pseudo_slave_mode = 1"
"""
MariaDB only: XA PREPARE detaches the transaction before it answers, as MySQL's does by itself.

Without it, the transaction is detached while its connection is closed, and in two steps: a commit
in between is answered with OK, and the rows stay in the engine, where nothing lists them until a
restart.
"""
_GENERATIONS_BACK = 100
"""How far back drivers that died are searched for."""
_ENDING_WAITS_S = (0.002, 0.01, 0.05, 0.2, 0.5, 1.0)
"""How long a session that was told to end may take."""
_PARTITIONS_BEYOND = 64


_MARIADB_GTIDS = re.compile(r"\d+-\d+-\d+(,\d+-\d+-\d+)*")


def _by_domain(gtids: str) -> dict[int, int]:
    """The number that each domain has reached."""
    numbers = [tuple(map(int, one.split("-"))) for one in gtids.split(",")]
    return {domain: number for domain, _, number in numbers}


class MySQLDialect(MySQLErrors, OwnTablesDialect):
    names: ClassVar[NameRule] = NAMES
    place: ClassVar[str] = f"`{AT}`"
    own_columns: ClassVar[frozenset[str]] = frozenset({AT})
    replaces_nulls: ClassVar[bool] = True
    """In AUTO_INCREMENT, and in TIMESTAMP unless `explicit_defaults_for_timestamp` is on."""
    deletes_lock_beyond: ClassVar[bool] = True

    def literal(self, value: str | int | None) -> str:
        if value is None:
            return "NULL"
        if isinstance(value, int):
            return str(value)
        escaped = value.replace("\\", "\\\\").replace("'", "''").replace("\0", "\\0")
        return f"'{escaped}'"

    def first(self, query: str, count: int) -> str:
        return f"{query} LIMIT {count}"

    def descending(self, expression: str) -> str:
        """Nulls are the lowest."""
        return f"{expression} DESC"

    def ascending(self, expression: str) -> str:
        return f"{expression} ASC"

    # MySQL's and MariaDB's names of each
    server_sql: ClassVar[Mapping[str, str]] = {
        "server": "SHOW GLOBAL VARIABLES WHERE Variable_name IN ('server_uuid', 'server_uid')",
        "transactions": "SHOW GLOBAL VARIABLES WHERE Variable_name IN"
        " ('gtid_executed', 'gtid_binlog_pos')",
        "position": "SHOW GLOBAL STATUS WHERE Variable_name IN"
        " ('Innodb_redo_log_current_lsn', 'Innodb_lsn_current')",
    }

    def are_missing(self, query: Query, before: str, now: str) -> bool:
        """MariaDB has a number per domain, MySQL lists that only its server compares."""
        if _MARIADB_GTIDS.fullmatch(before) and _MARIADB_GTIDS.fullmatch(now):
            reached = _by_domain(now)
            return any(number > reached.get(at, 0) for at, number in _by_domain(before).items())
        ((is_subset,),) = query(f"SELECT GTID_SUBSET({self.literal(before)}, {self.literal(now)})")
        return not is_subset

    @property
    def clock(self) -> str:
        return "SELECT UNIX_TIMESTAMP(SYSDATE(6))"

    def create_ledger(self, schema: str) -> list[str]:
        name = f"VARCHAR({NAME_CHARS_MAX}) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
        ascii_ = "CHARACTER SET ascii COLLATE ascii_bin NOT NULL"
        return [
            f"CREATE TABLE IF NOT EXISTS {self.quote(schema, self.ledger)} ("
            f"`uid` CHAR(12) {ascii_}, `sink` CHAR(8) {ascii_}, `epoch` BIGINT NOT NULL,"
            " `part` INT NOT NULL, `generation` BIGINT NOT NULL, `attempt` BIGINT NOT NULL,"
            f" `claim` CHAR(8) {ascii_}, `owner` CHAR(8) {ascii_},"
            f" `pipeline` {name} NOT NULL, `sink_name` {name} NOT NULL, `run` {name} NULL,"
            " `row_count` BIGINT NOT NULL,"
            " `written_at` TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),"
            " PRIMARY KEY (`uid`, `sink`, `epoch`, `part`, `generation`, `attempt`, `claim`),"
            " KEY `by_name` (`pipeline`, `sink_name`, `uid`, `epoch`)) ENGINE=InnoDB"
        ]

    def create_table(self, target: str, definitions: Sequence[str]) -> str:
        created = super().create_table(target, definitions)
        return f"{created} ENGINE=InnoDB DEFAULT CHARACTER SET utf8mb4"

    moment: ClassVar[str] = "TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6)"

    def layout_sql(self, schema: str | None, table: str) -> str:
        """With the engine: what MyISAM has written does not go back with its transaction."""
        within = "DATABASE()" if schema is None else self.literal(schema)
        which = f"table_schema = {within} AND table_name = {self.literal(table)}"
        return (
            "SELECT column_name, column_type, collation_name,"
            f" (SELECT engine FROM information_schema.tables WHERE {which})"
            f" FROM information_schema.columns WHERE {which} ORDER BY ordinal_position"
        )

    # Applying

    def upsert(self, apply: Apply) -> str:
        """`skip_unchanged` adds nothing: the server writes no row that stays as it is."""
        if not apply.values or apply.mode.mode == "insert_new":
            key = self.quote(apply.keys[0].column)
            return f"{apply.insert()} ON DUPLICATE KEY UPDATE {key} = {apply.target}.{key}"
        changes = {self.quote(one.column): f"i.{apply.alias(one)}" for one in apply.values}
        changes |= {name: self.default(name) for name in map(self.quote, apply.mode.delete_as)}
        for condition in apply.newer_condition(apply.target):
            changes = self._only_if(condition, changes, apply)
        assigned = ", ".join(f"{column} = {value}" for column, value in changes.items())
        return f"{apply.insert()} ON DUPLICATE KEY UPDATE {assigned}"

    def _only_if(self, condition: str, changes: Mapping[str, str], apply: Apply) -> dict[str, str]:
        """
        ON DUPLICATE KEY UPDATE has no WHERE. Assignments take effect one after the other: the
        version, which the condition reads, is the last.
        """
        version = self.quote(apply.newest[0].column)
        return {
            column: f"IF({condition}, {changes[column]}, {apply.target}.{column})"
            for column in sorted(changes, key=lambda one: one == version)
        }

    def default(self, column: str) -> str:
        return f"DEFAULT({column})"

    def differs(self, apply: Apply, come: str) -> str:  # noqa: ARG002
        """The server compares by itself, byte by byte."""
        return "1 = 1"

    def update(self, apply: Apply, changes: Sequence[str], condition: str) -> str:
        changed = ", ".join(f"t.{change}" for change in changes)
        return (
            f"UPDATE {apply.target} t JOIN ({apply.winners()}) i ON {apply.matches('t', 'i')}"
            f" SET {changed} WHERE {condition}"
        )

    def delete(self, apply: Apply, condition: str) -> str:
        return (
            f"DELETE t FROM {apply.target} t JOIN ({apply.winners()}) i"
            f" ON {apply.matches('t', 'i')} WHERE {condition}"
        )

    def bury(self, apply: Apply) -> str:
        columns, deletes = apply.buried()
        version = self.quote(apply.newest[0].column)
        newer, there = f"VALUES({version})", f"{apply.tombstones}.{version}"
        return (
            f"INSERT INTO {apply.tombstones} ({columns}) {deletes} ON DUPLICATE KEY UPDATE"
            f" deleted_at = IF({newer} > {there}, CURRENT_TIMESTAMP(6), deleted_at),"
            f" {version} = GREATEST({newer}, {there})"
        )

    def delete_superseded(self, apply: Apply, source: Source) -> str:
        return (
            f"DELETE s FROM {self.quote(source.schema, source.table)} s LEFT JOIN"
            f" (SELECT w.came FROM ({apply.winners()}) w WHERE w.part = {source.part}) k"
            f" ON k.came = s.{self.place} WHERE k.came IS NULL"
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

    present_sql: ClassVar[str] = (
        "SELECT table_name FROM information_schema.tables"
        " WHERE table_schema = {schema} AND table_name IN ({tables})"
    )
    columns_sql: ClassVar[str] = (
        "SELECT column_name FROM information_schema.columns"
        " WHERE table_schema = {schema} AND table_name = {table} ORDER BY ordinal_position"
    )

    # Prepared transactions

    def prepared_names(self, session: Session) -> list[str]:
        """Of all prepared transactions on the server."""
        listed = [data for *_, data in session.query("XA RECOVER")]
        return [one if isinstance(one, str) else one.decode(errors="replace") for one in listed]

    def end_prepared(self, session: Session, name: str, *, is_commit: bool) -> None:
        session.execute(f"XA {'COMMIT' if is_commit else 'ROLLBACK'} {self.literal(name)}")

    def task_lock(self, uid: Uid, sink: SinkTag, epoch: EpochNumber, partition: int) -> str:
        """
        The named lock that the session of a task's first attempt holds until its rows are prepared,
        where keys may collide. Attempts of all drivers have the same: one of them goes first.
        """
        return f"epochal-{uid}-s{sink}-e{epoch}-p{partition}"

    def end_tasks(
        self,
        session: Session,
        identity: Identity,
        epoch: EpochNumber,
        partitions: int,
        is_lost: Callable[[Handle], bool],  # noqa: ARG002  nothing is decided on what is open
    ) -> None:
        """
        An older driver may have had more partitions. A session is listed, to its own account, until
        it has rolled back.
        """
        locks = [
            self.literal(self.task_lock(identity.uid, identity.tag, epoch, partition))
            for partition in range(partitions + _PARTITIONS_BEYOND)
        ]
        query = f"SELECT {', '.join(f'IS_USED_LOCK({lock})' for lock in locks)}"
        ended: set[int] = set()
        for wait_s in _ENDING_WAITS_S:
            (holders,) = session.query(query)
            found = {int(one) for one in holders if one is not None}
            for holder in found:
                with suppress(*self.errors):
                    session.execute(f"KILL CONNECTION {holder}")
            ended |= found
            listed = ", ".join(map(str, ended)) or "NULL"
            processes = "SELECT 1 FROM information_schema.processlist"
            if not session.query(f"{processes} WHERE id IN ({listed})"):
                return
            time.sleep(wait_s)

    # Sessions of drivers that died

    def driver_lock(self, identity: Identity, generation: int) -> str:
        """The named lock that a session of this driver holds while a transaction is open."""
        return f"epochal-{identity.uid}-s{identity.tag}-g{generation}"

    def end_older_sessions(self, session: Session, identities: Sequence[Identity]) -> None:
        locks = [
            f"IS_USED_LOCK({self.literal(self.driver_lock(identity, generation))})"
            for identity in identities
            for generation in range(
                identity.generation, max(-1, identity.generation - _GENERATIONS_BACK), -1
            )
        ]
        ((own, *holders),) = session.query(f"SELECT CONNECTION_ID(), {', '.join(locks)}")
        for holder in {int(one) for one in holders if one is not None} - {int(own)}:
            session.execute(f"KILL CONNECTION {holder}")


DIALECT = MySQLDialect()
