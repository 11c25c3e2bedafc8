"""`strategy="prepared"` on tables with keys: first attempts prepare, others stage their rows."""

import pytest
from kit.sql.prepared_keys import *  # noqa: F403  every test there is one of this module, too
from kit.sql.prepared_keys import ids, said_of_strategy


@pytest.fixture
def varied(place):
    place.sql(f"CREATE TYPE {place.schema}.mood AS ENUM ('glad', 'sad')")
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9), real_ real,"
        f" mood {place.schema}.mood, at timestamptz, day date, price numeric(9, 2))"
    )
    return place


def test_tasks_beyond_tasks_max_stage_their_rows(orders, some):
    life = orders.life(strategy="prepared", tasks_max=1)
    receipts = life.write(0, some(1), some(2), some(3))
    assert ["slot" in one.token for one in receipts] == [False, True, True]
    assert (ids(orders), orders.leftovers()) == ([1, 2, 3], [])


def test_the_check_names_the_setting_that_prepared_needs(keyed, some):
    assert "max_prepared_transactions" in said_of_strategy(keyed, some, tasks_max=65).because
