"""Oracle's errors, by number. The client's own (DPY-4…, DPY-6…) mean the network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import oracledb

from epochal.kit.sql.errors import GRANTS, Code, ErrorTable

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
_HINTS: Mapping[Code, str] = {
    942: "create the table, or create_table='if_missing'; without SELECT on it it is not seen",
    1017: "check user and password: password=env(…) or file(…)",
    1031: GRANTS,
    1536: "the tablespace quota of the user is used up",
    1653: "the tablespace has no room left",
    1950: "GRANT the user a quota on a tablespace: grants() prints it",
    60: "a deadlock with somebody else's transaction",
    54: "somebody else holds a lock: V$LOCK and V$SESSION show who",
}


class OracleErrors(ErrorTable):
    errors: ClassVar[tuple[type[Exception], ...]] = (oracledb.Error, OSError)
    duplicate: ClassVar[Collection[Code]] = frozenset({1})
    missing: ClassVar[Collection[Code]] = frozenset({942, 4043})
    exists: ClassVar[Collection[Code]] = frozenset({955})
    lock_waits: ClassVar[Collection[Code]] = frozenset({54, 4021, 30006})
    deadlocks: ClassVar[Collection[Code]] = frozenset({60})
    not_prepared: ClassVar[Collection[Code]] = frozenset({2058, 24756})
    transient: ClassVar[Collection[Code]] = _TRANSIENT
    data: ClassVar[Collection[Code]] = _DATA | _RAISED_BY_TRIGGERS
    hints: ClassVar[Mapping[Code, str]] = _HINTS

    def code_of(self, error: BaseException) -> int:
        return int(_detail(error, "code") or 0)

    def is_network(self, error: BaseException) -> bool:
        return (
            isinstance(error, OSError)
            or self.code_of(error) in _CONNECTION_GONE
            or _code(error).startswith(("DPY-1001", "DPY-4", "DPY-6"))
        )

    def is_lock_wait(self, error: BaseException) -> bool:
        # DML waits for a lock as long as its call may take.
        return super().is_lock_wait(error) or _code(error) == _CALL_TIMEOUT

    def hint(self, error: BaseException) -> str:
        if _code(error) == _CALL_TIMEOUT:
            return "a statement took longer than statement_timeout_s, or waited for a lock"
        return super().hint(error)

    def text_of(self, error: BaseException) -> str:
        first = " ".join(str(error).split("Help:")[0].split())
        return first or type(error).__name__


ERRORS = OracleErrors()


def offset_of(error: BaseException) -> int | None:
    """The place of the row among many, where the server reports it."""
    offset = _detail(error, "offset")
    return offset if isinstance(offset, int) else None


def _code(error: BaseException) -> str:
    """`ORA-00001`, or `DPY-…` where it is the library's own."""
    return str(_detail(error, "full_code") or "")


def _detail(error: BaseException, name: str) -> Any:
    return getattr(error.args[0] if error.args else None, name, None)
