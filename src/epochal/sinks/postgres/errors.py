"""PostgreSQL's errors, by SQLSTATE. An error without one came from the network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import psycopg
import psycopg_pool

from epochal.errors import EpochalError, InvariantBroken, TryAgain
from epochal.kit.sql.errors import GRANTS, Code, ErrorTable

_LOCK_NOT_AVAILABLE = "55P03"
_CARDINALITY = "21000"
TOO_MANY_PREPARED = "53200"
UNSUPPORTED = "0A000"
_READ_ONLY = "25006"
_BEGUN_ON_STANDBY = (UNSUPPORTED, "call_bool_check_hook")
"""What BEGIN … READ WRITE answers there: a pooler may have led to it. No other begin has it."""
ALTERED = "40001"
"""Raised by ourselves: the table was altered under a task, and only the whole epoch helps."""
SHORT = "YE001"
"""Raised by ourselves: a statement of a message changed other rows than those after it need."""
_OTHER_BYTES = "22P03"
"""The server reads other types than those that were laid out."""
_UNANSWERED = frozenset({"08", "57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "40003"})
"""The server ended the session, will not begin one yet, or reports that it does not know."""
_INTERNAL = frozenset({"XX"})
_ROW_CHECKS = frozenset({"ExecWithCheckOptions", "exec_stmt_raise"})
"""
The server's functions that refuse a row by row-level security and by RAISE. The code alone does not
show it: the first has that of missing privileges, the second any that the trigger's author chose.
"""
_HINTS: Mapping[Code, str] = {
    "28": "check user and password; password=env(…) or file(…), or a pgpass or service file",
    "3D": "create the database, or name another one in the URL",
    "42501": GRANTS,
    _READ_ONLY: "a standby, or a role that is read-only by default: the url must reach the primary",
    "42P01": "create the table, or create_table='if_missing'",
    "42703": "the table was altered, or delete_when= names a field that does not arrive (a name "
    "with capitals needs double quotes there)",
    _OTHER_BYTES: "the table was altered while rows were copied into it",
    "53": "the server is out of disk space, memory or connections: see its log",
    "57014": "a larger statement_timeout_s; or somebody cancelled it (pg_cancel_backend)",
    _LOCK_NOT_AVAILABLE: "somebody else holds a lock for longer than lock_timeout_s: "
    "pg_locks and pg_stat_activity show who",
}


class PostgresErrors(ErrorTable):
    """A code of two characters means the whole class."""

    errors: ClassVar[tuple[type[Exception], ...]] = (psycopg.Error, psycopg_pool.PoolTimeout)
    duplicate: ClassVar[Collection[Code]] = frozenset({"23505"})
    missing: ClassVar[Collection[Code]] = frozenset({"42P01", "3F000"})
    lock_waits: ClassVar[Collection[Code]] = frozenset({_LOCK_NOT_AVAILABLE})
    deadlocks: ClassVar[Collection[Code]] = frozenset({"40P01"})
    not_prepared: ClassVar[Collection[Code]] = frozenset({"42704", "55000"})
    """There is none of this name; another session is ending it."""
    transient: ClassVar[Collection[Code]] = frozenset(
        {
            *(_READ_ONLY, "40001", "40P01", _OTHER_BYTES, _LOCK_NOT_AVAILABLE, "57014"),
            *("58000", "58030", "08", "53"),
        }
    )
    data: ClassVar[Collection[Code]] = frozenset(
        {"22", "23", "38", "44", "54000", "P0001", _CARDINALITY}
    )
    corrupt: ClassVar[Collection[Code]] = frozenset({"XX001", "XX002"})
    hints: ClassVar[Mapping[Code, str]] = _HINTS

    def code_of(self, error: BaseException) -> str:
        return str(getattr(error, "sqlstate", None) or "")

    def is_one_of(self, error: BaseException, codes: Collection[Code]) -> bool:
        code = self.code_of(error)
        return code in codes or code[:2] in codes

    def is_data_error(self, error: BaseException) -> bool:
        is_of_row = _function(error) in _ROW_CHECKS and self.may_be_rows(error)
        return is_of_row or super().is_data_error(error)

    def is_network(self, error: BaseException) -> bool:
        return not self.code_of(error) or self.is_one_of(error, _UNANSWERED)

    def is_short(self, error: BaseException) -> bool:
        return self.code_of(error) == SHORT

    def is_repeated_key(self, error: BaseException) -> bool:
        """An upsert would change one row twice."""
        return self.code_of(error) == _CARDINALITY

    def is_from_database(self, error: BaseException) -> bool:
        is_adbc = type(error).__module__ == "adbc_driver_manager"
        return is_adbc or isinstance(error, psycopg.Error) or bool(self.code_of(error))

    def text_of(self, error: BaseException) -> str:
        diagnostics = getattr(error, "diag", None)
        parts: list[Any] = []
        if diagnostics is not None and diagnostics.message_primary:
            parts = [diagnostics.message_primary, diagnostics.message_detail]
        else:
            details = {bytes(k): v for k, v in getattr(error, "details", None) or ()}
            for key in (b"PG_DIAG_MESSAGE_PRIMARY", b"PG_DIAG_MESSAGE_DETAIL"):
                value = details.get(key)
                parts.append(value.decode(errors="replace") if isinstance(value, bytes) else value)
        text = "; ".join(str(part) for part in parts if part) or str(error)
        code = self.code_of(error)
        return " ".join(text.split()) + (f" [{code}]" if code else "")

    def hint(self, error: BaseException) -> str:
        code = self.code_of(error)
        ours = self.hints.get(code) or self.hints.get(code[:2])
        return ours or getattr(getattr(error, "diag", None), "message_hint", None) or ""

    def classify(self, error: Exception, doing: str, *, is_commit: bool = False) -> EpochalError:
        if isinstance(error, psycopg_pool.PoolTimeout | psycopg_pool.TooManyRequests):
            return TryAgain(
                f"{doing}: {self.text_of(error)}",
                "all connections of the pool are in use: a larger pool_max",
            )
        if (self.code_of(error), _function(error)) == _BEGUN_ON_STANDBY:
            return TryAgain(f"{doing}: {self.text_of(error)}", self.hints[_READ_ONLY])
        if self.is_one_of(error, _INTERNAL):
            return InvariantBroken(
                f"{doing}: {self.text_of(error)}",
                "the server reports an internal error: see its log",
            )
        return super().classify(error, doing, is_commit=is_commit)


def _function(error: BaseException) -> str | None:
    """Of the server, which raised it."""
    return getattr(getattr(error, "diag", None), "source_function", None)


ERRORS = PostgresErrors()
