"""Slots: staging tables of small epochs that are recycled, and the registry of who uses which.

The rules are those of PostgreSQL's slots: a slot belongs to a table's pool, the handle in its row
of the registry says whose rows it holds, and the lock on that row is the fence. What differs:

    DDL commits by itself   a new slot's table comes before its row, an old one's row goes before
                            its table: a row without a table is one that somebody dropped, a table
                            without a row is removed once it is old
    locks of a search       a locking SELECT waits for rows that it only passes; so it goes by the
                            pool's index and skips locked rows, or by the key of the registry
    TRUNCATE is DDL         and would end dumps: a slot is emptied by DELETE
    large epochs            for them DELETE costs more than a new table: they have one of their own,
                            which the first block shows that is sent before the task's rows end

    task        SELECT … FOR UPDATE SKIP LOCKED, set the handle, DELETE, LOAD DATA, COMMIT
    rehearse    lock the rows of the handles by their keys; free them; INSERT … SELECT …
    commit      COMMIT; tables of their own are dropped after it
    abort       free the handles, drop tables of their own

With `staging="fixed"` a DBA has made the slots: large attempts use them, too, none is made or
dropped here, and an attempt that finds none free waits.

Staging is a database of its own, so that a dump of the ledger's meets no table that comes or goes.
Servers without SKIP LOCKED (MariaDB before 10.6) have tables of their own for all epochs.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from epochal.kit.sql.client import Session
from epochal.kit.sql.dialect import UNFIT
from epochal.kit.sql.staging_tables import (
    Held,
    Missing,
    OwnTables,
    SlotsInUse,
    Staging,
    claim_in_time,
)
from epochal.sinks.mysql.dialect import AT, DIALECT
from epochal.terms import Handle, Identity, InDoubt, handle_prefix

if TYPE_CHECKING:
    from epochal.sinks.mysql.sink import MySQL
    from epochal.sinks.mysql.types import Planned

REGISTRY = "slots"
ROWS_MAX = 10_000
BYTES_MAX = 4 * 1024 * 1024
"""Of an attempt that uses a slot."""
_IDLE_DAYS = 7
_ORPHAN_DAYS = 1
"""How old a table without a row is when it is removed: its task may be about to insert the row."""
_PREFIX = "slot_"
_literal, _quote = DIALECT.literal, DIALECT.quote

Ask = Callable[[str], Sequence[Sequence[Any]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The slots of one table and one shape, and the statements that claim them."""

    schema: str
    target: str
    names: tuple[str, ...]
    columns: str
    """The definition of a slot's columns: only attempts of one shape use the same slots."""

    @property
    def registry(self) -> str:
        return _quote(self.schema, REGISTRY)

    @property
    def digest(self) -> str:
        return hashlib.sha256(f"{self.target}\0{self.columns}".encode()).hexdigest()[:16]

    def claim(self) -> str:
        """One that is free and that nobody else is claiming, or removing."""
        return (
            f"SELECT slot FROM {self.registry} FORCE INDEX (by_pool)"
            f" WHERE pool = {_literal(self.digest)} AND handle IS NULL"
            " ORDER BY slot LIMIT 1 FOR UPDATE SKIP LOCKED"
        )

    def use(self, slot: str, handle: Handle) -> list[str]:
        return [
            f"UPDATE {self.registry} SET handle = {_literal(str(handle))}, since = NOW(6)"
            f" WHERE slot = {_literal(slot)}",
            f"DELETE FROM {_quote(self.schema, slot)}",
        ]

    def add(self, slot: str, handle: Handle) -> str:
        values = map(_literal, (slot, self.digest, self.target, str(handle)))
        return (
            f"INSERT INTO {self.registry} (slot, pool, target, handle) VALUES ({', '.join(values)})"
        )

    def create_slot(self, slot: str, *, is_new: bool = True) -> str:
        table = _quote(self.schema, slot)
        create = "CREATE TABLE" if is_new else "CREATE TABLE IF NOT EXISTS"
        return f"{create} {table} ({self.columns}) ENGINE=InnoDB ROW_FORMAT=DYNAMIC"

    def fixed_slots(self) -> Iterator[str]:
        """The names of slots that a DBA makes."""
        digests = (hashlib.sha256(f"{self.digest}\0{number}".encode()) for number in count())
        return (f"{_PREFIX}{digest.hexdigest()[:16]}" for digest in digests)


