"""Slots that a DBA made, on MariaDB and MySQL: the general log has all statements."""

from __future__ import annotations

import pytest
from kit.sql.fixed_staging import *  # noqa: F403  every test there is one of this module, too
from kit.sql.fixed_staging import Dba

pytestmark = pytest.mark.products("mariadb", "mysql")


@pytest.fixture
def dba(place):
    account = f"fixed_{place.schema}"
    place.make_account(account)
    place.sql("SET GLOBAL log_output = 'TABLE'")
    place.sql("SET GLOBAL general_log = 1")

    def ddl() -> list[str]:
        rows = place.sql(
            f"SELECT argument FROM mysql.general_log WHERE user_host LIKE '%{account}%'"
            " AND argument RLIKE '^ *(CREATE|DROP|ALTER|TRUNCATE|RENAME)'"
        )
        return [str(text) for (text,) in rows]

    try:
        yield Dba(url=place.url(user=account), ddl=ddl)
    finally:
        place.sql("SET GLOBAL general_log = 0")
        for life in place.lives:
            life.close()
        place.sql(f"DROP USER {account}")
