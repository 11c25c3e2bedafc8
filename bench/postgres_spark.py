"""
[postgres_append_spark, postgres_append_pk_spark, postgres_heavy_spark, postgres_heavy_spark_wide,
postgres_upsert_spark, postgres_small_epochs] From Spark to PostgreSQL, against what people use.

Both sides read the same stream of parquet files, two tasks an epoch. The peers are at-least-once,
with their best settings; beside them is what they do by default. CPU is counted by process: of the
server, of Java, and of Python, in microseconds per row.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from bench.harness import Comparison, cpu_seconds, say
from bench.postgres import COLUMNS, execute, postgres_server, some_rows
from bench.streams import Stream, each_batch, streaming
from epochal.sinks.postgres import Postgres
from epochal.spark.pipeline import Pipeline

JDBC = "org.postgresql:postgresql:42.7.7"
# Long enough that what a query pays at its start does not weigh.
APPEND_ROWS = 4_000_000
APPEND_EPOCHS = 8
UPSERT_ROWS = 1_800_000
UPSERT_EPOCHS = 6
TEXT_ROWS = 1_200_000
TEXT_BYTES = 1000
WIDE_ROWS = 480_000
WIDE_COLUMNS = 100
HEAVY_EPOCHS = 8
SMALL_ROWS = 100
SMALL_EPOCHS = 60
_WARM_UP_EPOCHS = 20
ROUNDS = 3


def _jdbc(
    batch: Any, server: Any, table: str, mode: str = "append", *, is_tuned: bool = True
) -> None:
    url = f"jdbc:postgresql://127.0.0.1:{server.port}/postgres?user=postgres"
    writer = batch.write.format("jdbc").option("driver", "org.postgresql.Driver")
    writer = writer.option("dbtable", table).option("truncate", "true").mode(mode)
    if is_tuned:
        url += "&reWriteBatchedInserts=true"
        writer = writer.option("batchsize", 10_000)
    writer.option("url", url).save()


def _ours(server: Any, *, fingerprint: bool = True, **options: Any) -> Callable[[Any, str], Any]:
    sink = Postgres(server.url(), table="public.ours", **options)

    def start(frame: Any, checkpoint: str) -> Any:
        # Each with a name of its own: a target remembers how far a pipeline has come.
        pipeline = Pipeline(f"bench {checkpoint}", [sink], fingerprint=fingerprint)
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


Start = Callable[[Any, str], Any]


class Measured:
    """One stream into tables of one server: CPU by process."""

    def __init__(self, server: Any, stream: Stream) -> None:
        self._server = server
        self._stream = stream
        self.cpu: dict[str, Mapping[str, float]] = {}
        """Of the last run of each."""
        (folder,) = execute(server, "SHOW data_directory")
        self._pid = int((Path(folder) / "postmaster.pid").read_text().split()[0])

    def of(self, name: str, run: Callable[[], float]) -> float:
        """What a run returns; its CPU is noted."""
        before = cpu_seconds(self._pid)
        found = run()
        after = cpu_seconds(self._pid)
        self.cpu[name] = {
            of: round((after[of] - before.get(of, 0.0)) / self._stream.rows * 1e6, 2)
            for of in after
        }
        return found

    def rate(self, name: str, start: Start, table: str) -> float:
        execute(self._server, f"TRUNCATE {table}")
        found = self.of(name, lambda: self._stream.rate(start))
        assert execute(self._server, f"SELECT count(*) FROM {table}") == (self._stream.rows,)  # noqa: S608  our own
        return found


def _append(
    name: str, rows: pa.Table, *, epochs: int, columns: str, is_dissected: bool = False
) -> Comparison:
    """
    Prepared, with staged beside it, against JDBC, with its defaults beside it; dissected, also
    without hashes of rows, and our way of sending alone.
    """
    comparison = Comparison(
        name=name,
        peer_name="foreachBatch with Spark's JDBC append, reWriteBatchedInserts",
        unit="rows/s",
        is_rate=True,
    )
    beside: dict[str, list[float]] = {"staged": [], "jdbc_defaults": []}
    with postgres_server() as server, streaming(rows, epochs=epochs, packages=JDBC) as stream:
        for table in ("ours", "theirs"):
            execute(server, f"CREATE TABLE {table} ({columns})")
        measured = Measured(server, stream)
        plain = each_batch(lambda batch: _jdbc(batch, server, "theirs", is_tuned=False))
        tuned = each_batch(lambda batch: _jdbc(batch, server, "theirs"))
        staged, prepared = _ours(server), _ours(server, strategy="prepared")
        for start in (staged, prepared, tuned):
            stream.warm_up(start)
            execute(server, "TRUNCATE ours")

        def ours() -> float:
            beside["staged"].append(measured.rate("staged", staged, "ours"))
            if is_dissected:
                unhashed = _ours(server, strategy="prepared", fingerprint=False)
                found = measured.rate("without_fingerprint", unhashed, "ours")
                beside.setdefault("without_fingerprint", []).append(found)
                bare = each_batch(lambda batch: _bare_copy(batch, server))
                beside.setdefault("bare_copy", []).append(measured.rate("bare", bare, "ours"))
            say(", ".join(f"{name} {some[-1]:.0f}" for name, some in beside.items() if some))
            return measured.rate("prepared", prepared, "ours")

        def theirs() -> float:
            beside["jdbc_defaults"].append(measured.rate("jdbc_defaults", plain, "theirs"))
            return measured.rate("jdbc", tuned, "theirs")

        comparison.run(ours, theirs, rounds=ROUNDS)
        comparison.beside = {"cpu_us_per_row": measured.cpu}
    medians = {name: statistics.median(some[1:]) for name, some in beside.items()}
    comparison.beside |= {name: round(median) for name, median in medians.items()}
    if is_dissected:
        of_bare = statistics.median(comparison.ours) / medians["bare_copy"]
        comparison.beside["of_bare_copy"] = round(of_bare, 3)
    return comparison


def append_spark() -> Comparison:
    rows = some_rows(APPEND_ROWS)
    return _append(
        "postgres_append_spark", rows, epochs=APPEND_EPOCHS, columns=COLUMNS, is_dissected=True
    )


def append_pk_spark() -> Comparison:
    columns, rows = f"{COLUMNS}, PRIMARY KEY (id)", some_rows(APPEND_ROWS)
    return _append("postgres_append_pk_spark", rows, epochs=APPEND_EPOCHS, columns=columns)


def heavy_text_spark() -> Comparison:
    """Texts of 1 KB, no two alike, which a server would not compress well."""
    chance = np.random.default_rng(7)
    letters = chance.integers(97, 123, TEXT_ROWS * TEXT_BYTES, dtype=np.uint8)
    ends = np.arange(TEXT_ROWS + 1, dtype=np.int32) * TEXT_BYTES
    texts = pa.StringArray.from_buffers(TEXT_ROWS, pa.py_buffer(ends), pa.py_buffer(letters))
    rows = pa.table({"id": np.arange(TEXT_ROWS, dtype=np.int64), "title": texts})
    return _append(
        "postgres_heavy_spark", rows, epochs=HEAVY_EPOCHS, columns="id bigint, title text"
    )


def heavy_wide_spark() -> Comparison:
    numbers = np.arange(WIDE_ROWS, dtype=np.int64)
    kinds = {
        "bigint": pa.array(numbers),
        "double precision": pa.array(numbers / 7),
        "text": pa.array([f"value {number}" for number in numbers]),
        "int": pa.array(numbers.astype(np.int32)),
    }
    chosen = [[*kinds][at % len(kinds)] for at in range(WIDE_COLUMNS)]
    rows = pa.table({f"c{at}": kinds[kind] for at, kind in enumerate(chosen)})
    columns = ", ".join(f"c{at} {kind}" for at, kind in enumerate(chosen))
    return _append("postgres_heavy_spark_wide", rows, epochs=HEAVY_EPOCHS, columns=columns)


def small_epochs() -> Comparison:
    comparison = Comparison(
        name="postgres_small_epochs",
        peer_name="foreachBatch with Spark's JDBC append, reWriteBatchedInserts",
        unit="ms/epoch",
        is_rate=False,
    )
    beside: dict[str, list[float]] = {"prepared": [], "jdbc_defaults": []}
    rows = some_rows(SMALL_ROWS * SMALL_EPOCHS)
    with postgres_server() as server, streaming(rows, epochs=SMALL_EPOCHS, packages=JDBC) as stream:
        for table in ("ours", "theirs"):
            execute(server, f"CREATE TABLE {table} ({COLUMNS})")
        measured = Measured(server, stream)

        def epoch_ms(name: str, start: Start) -> float:
            return measured.of(name, lambda: _epoch_ms(stream, start))

        def ours() -> float:
            prepared = _ours(server, strategy="prepared")
            beside["prepared"].append(epoch_ms("prepared", prepared))
            return epoch_ms("staged", _ours(server))

        def theirs() -> float:
            plain = each_batch(lambda batch: _jdbc(batch, server, "theirs", is_tuned=False))
            beside["jdbc_defaults"].append(epoch_ms("jdbc_defaults", plain))
            return epoch_ms("jdbc", each_batch(lambda batch: _jdbc(batch, server, "theirs")))

        comparison.run(ours, theirs, rounds=ROUNDS)
    comparison.beside = {
        name: round(statistics.median(some[1:]), 1) for name, some in beside.items()
    }
    comparison.beside["cpu_us_per_row"] = measured.cpu
    return comparison


def _epoch_ms(stream: Stream, start: Start) -> float:
    """The median time of an epoch, from its trigger to the next, once all is warm."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as checkpoint:
        query = start(stream.frame(), checkpoint)
        query.awaitTermination()
        progress = [p if isinstance(p, dict) else json.loads(p.json) for p in query.recentProgress]
    took = [float(one["durationMs"]["triggerExecution"]) for one in progress if one["numInputRows"]]
    return statistics.median(took[_WARM_UP_EPOCHS:])


