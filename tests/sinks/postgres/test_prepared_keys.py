"""`strategy="prepared"` on tables with keys: first attempts prepare, others stage their rows."""

import pyarrow as pa
import pytest
from kit.sql.prepared_keys import *  # noqa: F403  every test there is one of this module, too
from kit.sql.prepared_keys import attempt, ids


def test_tasks_beyond_tasks_max_stage_their_rows(orders, some):
    life = orders.life(strategy="prepared", tasks_max=1)
    receipts = life.write(0, some(1), some(2), some(3))
    assert ["slot" in one.token for one in receipts] == [False, True, True]
    assert (ids(orders), orders.leftovers()) == ([1, 2, 3], [])


@pytest.mark.parametrize("place", ["columns", "bytes"], indirect=True)
def test_a_retry_stages_values_as_the_columns_keep_them(place):
    place.sql(f"CREATE TYPE {place.schema}.mood AS ENUM ('glad', 'sad')")
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint PRIMARY KEY, name varchar(9), real_ real,"
        f" mood {place.schema}.mood, at timestamptz, day date, price numeric(9, 2))"
    )
    rows = pa.table(
        {
            "id": pa.array([1, 2], pa.int32()),
            "name": ["a", None],
            "real_": pa.array([1.5, 2.5], pa.float32()),
            "mood": ["glad", "sad"],
            "at": pa.array([0, 1], pa.timestamp("us", "UTC")),
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

    assert "strategy='prepared' would fit" in once().because
    assert "from staging" in once(strategy="prepared").because
    assert once(strategy="prepared").granted
    assert "has no mode='upsert'" in once(mode="upsert", keys="id").because
    assert "max_prepared_transactions" in once(tasks_max=65).because
