"""Tables that are altered between two epochs, under a task, and before rows are applied."""

import pytest
from kit.sql.altered_tables import *  # noqa: F403  every test there is one of this module, too

from epochal.errors import Misconfigured

pytestmark = pytest.mark.products("mariadb", "mysql")
INDEXES = pytest.mark.parametrize(
    ("altered", "why"),
    [
        ("DROP PRIMARY KEY", "no primary key or unique index"),
        ("ADD UNIQUE (name)", "equal by the unique index name"),
    ],
)


@pytest.fixture
def named(place):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9))")
    return place


@INDEXES
def test_an_index_that_comes_or_goes_between_two_epochs_stops_upserts(named, some, altered, why):
    """ON DUPLICATE KEY would insert rows twice, or change those of other keys."""
    life = named.life(mode="upsert", keys="id")
    life.write(0, some(1, 2))
    named.sql(f"ALTER TABLE {named.schema}.orders {altered}")
    with pytest.raises(Misconfigured, match=why):
        life.write(1, some(2, 3))
    assert named.rows(columns="id") == [(1,), (2,)]


@INDEXES
def test_an_index_that_comes_or_goes_once_rows_are_staged_stops_upserts(named, some, altered, why):
    life = named.life(mode="upsert", keys="id")
    life.write(0, some(1, 2))
    receipts = [life.prepare(some(2, 3), 1)]
    named.sql(f"ALTER TABLE {named.schema}.orders {altered}")
    for step in (life.rehearse, life.commit):
        with pytest.raises(Misconfigured, match=why):
            step(1, receipts)
    assert named.rows(columns="id") == [(1,), (2,)]


def test_an_engine_without_transactions_under_a_running_driver_is_refused(named, some):
    """Its rows would be visible before the decision."""
    life = named.life()
    life.write(0, some(1, 2))
    receipts = [life.prepare(some(3), 1)]
    named.sql(f"ALTER TABLE {named.schema}.orders ENGINE=MyISAM")
    with pytest.raises(Misconfigured, match="MyISAM, whose rows do not commit"):
        life.rehearse(1, receipts)
    with pytest.raises(Misconfigured, match="MyISAM, whose rows do not commit"):
        life.write(1, some(3))
    assert named.rows(columns="id") == [(1,), (2,)]