def pool_of(sink: MySQL, planned: Sequence[Planned]) -> Pool:
    """The slots for rows that are written so."""
    columns = {one.field: one.staging_ddl for one in planned}
    # Where rows may be set apart, each is sent with its number.
    numbering = " AUTO_INCREMENT" if sink.rejects_to is None else ""
    if sink.rejects_to is not None:
        columns |= dict.fromkeys(UNFIT, "LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin")
    listed = ", ".join(f"{_quote(name)} {ddl} NULL" for name, ddl in columns.items())
    return Pool(
        schema=sink.staging_schema,
        target=str(sink.table_name),
        names=(AT, *columns),
        columns=f"{DIALECT.place} BIGINT NOT NULL{numbering} PRIMARY KEY, {listed}",
    )


def missing_slots(session: Session, sink: MySQL, pool: Pool, *, may_read: bool) -> list[Missing]:
    """
    The slots that a DBA has yet to make for rows of this pool. Without a registry that the account
    may read: all of them.
    """
    mine = f"SELECT slot, pool FROM {pool.registry} WHERE target = {_literal(pool.target)}"
    found = dict(session.query(mine)) if may_read else {}
    there = DIALECT.present(session, pool.schema, list(found))
    same = [slot for slot, digest in found.items() if slot in there and digest == pool.digest]
    columns = {slot: DIALECT.columns(session, pool.schema, slot) for slot in same}
    fitting = [slot for slot in same if columns[slot] == list(pool.names)]
    altered = [slot for slot in same if slot not in fitting]
    lacking = max(0, sink.slots - len(fitting))
    if not (lacking or altered):
        return []
    what = f"slot for {lacking} of {sink.slots} attempts in {_quote(pool.schema)}"
    what += " (there are some for other columns)" if set(found.values()) - {pool.digest} else ""
    forgotten = [*altered, *sorted(found.keys() - there)]
    new = list(islice((one for one in pool.fixed_slots() if one not in fitting), lacking))
    ddl = [f"DROP TABLE {_quote(pool.schema, slot)}" for slot in altered]
    if forgotten:
        ddl.append(f"DELETE FROM {pool.registry} WHERE {_among('slot', forgotten)}")
    if new:
        ddl += [pool.create_slot(slot, is_new=False) for slot in new]
        named = (", ".join(map(_literal, (slot, pool.digest, pool.target))) for slot in new)
        rows = DIALECT.values(list(named))
        ddl.append(f"INSERT IGNORE INTO {pool.registry} (slot, pool, target) {rows}")
    return [Missing(what=what, ddl=ddl)]


def claim_slot(sink: MySQL, pool: Pool, handle: Handle, ask: Ask, run: Callable[..., None]) -> str:
    """
    In a task: begin a transaction that has an empty slot to itself until it ends; its table.

    Nothing is a key there but the number of a row, which MySQL gives: all checks stay on, as
    MariaDB would else fill an empty table without undo for single rows.
    """
    run("SET SESSION unique_checks = 1, foreign_key_checks = 1")
    if sink.is_fixed:
        return claim_in_time(
            lambda: _claimed(pool, handle, ask, run),
            lambda: _in_use(pool, ask),
            wait_max_s=sink.lock_timeout_s,
        )
    claimed = _claimed(pool, handle, ask, run)
    if claimed is not None:
        return claimed
    slot = f"{_PREFIX}{uuid.uuid4().hex[:16]}"
    run(pool.create_slot(slot), "START TRANSACTION", pool.add(slot, handle))
    return slot


