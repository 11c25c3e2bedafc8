"""`strategy="prepared"` on tables with keys: first attempts prepare, others stage their rows."""

import pyarrow as pa
import pytest
from kit.sql.prepared_keys import *  # noqa: F403  every test there is one of this module, too
from kit.sql.prepared_keys import attempt, held, ids, left_open

pytestmark = pytest.mark.products("mariadb", "mysql")


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


def test_a_retry_stages_values_as_the_columns_keep_them(place):
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9),"
        " real_ float, mood enum('glad', 'sad'), at datetime(3), day date, price decimal(9, 2))"
    )
    rows = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "name": ["a", None],
            "real_": pa.array([1.5, 2.5], pa.float32()),
            "mood": ["glad", "sad"],
            "at": pa.array([0, 1000], pa.timestamp("us", "UTC")),
            "day": pa.array([0, 1], pa.date32()),
            "price": pa.array([None, "1.25"]).cast(pa.decimal128(9, 2)),
        }
    )
    life = place.life(strategy="prepared")
    life.start(rows)
    seen = []
    for epoch, is_first in enumerate([True, False]):
        receipt = attempt(life, epoch, 0, rows, is_first=is_first)
        life.rehearse(epoch, [receipt])
        life.commit(epoch, [receipt])
        seen.append(place.rows())
        place.sql(f"DELETE FROM {place.schema}.orders")
    assert seen[0] == seen[1]
    assert len(seen[0]) == 2


def test_the_check_says_which_strategy_fits(keyed, some):
    def once(**options):
        found = keyed.life(name=str(options), **options).committer.check(some(1).schema)
        (said,) = [one for one in found if one.name == "rows written once"]
        return said

    needed = "BINLOG REPLAY" if keyed.is_mariadb else "XA_RECOVER_ADMIN"
    assert "strategy='prepared' would fit this table and server" in once().because
    assert needed in once().because
    assert "from staging" in once(strategy="prepared").because
    assert once(strategy="prepared").granted
    assert "has no mode='upsert'" in once(mode="upsert", keys="id").because
