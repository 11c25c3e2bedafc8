"""Through the pipeline door: tables that share a transaction, and what they refuse."""

from __future__ import annotations

import itertools

import pytest
from pyspark.sql.functions import col, count

from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.files import Files, read_epochs
from epochal.spark import row_layout as packing
from epochal.spark.pipeline import Pipeline
from epochal.spark.row_hash import fingerprint_of
from epochal.terms import Limits

ORDERS = (
    "id bigint, customer int, amount double precision, title text, paid boolean,"
    " price numeric(18,2), at timestamptz, day date"
)


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


@pytest.fixture
def crossed(monkeypatch) -> list[bool]:
    """Of every job: whether its rows crossed to Python as bytes."""
    found: list[bool] = []
    packed = packing.packed

    def noted(*args, **options):
        frame = packed(*args, **options)
        found.append(frame is not None)
        return frame

    monkeypatch.setattr(packing, "packed", noted)
    return found


@pytest.mark.parametrize("how", [*itertools.product(["staged", "prepared"], ["bytes", "columns"])])
def test_rows_arrive_the_same_whichever_way_they_cross(spark, place, tmp_path, crossed, how):
    strategy, way = how
    # An array has no form as bytes, and takes all other columns along.
    more = ", array(id) AS tags" if way == "columns" else ""
    place.sql(f"CREATE TABLE {place.schema}.orders ({ORDERS}{', tags bigint[]' if more else ''})")
    frame = spark.sql(f"""
        SELECT id, CAST(id AS int) AS customer, id / 7 AS amount, concat('order é ', id) AS title,
          nullif(id % 3, 0) = 1 AS paid, CAST((id - 100) / 4 AS decimal(18,2)) AS price,
          timestamp_millis(id * 86399999) AS at, date_add(DATE '1999-12-30', CAST(id AS int)) AS day
          {more}
        FROM range(0, 200, 1, 4)
    """)
    frame.write.parquet(str(tmp_path / "rows"))
    prints = []
    pipeline = Pipeline(
        "orders",
        [place.sink(name="orders", strategy=strategy)],
        [lambda epoch: prints.extend(one.fingerprint for one in epoch.receipts("orders"))],
    )
    stream = spark.readStream.schema(frame.schema).parquet(str(tmp_path / "rows"))
    query = pipeline.start(stream, checkpoint=str(tmp_path / "checkpoint"), availableNow=True)
    query.awaitTermination()
    assert pipeline.error is None
    assert crossed == [way == "bytes"]
    wanted = sorted(tuple(row.values()) for row in frame.toArrow().to_pylist())
    assert place.rows(columns=", ".join(frame.columns)) == wanted
    assert sum(one.hash_sum or 0 for one in prints) % 2**64 == fingerprint_of(frame).hash_sum
    assert place.leftovers() == []


def test_each_batch_creates_a_table_that_is_missing(spark, place, tmp_path):
    spark.range(1, 4, numPartitions=1).write.parquet(str(tmp_path / "source"))
    stream = spark.readStream.schema("id BIGINT").parquet(str(tmp_path / "source"))
    pipeline = Pipeline("made", [place.sink("made", create_table="if_missing")])
    checkpoint = str(tmp_path / "checkpoint")
    writer = stream.writeStream.foreachBatch(pipeline.each_batch(checkpoint))
    writer = writer.option("checkpointLocation", checkpoint).trigger(availableNow=True)
    writer.start().awaitTermination()
    assert place.rows("made") == [(1,), (2,), (3,)]


def test_a_complete_result_replaces_the_last_one(spark, place, tmp_path):
    place.sql(f"CREATE TABLE {place.schema}.totals (k bigint PRIMARY KEY, n bigint)")
    source = tmp_path / "source"
    for _ in range(2):
        spark.range(0, 6, numPartitions=1).write.mode("append").parquet(str(source))
    stream = spark.readStream.schema("id BIGINT").option("maxFilesPerTrigger", 1)
    totals = (
        stream.parquet(str(source)).groupBy((col("id") % 3).alias("k")).agg(count("*").alias("n"))
    )
    pipeline = Pipeline("totals", sinks=[place.sink("totals", mode="complete")])
    options = {"checkpoint": str(tmp_path / "checkpoint"), "availableNow": True}
    with pytest.raises(Misconfigured, match="can't honour Spark's output mode 'update'"):
        pipeline.start(totals, outputMode="update", **options)
    pipeline.start(totals, outputMode="complete", **options).awaitTermination()
    assert pipeline.error is None
    assert place.rows("totals") == [(0, 4), (1, 4), (2, 4)]


def test_spark_s_first_moments_are_refused(spark, place, tmp_path):
    place.sql(f"CREATE TABLE {place.schema}.moments (id bigint, at timestamptz)")
    pipeline = Pipeline("moments", [place.sink("moments")])
    for number, first in enumerate([-(2**63), -(2**63) + 946_684_800_000_000]):
        rows = spark.sql(f"SELECT {number}L AS id, timestamp_micros({first + 1}L - 1) AS at")
        with pytest.raises(RowRejected, match="out of range"):
            pipeline.write(rows, run=f"r{number}", checkpoint=str(tmp_path / "checkpoint"))
    assert place.rows("moments") == []


@pytest.mark.parametrize("strategy", ["staged", "prepared"])
def test_few_rows_by_the_driver_are_those_of_tasks(spark, place, tmp_path, monkeypatch, strategy):
    """Tasks get them laid out for COPY, the driver as columns."""
    laid_out = []
    packed = packing.packed
    monkeypatch.setattr(packing, "packed", lambda *a, **k: laid_out.append(a) or packed(*a, **k))
    for part in range(3):
        spark.range(part * 10, part * 10 + 10, numPartitions=1).selectExpr(
            "id",
            "cast(if(id % 4 = 0, null, id) AS int) AS customer",
            "if(id = 5, double('NaN'), id / 3) AS amount",
            "if(id % 3 = 0, null, concat('ü雪 ', id)) AS title",
            "id % 2 = 0 AS paid",
            "cast(-id / 8 AS decimal(18, 2)) AS price",
            "timestamp_seconds(id - 5) AS at",
            "date_from_unix_date(cast(id - 5 AS int)) AS day",
        ).write.mode("append").parquet(str(tmp_path / "source"))
    schema = spark.read.parquet(str(tmp_path / "source")).schema
    for table, rows_max in (("by_tasks", 0), ("by_driver", 20)):
        place.sql(f"CREATE TABLE {place.schema}.{table} ({ORDERS})")
        pipeline = Pipeline(
            table, [place.sink(table, strategy=strategy)], limits=Limits(driver_rows_max=rows_max)
        )
        stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1)
        query = pipeline.start(
            stream.parquet(str(tmp_path / "source")),
            checkpoint=str(tmp_path / table),
            availableNow=True,
        )
        query.awaitTermination()
    assert len(laid_out) == 3 + 1, "the driver knows that rows are few from its second epoch on"
    found = [
        place.sql(f"SELECT t::text FROM {place.schema}.{table} t ORDER BY id")
        for table in ("by_tasks", "by_driver")
    ]
    assert len(found[0]) == 30
    assert found[0] == found[1]