def _claimed(pool: Pool, handle: Handle, ask: Ask, run: Callable[..., None]) -> str | None:
    """In a transaction that has begun; None where no slot is free, and it is over."""
    run("START TRANSACTION")
    while found := ask(pool.claim()):
        ((slot,),) = found
        try:
            run(*pool.use(slot, handle))
        except DIALECT.errors as error:
            if not DIALECT.is_missing(error):
                raise
            # Somebody dropped its table.
            run(f"DELETE FROM {pool.registry} WHERE slot = {_literal(slot)}")
            run("COMMIT", "START TRANSACTION")
        else:
            return str(slot)
    run("ROLLBACK")
    return None


def _in_use(pool: Pool, ask: Ask) -> SlotsInUse:
    ((slots, held, oldest_s),) = ask(
        "SELECT COUNT(*), COUNT(handle), COALESCE(MAX(CASE WHEN handle IS NOT NULL THEN"
        " TIMESTAMPDIFF(MICROSECOND, since, NOW(6)) / 1e6 END), 0)"
        f" FROM {pool.registry} WHERE pool = {_literal(pool.digest)}"
    )
    place = f"{_quote(pool.schema)} for {pool.target}"
    return SlotsInUse(place=place, slots=slots, held=held, oldest_s=float(oldest_s))


def create_registry(schema: str) -> str:
    ascii_ = "CHARACTER SET ascii COLLATE ascii_bin"
    target = "VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin"
    return (
        f"CREATE TABLE IF NOT EXISTS {_quote(schema, REGISTRY)} ("
        f"slot CHAR(21) {ascii_} NOT NULL PRIMARY KEY, pool CHAR(16) {ascii_} NOT NULL,"
        f" target {target} NOT NULL, handle VARCHAR(128) {ascii_} NULL,"
        " since TIMESTAMP(6) NOT NULL DEFAULT CURRENT_TIMESTAMP(6),"
        " KEY by_pool (pool, slot)) ENGINE=InnoDB"
    )


