"""MySQL's and MariaDB's errors, by number. The client's own (0, 2xxx) mean the network."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import ClassVar

import pymysql

from epochal.kit.sql.errors import GRANTS, Code, ErrorTable

_CONNECTION_GONE = frozenset({1053, 1077, 1079, 1152, 1158, 1159, 1160, 1161, 1184, 1927, 4031})
"""The server ended the session, or is about to end itself."""
_TRANSIENT = frozenset(
    {
        *(1021, 1030, 1037, 1038, 1040, 1041, 1047, 1114, 1180, 1203, 1205, 1213, 1226, 1290),
        *(1317, 1412, 1613, 1614, 1615, 1792, 1836, 1969, 3024, 3032, 3100, 3101, 3572),
    }
)
INTERRUPTED = frozenset({1317, 1969})
"""A statement was cancelled, or took too long."""
_DATA = frozenset(
    {
        *(1048, 1062, 1118, 1169, 1216, 1217, 1263, 1264, 1265, 1292, 1300, 1364, 1365, 1366),
        *(1367, 1369, 1406, 1411, 1416, 1451, 1452, 1525, 1526, 1557, 1586, 1591, 1643, 1644),
        *(1690, 1748, 1859, 1977, 3140, 3155, 3156, 3819, 3903, 3988, 4025, 4078),
    }
)
_SIGNALLED = "45"
"""The class of SQLSTATEs that triggers raise by SIGNAL, under a number that their author chose."""
TOO_MANY = (
    "all connections that the server or the user may have are in use: end some (SHOW PROCESSLIST "
    "shows whose), raise max_connections or the user's limit, or a smaller pool_max"
)
_HINTS: Mapping[Code, str] = {
    1040: TOO_MANY,
    1203: TOO_MANY,
    1226: TOO_MANY,
    1044: GRANTS,
    1045: "check user and password: password=env(…) or file(…)",
    1047: "a node of a cluster that is not ready, or apart from the others",
    1049: "create the database, or name another one in the url",
    1114: "the server has no room left",
    1142: GRANTS,
    1143: GRANTS,
    1146: "create the table, or create_table='if_missing'",
    1054: "the table was altered, or delete_when= names a field that does not arrive",
    1205: "somebody else holds a lock for longer than lock_timeout_s: SHOW FULL PROCESSLIST and "
    "information_schema.INNODB_TRX show who",
    1227: GRANTS,
    1290: "a replica, or a server that is read-only: the url must reach the primary",
    1665: "the server writes its binary log by statements: binlog_format=ROW or MIXED",
    1792: "a server whose transactions are read-only: the url must reach one that takes writes",
    1836: "a replica, or a server that is read-only: the url must reach the primary",
    1969: "a larger statement_timeout_s",
    3024: "a larger statement_timeout_s",
    3140: "correct it in the query, or have such rows go elsewhere: on_reject=",
    3948: "SET GLOBAL local_infile = 1 on the server",
}


class MySQLErrors(ErrorTable):
    errors: ClassVar[tuple[type[Exception], ...]] = (pymysql.MySQLError, OSError)
    duplicate: ClassVar[Collection[Code]] = frozenset({1062})
    missing: ClassVar[Collection[Code]] = frozenset({1049, 1051, 1146})
    lock_waits: ClassVar[Collection[Code]] = frozenset({1205})
    deadlocks: ClassVar[Collection[Code]] = frozenset({1213})
    not_prepared: ClassVar[Collection[Code]] = frozenset({1397})
    transient: ClassVar[Collection[Code]] = _TRANSIENT
    data: ClassVar[Collection[Code]] = _DATA
    hints: ClassVar[Mapping[Code, str]] = _HINTS

    def code_of(self, error: BaseException) -> int:
        number = error.args[0] if error.args else 0
        return number if isinstance(number, int) else 0

    def is_data_error(self, error: BaseException) -> bool:
        is_signalled = self.sqlstate(error).startswith(_SIGNALLED) and self.may_be_rows(error)
        return is_signalled or super().is_data_error(error)

    def is_network(self, error: BaseException) -> bool:
        number = self.code_of(error)
        is_clients = number == 0 or 2000 <= number < 3000
        return is_clients or number in _CONNECTION_GONE or isinstance(error, OSError)

    def text_of(self, error: BaseException) -> str:
        text = str(error.args[1]) if len(error.args) > 1 else str(error) or type(error).__name__
        return f"{' '.join(text.split())} [{self.code_of(error)}]"


ERRORS = MySQLErrors()
