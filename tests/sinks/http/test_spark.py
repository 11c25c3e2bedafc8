"""A Spark pipeline into a receiver, a keyed service and a function at once."""

from __future__ import annotations

import pytest
from sinks.callback.called import Keeper
from sinks.http.conftest import TOKEN

import epochal as ep


@pytest.fixture
def pipeline(receiver, service, tmp_path):
    spool = tmp_path / "spool"
    return ep.Pipeline(
        "three",
        sinks=[
            ep.Http(receiver.url, token=TOKEN, name="in spark", where="id % 2 = 0"),
            ep.Http(
                service.url, mode="idempotency-key", spool=spool, rows_per_call=50, name="keyed"
            ),
            ep.Callback(Keeper(str(tmp_path / "called.db")), spool=spool, name="called"),
        ],
    )


def test_one_batch_reaches_all_three_once(spark, pipeline, receiver, service, tmp_path):
    rows = spark.range(0, 300, 1, 3)
    checkpoint = f"file://{tmp_path}/checkpoint"
    for _ in range(2):
        pipeline.write(rows, run="once", checkpoint=checkpoint)
    assert sorted(row["id"] for row in receiver.rows("in spark")) == list(range(0, 300, 2))
    assert sorted(row["id"] for row in service.rows()) == list(range(300))
    assert max(service.calls.values()) == 1
    keeper = Keeper(str(tmp_path / "called.db"))
    assert sorted(row["id"] for row in keeper.rows()) == list(range(300))
    assert len(keeper.calls()) == 1
    assert list((tmp_path / "spool" / "rows").rglob("*.arrow")) == []