def upsert_spark() -> Comparison:
    comparison = Comparison(
        name="postgres_upsert_spark",
        peer_name="foreachBatch by hand: JDBC into a staging table, INSERT … ON CONFLICT",
        unit="rows/s",
        is_rate=True,
    )
    # Keys of a change stream come in any order.
    rows = some_rows(UPSERT_ROWS).take(np.random.default_rng(7).permutation(UPSERT_ROWS))
    sorted_by_hand: list[float] = []
    with (
        postgres_server() as server,
        streaming(rows, epochs=UPSERT_EPOCHS, packages=JDBC) as stream,
    ):
        for table in ("ours", "theirs"):
            execute(server, f"CREATE TABLE {table} ({COLUMNS}, PRIMARY KEY (id))")
        execute(server, f"CREATE TABLE by_hand ({COLUMNS})")

        def by_hand(order: str) -> Start:
            def write(batch: Any) -> None:
                _jdbc(batch, server, "by_hand", mode="overwrite")
                with psycopg.connect(server.url()) as connection:
                    connection.execute(_ON_CONFLICT.format(order=order).encode())

            return each_batch(write)

        measured = Measured(server, stream)

        def rate(name: str, table: str, start: Start) -> float:
            execute(server, f"TRUNCATE {table}")
            execute(server, f"INSERT INTO {table} (id, title) {_BEFORE}")
            execute(server, f"VACUUM ANALYZE {table}")
            found = measured.of(name, lambda: stream.rate(start))
            written = f"SELECT count(*) FROM {table} WHERE customer IS NOT NULL"  # noqa: S608  our own
            assert execute(server, written) == (stream.rows,)
            return found

        def theirs() -> float:
            ordered = by_hand("ORDER BY id")
            sorted_by_hand.append(rate("by_hand_in_key_order", "theirs", ordered))
            return rate("by_hand", "theirs", by_hand(""))

        ours = _ours(server, mode="upsert", keys="id")
        for start in (ours, by_hand("")):
            stream.warm_up(start)
        comparison.run(lambda: rate("ours", "ours", ours), theirs, rounds=ROUNDS)
    comparison.beside = {
        "by_hand_in_key_order": round(statistics.median(sorted_by_hand[1:])),
        "cpu_us_per_row": measured.cpu,
    }
    return comparison


_BEFORE = f"SELECT n * 2, 'before' FROM generate_series(0, {UPSERT_ROWS // 2 - 1}) n"  # noqa: S608  constants
"""Every second row is there already."""
_ON_CONFLICT = """
INSERT INTO theirs SELECT * FROM by_hand {order}
ON CONFLICT (id) DO UPDATE SET customer = excluded.customer, amount = excluded.amount,
  title = excluded.title, paid = excluded.paid, price = excluded.price, at = excluded.at,
  day = excluded.day
"""

RUNS = {
    "postgres_append_spark": append_spark,
    "postgres_append_pk_spark": append_pk_spark,
    "postgres_heavy_spark": heavy_text_spark,
    "postgres_heavy_spark_wide": heavy_wide_spark,
    "postgres_upsert_spark": upsert_spark,
    "postgres_small_epochs": small_epochs,
}
