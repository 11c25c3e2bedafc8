"""The server's errors, sorted by what the caller may do next.

The SQLSTATE decides, never the text, which is translated. An error without one came from the
network: where it met a COMMIT nobody knows what became of it (I9), anywhere else nothing did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
import psycopg_pool

from epochal.errors import (
    EpochalError,
    InvariantBroken,
    Misconfigured,
    OutcomeUnknown,
    RowRejected,
    TryAgain,
)

LOCK_NOT_AVAILABLE = "55P03"
UNDEFINED_OBJECT = "42704"
UNDEFINED_TABLE = "42P01"
UNDEFINED_SCHEMA = "3F000"
OBJECT_BUSY = "55000"
CARDINALITY = "21000"
BAD_ENCODING = "22021"
TOO_MANY_PREPARED = "53200"
_UNANSWERED = frozenset({"57P01", "57P02", "57P03", "57P05", "25P03", "25P04", "40003"})
"""The server ended the session, will not begin one yet, or says itself that it does not know."""
_TRANSIENT = frozenset({"40001", "40P01", LOCK_NOT_AVAILABLE, "57014", "58000", "58030"})
_TRANSIENT_CLASSES = ("08", "53")
_DATA_CLASSES = ("22", "23")
_HINTS = {
    "28": "check user and password; password=env(…) or file(…), or a pgpass or service file",
    "3D": "create the database, or name another one in the URL",
    "42501": "the least that this sink needs is printed by its grants()",
    "25006": "a standby, or a role that is read-only by default: the url must reach the primary",
    "42P01": "create the table, or create_table='if_missing'",
    "42703": "the table was altered, or delete_when= names a field that does not arrive (a name "
    "with capitals stands in double quotes there)",
    "53": "the server is out of room, memory or connections",
    "57014": "the statement took longer than statement_timeout_s",
    LOCK_NOT_AVAILABLE: "somebody else holds a lock for longer than lock_timeout_s: "
    "pg_locks and pg_stat_activity say who",
}


def sqlstate_of(error: BaseException) -> str | None:
    state = getattr(error, "sqlstate", None)
    return str(state) if state else None


def is_of_server(error: BaseException) -> bool:
    """From the server or the way to it, by whichever library; not from code."""
    is_adbc = type(error).__module__ == "adbc_driver_manager"
    return is_adbc or isinstance(error, psycopg.Error) or sqlstate_of(error) is not None


def is_data_error(error: BaseException) -> bool:
    """The server refuses what is in the rows, whoever asks and however often."""
    state = sqlstate_of(error)
    return state is not None and (state[:2] in _DATA_CLASSES or state == CARDINALITY)


def is_lock_wait(error: BaseException) -> bool:
    return sqlstate_of(error) == LOCK_NOT_AVAILABLE


def is_missing(error: BaseException) -> bool:
    """There is no such schema or table."""
    return sqlstate_of(error) in {UNDEFINED_TABLE, UNDEFINED_SCHEMA}


def told(error: BaseException) -> str:
    """The server's own words, in one line."""
    diagnostics = getattr(error, "diag", None)
    parts: list[Any] = []
    if diagnostics is not None and diagnostics.message_primary:
        parts = [diagnostics.message_primary, diagnostics.message_detail]
    else:
        details = {bytes(k): v for k, v in getattr(error, "details", None) or ()}
        for key in (b"PG_DIAG_MESSAGE_PRIMARY", b"PG_DIAG_MESSAGE_DETAIL"):
            value = details.get(key)
            parts.append(value.decode(errors="replace") if isinstance(value, bytes) else value)
    words = "; ".join(str(part) for part in parts if part) or str(error)
    return " ".join(words.split())


def sorted_error(  # noqa: PLR0911  one line a kind of error
    error: Exception, doing: str, *, is_commit: bool = False, secret: str = ""
) -> EpochalError:
    """The same error as one of ours. `is_commit`: a lost reply leaves the outcome open."""
    if isinstance(error, EpochalError):
        return error
    state = sqlstate_of(error)
    fact = f"{doing}: {told(error)}" + (f" [{state}]" if state else "")
    if secret:
        fact = fact.replace(secret, "…")
    hint = _hint(state)
    if isinstance(error, psycopg_pool.PoolTimeout | psycopg_pool.TooManyRequests):
        return TryAgain(fact, "all connections of the pool are in use: a larger pool_max")
    if state is None or state[:2] == "08" or state in _UNANSWERED:
        return (OutcomeUnknown if is_commit else TryAgain)(fact, hint)
    if state in _TRANSIENT or state[:2] in _TRANSIENT_CLASSES:
        return TryAgain(fact, hint)
    if is_data_error(error):
        return RowRejected(fact, hint)
    if state[:2] == "XX":
        return InvariantBroken(fact, "the server reports an internal error: see its log")
    return Misconfigured(fact, hint)


def _hint(state: str | None) -> str:
    if state is None:
        return ""
    return _HINTS.get(state) or _HINTS.get(state[:2], "")


@contextmanager
def sorting(doing: str, *, is_commit: bool = False) -> Iterator[None]:
    try:
        yield
    except (psycopg.Error, psycopg_pool.PoolTimeout) as error:
        raise sorted_error(error, doing, is_commit=is_commit) from error
