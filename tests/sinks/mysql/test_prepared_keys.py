"""`strategy="prepared"` on tables with keys: first attempts prepare, others stage their rows."""

import pytest
from kit.sql.prepared_keys import *  # noqa: F403  every test there is one of this module, too
from kit.sql.prepared_keys import attempt, held, ids, left_open, said_of_strategy

pytestmark = pytest.mark.products("mariadb", "mysql")


@pytest.fixture
def varied(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9),"
        " real_ float, mood enum('glad', 'sad'), at datetime(3), day date, price decimal(9, 2))"
    )
    return place


def test_a_first_attempt_stages_its_rows_while_one_of_an_older_driver_is_open(keyed, life, some):
    zombie = left_open(life, 0, 0, some(1, 2))
    newer = keyed.keep(life.fresh(generation=2))
    newer.start(some(1))
    receipt = attempt(newer, 0, 0, some(1, 2), is_first=True)
    assert "slot" in receipt.token
    newer.rehearse(0, [receipt])
    newer.commit(0, [receipt])
    zombie.abort()
    assert (ids(keyed), keyed.leftovers()) == ([1, 2], [])


def test_open_attempts_of_an_older_driver_in_other_partitions_are_ended(keyed, life, some):
    zombie = left_open(life, 0, 3, some(1, 2))
    newer = keyed.keep(life.fresh(generation=2))
    newer.start(some(1))
    receipt = attempt(newer, 0, 0, some(1, 2))
    newer.rehearse(0, [receipt])
    newer.commit(0, [receipt])
    zombie.abort()
    assert (ids(keyed), keyed.leftovers()) == ([1, 2], [])


def test_keys_below_a_view_may_collide(keyed, some):
    keyed.sql(f"CREATE VIEW {keyed.schema}.v AS SELECT id, name FROM {keyed.schema}.orders")
    life = keyed.life("v", strategy="prepared", lock_timeout_s=2)
    life.start(some(1))
    orphan, retry = attempt(life, 0, 0, some(1), is_first=True), attempt(life, 0, 0, some(1))
    assert held(life) == {orphan.handle, retry.handle}
    life.rehearse(0, [retry])
    life.commit(0, [retry])
    assert (ids(keyed), keyed.leftovers()) == ([1], [])


def test_the_check_names_the_right_that_prepared_needs(keyed, some):
    needed = "BINLOG REPLAY" if keyed.is_mariadb else "XA_RECOVER_ADMIN"
    assert needed in said_of_strategy(keyed, some).because
