"""`session_sql` and passwords by a function, on MariaDB and MySQL."""

import pytest
from kit.sql.connections import *  # noqa: F403  every test there is one of this module, too
from kit.sql.connections import PASSWORD

pytestmark = pytest.mark.products("mariadb", "mysql")


@pytest.fixture
def set_and_seen(orders):
    return "SET @said = 'from the session'", [
        f"CREATE TRIGGER {orders.schema}.t BEFORE INSERT ON {orders.schema}.orders"
        " FOR EACH ROW SET NEW.name = @said"
    ]


@pytest.fixture
def account(orders):
    orders.make_account("tokens", PASSWORD)
    for statement in orders.sink(url=orders.url(user="tokens")).grants():
        orders.sql(statement)
    yield orders.url(user="tokens")
    orders.sql("DROP USER tokens")
