"""Oracle's errors.

Those of the library itself (DPY-4…, DPY-6…) and those that end a session came from the network.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import oracledb

from epochal.kit.sql.faults import Faults

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
_RAISED_BY_TRIGGERS = frozenset(range(20000, 21000))
_CALL_TIMEOUT = "DPY-4024"
_HINTS: Mapping[int, str] = {
    942: "create the table, or create_table='if_missing'; without SELECT on it it is not seen",
    1017: "check user and password: password=env(…) or file(…)",
    1031: "the least that this sink needs is printed by its grants()",
    1536: "the tablespace quota of the user is used up",
    1653: "the tablespace has no room left",
    1950: "GRANT the user a quota on a tablespace: grants() prints it",
    60: "a deadlock with somebody else's transaction",
    54: "somebody else holds a lock: V$LOCK and V$SESSION say who",
}


class OracleFaults(Faults):
    errors: ClassVar[tuple[type[Exception], ...]] = (oracledb.Error, OSError)
    duplicate: ClassVar[int] = 1
    missing: ClassVar[frozenset[int]] = frozenset({942, 4043})
    lock_waits: ClassVar[frozenset[int]] = frozenset({54, 4021, 30006})
    not_prepared: ClassVar[frozenset[int]] = frozenset({2058, 24756})
    transient: ClassVar[frozenset[int]] = _TRANSIENT
    data: ClassVar[frozenset[int]] = _DATA | _RAISED_BY_TRIGGERS
    hints: ClassVar[Mapping[int, str]] = _HINTS

    def number_of(self, error: BaseException) -> int:
        return int(_detail(error, "code") or 0)

    def is_network(self, error: BaseException) -> bool:
        return (
            isinstance(error, OSError)
            or self.number_of(error) in _CONNECTION_GONE
            or _code(error).startswith(("DPY-1001", "DPY-4", "DPY-6"))
        )

    def is_lock_wait(self, error: BaseException) -> bool:
        # The patience of DML for a lock is the time that its call may take.
        return super().is_lock_wait(error) or _code(error) == _CALL_TIMEOUT

    def hint(self, error: BaseException) -> str:
        if _code(error) == _CALL_TIMEOUT:
            return "a statement took longer than statement_timeout_s, or waited for somebody's lock"
        return super().hint(error)

    def told(self, error: BaseException) -> str:
        first = " ".join(str(error).split("Help:")[0].split())
        return first or type(error).__name__


FAULTS = OracleFaults()


def offset_of(error: BaseException) -> int | None:
    """Which of many rows it was, where the server says so."""
    offset = _detail(error, "offset")
    return offset if isinstance(offset, int) else None


def _code(error: BaseException) -> str:
    """`ORA-00001`, or `DPY-…` where it is the library's own."""
    return str(_detail(error, "full_code") or "")


def _detail(error: BaseException, name: str) -> Any:
    return getattr(error.args[0] if error.args else None, name, None)
