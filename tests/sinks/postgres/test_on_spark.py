"""Through the pipeline door: tables that share a transaction, and what they refuse."""

from __future__ import annotations

import pytest

from epochal.errors import Misconfigured
from epochal.sinks.files import Files, read_epochs
from epochal.spark.pipeline import Pipeline


@pytest.fixture
def family(place, tmp_path) -> Pipeline:
    schema = place.schema
    place.sql(f"CREATE TABLE {schema}.parent (id bigint PRIMARY KEY CHECK (id <> 13))")
    place.sql(f"CREATE TABLE {schema}.child (parent bigint REFERENCES {schema}.parent, name uuid)")
    bad_children = Files(str(tmp_path / "bad"), name="bad children", format="jsonl")
    bad_parents = place.sink("bad_parents", name="bad parents", create_table="if_missing")
    return Pipeline(
        "family",
        sinks=[
            place.sink("parent", name="parent", select=["id"], on_reject=bad_parents),
            place.sink(
                "child",
                name="child",
                select=["id AS parent", "name"],
                where="name IS NOT NULL",
                on_reject=bad_children,
            ),
        ],
        gates=[lambda epoch: epoch.rows("bad parents") <= 1],
    )


def test_a_stream_into_tables_that_refer_to_each_other(spark, place, family, tmp_path):
    source = tmp_path / "source"
    for part in range(2):
        spark.range(part * 10 + 1, part * 10 + 5, numPartitions=2).selectExpr(
            "id", "CASE WHEN id % 10 = 2 THEN 'bad' WHEN id % 10 = 4 THEN NULL ELSE uuid() END name"
        ).coalesce(1).write.mode("append").parquet(str(source))
    stream = (
        spark.readStream.schema("id BIGINT, name STRING")
        .option("maxFilesPerTrigger", 1)
        .parquet(str(source))
    )
    report = family.check(stream)
    assert set(report.abilities) == {"parent", "child", "bad parents", "bad children"}
    query = family.start(stream, checkpoint=str(tmp_path / "checkpoint"), availableNow=True)
    query.awaitTermination()
    assert family.error is None
    assert [number for (number,) in place.rows("parent")] == [1, 2, 3, 4, 11, 12, 14]
    assert [number for (number, _) in place.rows("child")] == [1, 3, 11]
    assert place.rows("bad_parents", '"row"') == [('{"id":13}',)]
    refused = read_epochs(str(tmp_path / "bad")).to_table().to_pylist()
    reasons = sorted((row["sqlstate"], row["row"][:14]) for row in refused)
    assert reasons == [
        ("22P02", '{"parent":12,"'),
        ("22P02", '{"parent":2,"n'),
        ("23503", '{"parent":13,"'),
    ]
    assert place.leftovers() == []


def test_a_sink_for_refused_rows_is_checked_like_others(spark, place, family, tmp_path):
    place.sql(f"CREATE TABLE {place.schema}.bad_parents (other text NOT NULL)")
    with pytest.raises(Misconfigured, match="bad_parents"):
        family.check(spark.range(1).selectExpr("id", "'x' AS name"))
