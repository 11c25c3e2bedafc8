"""[postgres_append_spark, postgres_upsert_spark] From Spark to PostgreSQL, against what people use.

Both sides read the same parquet rows in two partitions. The peers are at-least-once.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa

from bench.harness import Comparison, say, stopwatch
from bench.postgres import execute, make_table, postgres_server, some_rows
from epochal.sinks.postgres import Postgres
from epochal.spark.local import local_builder
from epochal.spark.pipeline import Pipeline

JDBC = "org.postgresql:postgresql:42.7.7"
APPEND_ROWS = 1_000_000
UPSERT_ROWS = 300_000
ROUNDS = 3
_runs = itertools.count()


@contextmanager
def _stage(rows: int) -> Iterator[tuple[Any, Any, Any]]:
    """Spark, a server, and a frame of two partitions."""
    import pyarrow.parquet as pq  # noqa: PLC0415  only the benchmark writes parquet by itself

    builder = local_builder("bench", threads=2).config("spark.jars.packages", JDBC)
    with postgres_server() as server, tempfile.TemporaryDirectory() as folder:
        half = rows // 2
        table = some_rows(rows)
        for number, part in enumerate((table.slice(0, half), table.slice(half))):
            pq.write_table(part, Path(folder) / f"part{number}.parquet")
        spark = builder.config("spark.sql.files.openCostInBytes", 1 << 30).getOrCreate()
        try:
            frame = spark.read.parquet(folder)
            assert frame.rdd.getNumPartitions() == 2
            yield spark, server, frame
        finally:
            spark.stop()


def _jdbc_url(server: Any) -> str:
    return f"jdbc:postgresql://127.0.0.1:{server.port}/postgres?reWriteBatchedInserts=true&user=postgres"


def _jdbc(frame: Any, server: Any, table: str, mode: str = "append") -> None:
    (
        frame.write.format("jdbc")
        .option("url", _jdbc_url(server))
        .option("driver", "org.postgresql.Driver")
        .option("dbtable", table)
        .option("batchsize", 10_000)
        .option("truncate", "true")
        .mode(mode)
        .save()
    )


def _ours(frame: Any, server: Any, table: str, **options: Any) -> None:
    pipeline = Pipeline(
        f"bench {table}", sinks=[Postgres(server.url(), table=f"public.{table}", **options)]
    )
    with tempfile.TemporaryDirectory() as folder:
        pipeline.write(frame, run=f"run {next(_runs)}", checkpoint=folder)


def _bare_copy(frame: Any, server: Any, table: str) -> None:
    """Our way of sending, with nothing that makes it safe."""
    conninfo = server.url()

    def copy(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415  in the worker

        sent = 0
        with dbapi.connect(conninfo, autocommit=True) as connection, connection.cursor() as cursor:
            for batch in batches:
                sent += batch.num_rows
                cursor.adbc_ingest(table, batch, mode="append")
        yield pa.record_batch([pa.array([sent])], names=["rows"])

    frame.mapInArrow(copy, "rows long").collect()


def _rate(server: Any, table: str, rows: int, write: Callable[[], None]) -> float:
    execute(server, f"TRUNCATE {table}")
    with stopwatch() as seconds:
        write()
        rate = rows / seconds()
    assert execute(server, f"SELECT count(*) FROM {table}") == (rows,)  # noqa: S608  our own
    return rate


def append_spark() -> Comparison:
    comparison = Comparison(
        name="postgres_append_spark",
        peer_name="Spark JDBC append, reWriteBatchedInserts",
        unit="rows/s",
        is_rate=True,
    )
    with _stage(APPEND_ROWS) as (_, server, frame):
        for table in ("ours", "theirs"):
            make_table(server, table)
        beside: dict[str, list[float]] = {"staged": [], "bare_copy": []}

        def rate(write: Callable[[], None], table: str = "ours") -> float:
            return _rate(server, table, APPEND_ROWS, write)

        def ours() -> float:
            staged = rate(lambda: _ours(frame, server, "ours"))
            bare = rate(lambda: _bare_copy(frame, server, "ours"))
            mine = rate(lambda: _ours(frame, server, "ours", strategy="prepared"))
            beside["staged"].append(staged)
            beside["bare_copy"].append(bare)
            say(f"staged {staged:.0f}, bare copy {bare:.0f}")
            return mine

        comparison.run(
            ours, lambda: rate(lambda: _jdbc(frame, server, "theirs"), "theirs"), rounds=ROUNDS
        )
    for name, some in beside.items():
        if some:
            comparison.beside[name] = round(statistics.median(some[1:]))
    ours_now = statistics.median(comparison.ours)
    comparison.beside["of_bare_copy"] = round(ours_now / float(comparison.beside["bare_copy"]), 3)  # type: ignore[arg-type] # a number, as above
    return comparison


def upsert_spark() -> Comparison:
    comparison = Comparison(
        name="postgres_upsert_spark",
        peer_name="foreachBatch by hand: JDBC into a staging table, INSERT … ON CONFLICT",
        unit="rows/s",
        is_rate=True,
    )
    with _stage(UPSERT_ROWS) as (_, server, frame):
        for table in ("ours", "theirs"):
            make_table(server, table, ", PRIMARY KEY (id)")
        make_table(server, "by_hand")

        def by_hand() -> None:
            _jdbc(frame, server, "by_hand", mode="overwrite")
            with psycopg.connect(server.url()) as connection:
                connection.execute(_ON_CONFLICT)

        def rate(table: str, write: Callable[[], None]) -> float:
            execute(server, f"TRUNCATE {table}")
            execute(server, f"INSERT INTO {table} (id, title) {_BEFORE}")
            execute(server, f"VACUUM ANALYZE {table}")
            with stopwatch() as seconds:
                write()
                found = UPSERT_ROWS / seconds()
            written = execute(server, f"SELECT count(*) FROM {table} WHERE customer IS NOT NULL")  # noqa: S608  our own
            assert written == (UPSERT_ROWS,)
            return found

        comparison.run(
            lambda: rate("ours", lambda: _ours(frame, server, "ours", mode="upsert", keys="id")),
            lambda: rate("theirs", by_hand),
            rounds=ROUNDS,
        )
    return comparison


_BEFORE = f"SELECT n * 2, 'before' FROM generate_series(0, {UPSERT_ROWS // 2 - 1}) n"  # noqa: S608  constants
"""Every second row is there already."""
_ON_CONFLICT = """
INSERT INTO theirs SELECT * FROM by_hand
ON CONFLICT (id) DO UPDATE SET customer = excluded.customer, amount = excluded.amount,
  title = excluded.title, paid = excluded.paid, price = excluded.price, at = excluded.at,
  day = excluded.day
"""

RUNS = {"postgres_append_spark": append_spark, "postgres_upsert_spark": upsert_spark}
