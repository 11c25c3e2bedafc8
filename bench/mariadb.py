"""[mariadb_append_spark] From Spark to MariaDB, against Spark's own JDBC writer.

Both sides read the same stream of parquet files, two tasks an epoch. The peer is at-least-once. The
server is the tests' own, with its log flushed as MariaDB ships it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

from bench.harness import Comparison, say
from bench.postgres import TESTS, some_rows
from bench.streams import each_batch, streaming
from epochal.sinks.mysql import MySQL
from epochal.spark.pipeline import Pipeline

# The last line of MariaDB's releases that rewrites batches of statements, and MySQL's own.
MARIADB_DRIVER = "org.mariadb.jdbc:mariadb-java-client:2.7.12"
MYSQL_DRIVER = "com.mysql:mysql-connector-j:9.3.0"
# Long enough that what a query pays at its start does not weigh.
ROWS = 2_400_000
EPOCHS = 4
ROUNDS = 3
COLUMNS = (
    "id bigint, customer int, amount double, title text, paid boolean, price decimal(18,2),"
    " at timestamp(6) NULL, day date"
)
_SETTINGS = {"innodb-flush-method": "fsync", "innodb-buffer-pool-size": "256M"}


@contextmanager
def mariadb_server() -> Iterator[Any]:
    sys.path.insert(0, str(TESTS))
    from servers.mysql import running_server  # noqa: PLC0415  of the tests, found above

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


def _jdbc(batch: Any, server: Any, driver: str, *, is_tuned: bool = True) -> None:
    # By its older scheme, which Spark knows how to quote for.
    url = f"jdbc:mysql://127.0.0.1:{server.port}/bench?user=root"
    writer = batch.write.format("jdbc").option("driver", driver).option("dbtable", "theirs")
    if is_tuned:
        url += "&rewriteBatchedStatements=true"
        writer = writer.option("batchsize", 10_000)
    writer.option("url", url).mode("append").save()


def _ours(server: Any, strategy: Literal["staged", "prepared"]) -> Callable[[Any, str], Any]:
    sink = MySQL(server.url(database="bench"), table="ours", strategy=strategy)

    def start(frame: Any, checkpoint: str) -> Any:
        # Each with a name of its own: a target remembers how far a pipeline has come.
        pipeline = Pipeline(f"bench {checkpoint}", [sink])
        return pipeline.start(frame, checkpoint=checkpoint, availableNow=True)

    return start


def append_spark() -> Comparison:
    comparison = Comparison(
        name="mariadb_append_spark",
        peer_name="foreachBatch with Spark's JDBC append, rewriteBatchedStatements",
        unit="rows/s",
        is_rate=True,
    )
    beside: dict[str, list[float]] = {"staged": [], "mysql_connector_j": []}
    with (
        mariadb_server() as server,
        streaming(
            some_rows(ROWS), epochs=EPOCHS, packages=f"{MARIADB_DRIVER},{MYSQL_DRIVER}"
        ) as stream,
    ):
        for table in ("ours", "theirs"):
            execute(server, f"CREATE TABLE bench.{table} ({COLUMNS})")

        def rate(table: str, start: Callable[[Any, str], Any]) -> float:
            execute(server, f"TRUNCATE bench.{table}")
            found = stream.rate(start)
            assert execute(server, f"SELECT COUNT(*) FROM bench.{table}") == (ROWS,)  # noqa: S608  our own
            return found

        def theirs(driver: str = "org.mariadb.jdbc.Driver", *, is_tuned: bool = True) -> float:
            def write(batch: Any) -> None:
                _jdbc(batch, server, driver, is_tuned=is_tuned)

            return rate("theirs", each_batch(write))

        def ours() -> float:
            beside["staged"].append(rate("ours", _ours(server, "staged")))
            beside["mysql_connector_j"].append(theirs("com.mysql.cj.jdbc.Driver"))
            say(", ".join(f"{name} {some[-1]:.0f}" for name, some in beside.items()))
            return rate("ours", _ours(server, "prepared"))

        by_hand = each_batch(lambda batch: _jdbc(batch, server, "org.mariadb.jdbc.Driver"))
        for start in (_ours(server, "staged"), _ours(server, "prepared"), by_hand):
            stream.warm_up(start)
        comparison.run(ours, theirs, rounds=ROUNDS)
        # Once: statement by statement it takes minutes, and what it says is not near.
        jdbc_defaults = theirs(is_tuned=False)
    medians = {name: statistics.median(some[1:]) for name, some in beside.items()}
    of_mysql = statistics.median(comparison.ours) / medians["mysql_connector_j"]
    comparison.beside = {
        **{name: round(median) for name, median in medians.items()},
        "of_mysql_connector_j": round(of_mysql, 3),
        "jdbc_defaults": round(jdbc_defaults),
    }
    return comparison


RUNS = {"mariadb_append_spark": append_spark}
