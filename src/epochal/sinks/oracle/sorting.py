"""What a server's or the library's error means for what we may do next.

The number decides, never the text. Errors of the library itself (DPY-4…, DPY-6…) and those that end
a session came from the network: where one met a COMMIT nobody knows what became of it (I9).
"""

from __future__ import annotations

import oracledb

from epochal.errors import (
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    RowRejected,
    TryAgain,
)

DUPLICATE = 1
_MISSING = frozenset({942, 4043})
_LOCK_WAITS = frozenset({54, 4021, 30006})
_NOT_PREPARED = frozenset({2058, 24756})
_CONNECTION_GONE = frozenset(
    {
        *(28, 1012, 1033, 1034, 1041, 1089, 1090, 1092, 2396, 3113, 3114, 3135),
        *(12514, 12528, 12537, 12541, 12547, 12570, 12571, 25408),
    }
)
_TRANSIENT = frozenset(
    {
        *(18, 20, 54, 60, 1013, 1536, 1562, 1628, 1652, 1653, 1654, 1688, 4021, 4031, 8177),
        *(12516, 12518, 12519, 12520, 24761, 30006, 51),
    }
)
_DATA = frozenset(
    {
        *(1, 1400, 1401, 1407, 1426, 1438, 1455, 1461, 1722, 1830, 1839, 1840, 1841, 1843),
        *(1847, 1849, 1850, 1851, 1858, 1861, 2290, 2291, 2292, 12899, 14400, 40441, 40478),
    }
)
_APPLICATION = range(20000, 21000)
"""What triggers raise by themselves."""
_CALL_TIMEOUT = "DPY-4024"
_HINTS = {
    942: "create the table, or create_table='if_missing'; without SELECT on it it is not seen",
    1017: "check user and password: password=env(…) or file(…)",
    1031: "the least that this sink needs is printed by its grants()",
    1536: "the tablespace quota of the user is used up",
    1653: "the tablespace has no room left",
    1950: "GRANT the user a quota on a tablespace: grants() prints it",
    60: "a deadlock with somebody else's transaction",
    54: "somebody else holds a lock: V$LOCK and V$SESSION say who",
}

ERRORS: tuple[type[Exception], ...] = (oracledb.Error, OSError)


def _details(error: BaseException) -> tuple[int, str]:
    """The number of an ORA- error (0 for others), and its whole code."""
    told = error.args[0] if error.args else None
    return int(getattr(told, "code", 0) or 0), str(getattr(told, "full_code", "") or "")


def number_of(error: BaseException) -> int:
    return _details(error)[0]


def offset_of(error: BaseException) -> int | None:
    """Which of many rows it was, where the server says so."""
    offset = getattr(error.args[0] if error.args else None, "offset", None)
    return offset if isinstance(offset, int) else None


def is_network(error: BaseException) -> bool:
    number, code = _details(error)
    if isinstance(error, OSError):
        return True
    return number in _CONNECTION_GONE or code.startswith(("DPY-1001", "DPY-4", "DPY-6"))


def is_data_error(error: BaseException) -> bool:
    number = number_of(error)
    return number in _DATA or number in _APPLICATION


def is_lock_wait(error: BaseException) -> bool:
    number, code = _details(error)
    return number in _LOCK_WAITS or code == _CALL_TIMEOUT


def is_missing(error: BaseException) -> bool:
    return number_of(error) in _MISSING


def is_not_prepared(error: BaseException) -> bool:
    return number_of(error) in _NOT_PREPARED


def told(error: BaseException) -> str:
    """The server's own words, in one line, its number among them."""
    first = " ".join(str(error).split("Help:")[0].split())
    return first or type(error).__name__


def sorted_error(error: Exception, doing: str, *, is_commit: bool = False) -> EpochalError:
    """The same error as one of ours. `is_commit`: a lost reply leaves the outcome open."""
    if isinstance(error, EpochalError):
        return error
    number, code = _details(error)
    fact, hint = f"{doing}: {told(error)}", _HINTS.get(number, "")
    if code == _CALL_TIMEOUT:
        hint = "a statement took longer than statement_timeout_s, or waited for somebody's lock"
    if is_network(error):
        return (OutcomeUnknown if is_commit else TryAgain)(fact, hint)
    if number in _TRANSIENT:
        return TryAgain(fact, hint)
    if is_data_error(error):
        return RowRejected(fact, hint)
    return Misconfigured(fact, hint)
