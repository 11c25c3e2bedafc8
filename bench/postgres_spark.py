"""[postgres_append_spark, postgres_upsert_spark] From Spark to PostgreSQL, against what people use.

Both sides read the same stream of parquet files, two tasks an epoch. The peers are at-least-once.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pyarrow as pa

from bench.harness import Comparison, say
from bench.postgres import execute, make_table, postgres_server, some_rows
from bench.streams import Stream, each_batch, streaming
from epochal.sinks.postgres import Postgres
from epochal.spark.pipeline import Pipeline

JDBC = "org.postgresql:postgresql:42.7.7"
# Long enough that what a query pays at its start does not weigh: Java compiling, above all.
APPEND_ROWS = 4_000_000
APPEND_EPOCHS = 8
UPSERT_ROWS = 400_000
UPSERT_EPOCHS = 4
ROUNDS = 3


def _jdbc(batch: Any, server: Any, table: str, mode: str = "append") -> None:
    url = f"jdbc:postgresql://127.0.0.1:{server.port}/postgres?reWriteBatchedInserts=true"
    (
        batch.write.format("jdbc")
        .option("url", f"{url}&user=postgres")
        .option("driver", "org.postgresql.Driver")
        .option("dbtable", table)
        .option("batchsize", 10_000)
        .option("truncate", "true")
        .mode(mode)
        .save()
    )


def _ours(server: Any, **options: Any) -> Callable[[Any, str], Any]:
    sink = Postgres(server.url(), table="public.ours", **options)

    def start(frame: Any, checkpoint: str) -> Any:
        # Each with a name of its own: a target remembers how far a pipeline has come.
        pipeline = Pipeline(f"bench {checkpoint}", [sink])
        return pipeline.start(frame, checkpoint=checkpoint, availableNow=True)

    return start


def _bare_copy(batch: Any, server: Any) -> None:
    """Our way of sending, with nothing that makes it safe."""
    conninfo = server.url()

    def copy(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from adbc_driver_postgresql import dbapi  # noqa: PLC0415  in the worker

        sent = 0
        with dbapi.connect(conninfo, autocommit=True) as connection, connection.cursor() as cursor:
            for part in batches:
                sent += part.num_rows
                cursor.adbc_ingest("ours", part, mode="append")
        yield pa.record_batch([pa.array([sent])], names=["rows"])

    batch.mapInArrow(copy, "rows long").collect()


def append_spark() -> Comparison:
    comparison = Comparison(
        name="postgres_append_spark",
        peer_name="foreachBatch with Spark's JDBC append, reWriteBatchedInserts",
        unit="rows/s",
        is_rate=True,
    )
    beside: dict[str, list[float]] = {"staged": [], "bare_copy": []}
    rows = some_rows(APPEND_ROWS)
    with (
        postgres_server() as server,
        streaming(rows, epochs=APPEND_EPOCHS, packages=JDBC) as stream,
    ):
        for table in ("ours", "theirs"):
            make_table(server, table)

        def rate(start: Callable[[Any, str], Any], table: str = "ours") -> float:
            execute(server, f"TRUNCATE {table}")
            found = stream.rate(start)
            assert execute(server, f"SELECT count(*) FROM {table}") == (stream.rows,)  # noqa: S608  our own
            return found

        def ours() -> float:
            beside["staged"].append(rate(_ours(server)))
            beside["bare_copy"].append(rate(each_batch(lambda batch: _bare_copy(batch, server))))
            say(", ".join(f"{name} {some[-1]:.0f}" for name, some in beside.items()))
            return rate(_ours(server, strategy="prepared"))

        def theirs() -> float:
            return rate(each_batch(lambda batch: _jdbc(batch, server, "theirs")), "theirs")

        comparison.run(ours, theirs, rounds=ROUNDS)
    medians = {name: statistics.median(some[1:]) for name, some in beside.items()}
    of_bare = statistics.median(comparison.ours) / medians["bare_copy"]
    comparison.beside = {
        **{name: round(median) for name, median in medians.items()},
        "of_bare_copy": round(of_bare, 3),
    }
    return comparison


def upsert_spark() -> Comparison:
    comparison = Comparison(
        name="postgres_upsert_spark",
        peer_name="foreachBatch by hand: JDBC into a staging table, INSERT … ON CONFLICT",
        unit="rows/s",
        is_rate=True,
    )
    rows = some_rows(UPSERT_ROWS)
    with (
        postgres_server() as server,
        streaming(rows, epochs=UPSERT_EPOCHS, packages=JDBC) as stream,
    ):
        for table in ("ours", "theirs"):
            make_table(server, table, ", PRIMARY KEY (id)")
        make_table(server, "by_hand")

        def by_hand(batch: Any) -> None:
            _jdbc(batch, server, "by_hand", mode="overwrite")
            with psycopg.connect(server.url()) as connection:
                connection.execute(_ON_CONFLICT)

        ours = _ours(server, mode="upsert", keys="id")
        comparison.run(
            lambda: _upsert_rate(server, stream, "ours", ours),
            lambda: _upsert_rate(server, stream, "theirs", each_batch(by_hand)),
            rounds=ROUNDS,
        )
    return comparison


def _upsert_rate(
    server: Any, stream: Stream, table: str, start: Callable[[Any, str], Any]
) -> float:
    execute(server, f"TRUNCATE {table}")
    execute(server, f"INSERT INTO {table} (id, title) {_BEFORE}")
    execute(server, f"VACUUM ANALYZE {table}")
    found = stream.rate(start)
    written = execute(server, f"SELECT count(*) FROM {table} WHERE customer IS NOT NULL")  # noqa: S608  our own
    assert written == (stream.rows,)
    return found


_BEFORE = f"SELECT n * 2, 'before' FROM generate_series(0, {UPSERT_ROWS // 2 - 1}) n"  # noqa: S608  constants
"""Every second row is there already."""
_ON_CONFLICT = """
INSERT INTO theirs SELECT * FROM by_hand
ON CONFLICT (id) DO UPDATE SET customer = excluded.customer, amount = excluded.amount,
  title = excluded.title, paid = excluded.paid, price = excluded.price, at = excluded.at,
  day = excluded.day
"""

RUNS = {"postgres_append_spark": append_spark, "postgres_upsert_spark": upsert_spark}