class Slots(Staging):
    """The driver's side of slots, and of tables that large attempts have to themselves."""

    def __init__(self, sink: MySQL) -> None:
        self.schema = sink.staging_schema
        self._target = str(sink.table_name)
        self._registry = _quote(self.schema, REGISTRY)
        self._own = OwnTables(schema=self.schema, dialect=DIALECT)
        self._is_fixed = sink.is_fixed

    def listed(self, session: Session, identity: Identity) -> Sequence[InDoubt]:
        prefix = handle_prefix(identity.uid)
        rows = session.query(
            "SELECT slot, handle, TIMESTAMPDIFF(MICROSECOND, since, NOW(6)) / 1e6"
            f" FROM {self._registry} WHERE LEFT(handle, {len(prefix)}) = {_literal(prefix)}"
            " ORDER BY handle"
        )
        there = DIALECT.present(session, self.schema, [slot for slot, _, _ in rows])
        found = [
            InDoubt(name=name, handle=Handle.parse(name), age_s=max(0.0, float(age_s)))
            for slot, name, age_s in rows
            if slot in there
        ]
        mine = [one for one in found if one.handle is None or one.handle.sink == identity.tag]
        return [*mine, *self._own.listed(session, identity)]

    def is_listed(self, session: Session, handle: Handle) -> bool:
        return bool(self._slots_of(session, [handle])) or self._own.is_listed(session, handle)

    def hold(self, session: Session, handles: Collection[Handle]) -> Mapping[Handle, Held]:
        found = self._slots_of(session, handles)
        held = {}
        if found:
            # By their keys: a search by handle would wait for every slot that a task fills.
            locked = session.query(
                f"SELECT slot, handle FROM {self._registry} WHERE {_among('slot', found.values())}"
                " ORDER BY slot FOR UPDATE"
            )
            still = {(slot, name) for slot, name in locked}
            held = {
                handle: Held(handle=handle, table=slot)
                for handle, slot in found.items()
                if (slot, str(handle)) in still
            }
        return {**self._own.hold(session, [one for one in handles if one not in held]), **held}

    def take(self, session: Session, handles: Collection[Handle]) -> Mapping[Handle, Held]:
        held = self.hold(session, handles)
        if any(one.table.startswith(_PREFIX) for one in held.values()):
            self._free(session, {handle: one.table for handle, one in held.items()})
        return held

    def throw_away(self, session: Session, handles: Collection[Handle]) -> None:
        found = self._slots_of(session, handles)
        if found:
            self._free(session, found)
        self._own.throw_away(session, [one for one in handles if one not in found])

    def remove_unused(self, session: Session, *, is_dry_run: bool) -> int:
        if self._is_fixed:
            return 0
        if not is_dry_run:
            self._forget_dropped(session)
        return self._remove(session, "1 = 1", is_dry_run=is_dry_run)

    def remove_idle(self, session: Session) -> None:
        """At a start: drop slots that nobody has used for days, and tables without a row."""
        self._forget_dropped(session)
        self._remove(session, f"since < NOW(6) - INTERVAL {_IDLE_DAYS} DAY", is_dry_run=False)
        rows = session.query(
            f"SELECT table_name FROM information_schema.tables WHERE table_schema ="
            f" {_literal(self.schema)} AND LEFT(table_name, {len(_PREFIX)}) = {_literal(_PREFIX)}"
            f" AND create_time < NOW() - INTERVAL {_ORPHAN_DAYS} DAY AND table_name NOT IN"
            f" (SELECT slot FROM {self._registry})"
        )
        for (table,) in rows:
            with suppress(*DIALECT.errors):
                self._drop_unlisted(session, table)

    def _slots_of(self, session: Session, handles: Collection[Handle]) -> dict[Handle, str]:
        """The tables of these attempts, without a lock; somebody may take them right after."""
        named = {str(handle): handle for handle in handles}
        if not named:
            return {}
        rows = session.query(
            f"SELECT slot, handle FROM {self._registry} WHERE {_among('handle', named)}"
        )
        there = DIALECT.present(session, self.schema, [slot for slot, _ in rows])
        return {named[name]: slot for slot, name in rows if slot in there}

    def _free(self, session: Session, found: Mapping[Handle, str]) -> None:
        session.execute(
            f"UPDATE {self._registry} SET handle = NULL, since = NOW(6)"
            f" WHERE {_among('slot', found.values())} AND {_among('handle', map(str, found))}"
        )

    def _remove(self, session: Session, condition: str, *, is_dry_run: bool) -> int:
        free = (
            f"SELECT slot FROM {self._registry} WHERE target = {_literal(self._target)}"
            f" AND handle IS NULL AND {condition}"
        )
        slots = [slot for (slot,) in session.query(free)]
        if is_dry_run or not slots:
            return len(slots)
        session.wait_for_locks(1)
        gone = 0
        for slot in slots:
            # One that a task is claiming, or somebody reads, is left to a later start.
            with suppress(*DIALECT.errors):
                gone += session.execute(
                    f"DELETE FROM {self._registry} WHERE slot = {_literal(slot)} AND handle IS NULL"
                    f" AND {condition}"
                )
                self._drop_unlisted(session, slot)
        return gone

    def _forget_dropped(self, session: Session) -> None:
        """
        Delete rows of slots whose tables somebody dropped, used or not. Rows are read before
        tables: the table of a new slot is there before its row.
        """
        mine = f"SELECT slot FROM {self._registry} WHERE target = {_literal(self._target)}"
        slots = [slot for (slot,) in session.query(mine)]
        gone = set(slots) - DIALECT.present(session, self.schema, slots)
        if gone:
            session.wait_for_locks(1)
        for slot in sorted(gone):
            with suppress(*DIALECT.errors):
                session.execute(f"DELETE FROM {self._registry} WHERE slot = {_literal(slot)}")

    def _drop_unlisted(self, session: Session, slot: str) -> None:
        """DDL commits what is open before it begins: the row is gone for everybody by then."""
        if not session.query(f"SELECT 1 FROM {self._registry} WHERE slot = {_literal(slot)}"):
            session.execute(f"DROP TABLE IF EXISTS {_quote(self.schema, slot)}")


def _among(column: str, values: Collection[str] | Any) -> str:
    return f"{column} IN ({', '.join(map(_literal, values))})"
