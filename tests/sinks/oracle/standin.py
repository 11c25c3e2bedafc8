"""
A stand-in for python-oracledb that records what it is asked, and passes SQL on to H2.

Its global transactions are sessions of H2, parked under their XID: any session that
names one can end it. That is what Oracle promises and what was never seen here: no Oracle server
can be had.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import oracledb
import pyarrow as pa
from servers.h2 import H2Error, H2Server

_NUMBERS = {23505: 1, 42102: 942, 42103: 942, 42104: 942, 42101: 955, 23502: 1400, 22001: 12899}
_MORE = {22003: 1438, 22018: 1722, 23513: 2290, 23506: 2291, 23503: 2292}
_sessions = itertools.count(1)


@dataclass
class Details:
    code: int
    message: str
    offset: int | None = None
    full_code: str = ""

    def __str__(self) -> str:
        return f"{self.full_code}: {self.message}"


def database_error(code: int, message: str, offset: int | None = None) -> oracledb.DatabaseError:
    details = Details(code, message, offset, "DPY-4024" if code == 0 else f"ORA-{code:05d}")
    return oracledb.DatabaseError(details)


@dataclass
class StandIn:
    """In the place of the module `oracledb`."""

    h2: H2Server
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    parked: dict[str, str] = field(default_factory=dict)
    refuses: set[str] = field(default_factory=set)
    """Verbs that this server does not do."""
    POOL_GETMODE_TIMEDWAIT: int = oracledb.POOL_GETMODE_TIMEDWAIT

    def connect(self, **given: Any) -> Connection:
        self.calls.append(("connect", given["user"], given["dsn"]))
        return Connection(self)

    def create_pool(self, **given: Any) -> Pool:
        self.calls.append(("create_pool", given))
        return Pool(self, given["session_callback"])

    def ask(self, session: str, verb: str, statement: str = "") -> Any:
        try:
            return self.h2.ask(session, verb, statement)
        except H2Error as error:
            known = {**_NUMBERS, **_MORE}
            code = 0 if error.number in {50200, 90131} else known.get(error.number, 900)
            raise database_error(code, f"{error} ({statement[:300]})") from error


@dataclass
class Pool:
    module: StandIn
    session_callback: Any

    def acquire(self) -> Connection:
        connection = Connection(self.module)
        self.session_callback(connection, None)
        return connection

    def release(self, connection: Connection) -> None:
        connection.close()

    drop = release

    def close(self, force: bool) -> None:
        self.module.calls.append(("close_pool",))


class Connection:
    def __init__(self, module: StandIn) -> None:
        self.module = module
        self.session = f"s{next(_sessions)}"
        self.call_timeout = 0
        self.autocommit = True
        self._xid: str | None = None

    def cursor(self) -> Cursor:
        return Cursor(self)

    def ping(self) -> None:
        self.module.calls.append(("ping",))

    def commit(self) -> None:
        self.module.calls.append(("commit",))
        self.module.ask(self.session, "commit")

    def rollback(self) -> None:
        self.module.ask(self.session, "rollback")

    def close(self) -> None:
        self.module.calls.append(("close",))
        self.module.ask(self.session, "close")

    # Two phases

    def xid(self, form: int, name: str, branch: str) -> SimpleNamespace:
        return SimpleNamespace(form=form, name=name, branch=branch)

    def tpc_begin(self, xid: SimpleNamespace) -> None:
        self._do("tpc_begin", xid.name)
        self._xid = xid.name

    def tpc_end(self) -> None:
        self._do("tpc_end")

    def tpc_prepare(self) -> bool:
        self._do("tpc_prepare")
        if self._xid is None:
            raise database_error(24756, "transaction does not exist")
        self.module.parked[self._xid] = self.session
        self.session = f"s{next(_sessions)}"
        return True

    def tpc_commit(self, xid: SimpleNamespace) -> None:
        self._end("tpc_commit", "commit", xid.name)

    def tpc_rollback(self, xid: SimpleNamespace) -> None:
        self._end("tpc_rollback", "rollback", xid.name)

    def _end(self, call: str, verb: str, name: str) -> None:
        self._do(call, name)
        session = self.module.parked.pop(name, None)
        if session is None:
            raise database_error(24756, "transaction does not exist")
        self.module.ask(session, verb)
        self.module.ask(session, "close")

    def _do(self, *call: Any) -> None:
        self.module.calls.append(call)
        if call[0] in self.module.refuses:
            raise database_error(1031, f"insufficient privileges for {call[0]}")


class Cursor:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._rows: list[tuple[Any, ...]] = []
        self.rowcount = 0

    def __enter__(self) -> Cursor:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def execute(self, statement: str) -> None:
        module = self._connection.module
        module.calls.append(("execute", statement))
        if statement.startswith(("ALTER SESSION", "SET CONSTRAINTS")):
            return
        if "dba_pending_transactions" in statement:
            if "list" in module.refuses:
                raise database_error(942, "table or view does not exist")
            self._rows = [(name.encode(),) for name in module.parked]
            return
        statement = statement.removesuffix(" PURGE")
        if "SYSTIMESTAMP)" in statement:
            statement = "SELECT EXTRACT(EPOCH FROM CURRENT_TIMESTAMP) FROM DUAL"
        answer = module.ask(self._connection.session, "run", statement)
        if isinstance(answer, int):
            self.rowcount = answer
        else:
            self._rows = answer

    def fetchall(self) -> list[tuple[Any, ...]]:
        return self._rows

    def executemany(self, statement: str, rows: pa.Table, *, batcherrors: bool = False) -> None:
        self._batch_errors: list[Details] = []
        self._connection.module.calls.append(("executemany", statement, rows.schema))
        into = re.sub(r" VALUES \(.*\)$", " VALUES ", statement)
        columns = [rows.column(place).to_pylist() for place in range(rows.num_columns)]
        for offset, values in enumerate(zip(*columns, strict=True)):
            text = f"{into}({', '.join(map(_literal, values))})"
            try:
                self._connection.module.ask(self._connection.session, "run", text)
            except oracledb.DatabaseError as error:
                error.args[0].offset = offset
                if not batcherrors:
                    raise
                self._batch_errors.append(error.args[0])

    def getbatcherrors(self) -> list[Details]:
        return self._batch_errors


def _literal(value: Any) -> str:
    if value is None or value == "":
        return "NULL"
    if isinstance(value, bytes):
        return f"X'{value.hex()}'"
    if isinstance(value, int | float) or type(value).__name__ == "Decimal":
        return str(value)
    if hasattr(value, "isoformat"):
        return f"TIMESTAMP '{value.isoformat(sep=' ')}'"
    return "'" + str(value).replace("'", "''") + "'"
