"""[mariadb_append_spark] From Spark to MariaDB, against Spark's own JDBC writer.

Both sides read the same parquet rows in two partitions. The peer is at-least-once. The server is
the tests' own, with its log flushed as MariaDB ships it.
"""

from __future__ import annotations

import itertools
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness import Comparison, say, stopwatch
from bench.postgres import TESTS, some_rows
from epochal.sinks.mysql import MySQL
from epochal.spark.local import local_builder
from epochal.spark.pipeline import Pipeline

# The last line of releases that rewrites batches of statements.
JDBC = "org.mariadb.jdbc:mariadb-java-client:2.7.12"
ROWS = 400_000
ROUNDS = 3
COLUMNS = (
    "id bigint, customer int, amount double, title text, paid boolean, price decimal(18,2),"
    " at timestamp(6) NULL, day date"
)
_SETTINGS = {"innodb-flush-method": "fsync", "innodb-buffer-pool-size": "256M"}
_runs = itertools.count()


@contextmanager
def mariadb_server() -> Iterator[Any]:
    sys.path.insert(0, str(TESTS))
    from servers.mariadb import running_server  # noqa: PLC0415  of the tests, found above

    with running_server(_SETTINGS) as server:
        execute(server, "CREATE DATABASE bench")
        yield server


def execute(server: Any, statement: str) -> Any:
    connection = server.connect()
    try:
        with connection.cursor() as cursor:
            cursor.execute(statement)
            return cursor.fetchone()
    finally:
        connection.close()


@contextmanager
def _stage() -> Iterator[tuple[Any, Any]]:
    """A server, and a frame of two partitions."""
    import pyarrow.parquet as pq  # noqa: PLC0415  only the benchmark writes parquet by itself

    builder = local_builder("bench", threads=2).config("spark.jars.packages", JDBC)
    with mariadb_server() as server, tempfile.TemporaryDirectory() as folder:
        table, half = some_rows(ROWS), ROWS // 2
        for number, part in enumerate((table.slice(0, half), table.slice(half))):
            pq.write_table(part, Path(folder) / f"part{number}.parquet")
        spark = builder.config("spark.sql.files.openCostInBytes", 1 << 30).getOrCreate()
        try:
            frame = spark.read.parquet(folder)
            assert frame.rdd.getNumPartitions() == 2
            yield server, frame
        finally:
            spark.stop()


def _jdbc(frame: Any, server: Any) -> None:
    # By its older scheme, which Spark knows how to quote for.
    url = f"jdbc:mysql://127.0.0.1:{server.port}/bench?rewriteBatchedStatements=true&user=root"
    (
        frame.write.format("jdbc")
        .option("url", url)
        .option("driver", "org.mariadb.jdbc.Driver")
        .option("dbtable", "theirs")
        .option("batchsize", 10_000)
        .mode("append")
        .save()
    )


def _ours(frame: Any, server: Any, strategy: str) -> None:
    sink = MySQL(server.url(database="bench"), table="ours", strategy=strategy)  # type: ignore[arg-type] # one of the two
    with tempfile.TemporaryDirectory() as folder:
        Pipeline("bench", sinks=[sink]).write(frame, run=f"{next(_runs)}", checkpoint=folder)


def append_spark() -> Comparison:
    comparison = Comparison(
        name="mariadb_append_spark",
        peer_name="Spark JDBC append, rewriteBatchedStatements",
        unit="rows/s",
        is_rate=True,
    )
    staged: list[float] = []
    with _stage() as (server, frame):
        for table in ("ours", "theirs"):
            execute(server, f"CREATE TABLE bench.{table} ({COLUMNS})")

        def rate(table: str, write: Callable[[], None]) -> float:
            execute(server, f"TRUNCATE bench.{table}")
            with stopwatch() as seconds:
                write()
                found = ROWS / seconds()
            assert execute(server, f"SELECT COUNT(*) FROM bench.{table}") == (ROWS,)  # noqa: S608  our own
            return found

        def ours() -> float:
            staged.append(rate("ours", lambda: _ours(frame, server, "staged")))
            say(f"staged {staged[-1]:.0f}")
            return rate("ours", lambda: _ours(frame, server, "prepared"))

        comparison.run(ours, lambda: rate("theirs", lambda: _jdbc(frame, server)), rounds=ROUNDS)
    comparison.beside["staged"] = round(statistics.median(staged[1:]))
    return comparison


RUNS = {"mariadb_append_spark": append_spark}
