"""[postgres_append_writer, postgres_commit] The PostgreSQL sink without Spark, on one connection.

The server is the tests' own, with fsync as PostgreSQL ships it.
"""

from __future__ import annotations

import itertools
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psycopg
import pyarrow as pa

from bench.harness import Comparison, PeakMemory, say, stopwatch
from epochal.contract import Begin, Committer, Task
from epochal.sinks.postgres import Postgres
from epochal.terms import DEFAULT_LIMITS, EpochNumber, Generation, Identity, Receipt, SinkName, Uid

ROWS = 1_000_000
ROUNDS = 3
EPOCHS = 300
BATCH_ROWS = 10_000
TESTS = Path(__file__).resolve().parent.parent / "tests"
COLUMNS = (
    "id bigint, customer int, amount double precision, title text, paid boolean,"
    " price numeric(18,2), at timestamptz, day date"
)
_attempts = itertools.count(1)


@contextmanager
def postgres_server() -> Iterator[Any]:
    sys.path.insert(0, str(TESTS))
    from servers.postgres import running_server  # noqa: PLC0415  of the tests, found above

    with running_server({"fsync": "on", "shared_buffers": "256MB"}) as server:
        yield server


def execute(server: Any, statement: str) -> Any:
    with psycopg.connect(server.url(), autocommit=True) as connection:
        done = connection.execute(statement)  # type: ignore[arg-type] # a constant text
        return done.fetchone() if done.description else None


def make_table(server: Any, name: str, more: str = "") -> None:
    execute(server, f"DROP TABLE IF EXISTS {name}; CREATE TABLE {name} ({COLUMNS}{more})")


def some_rows(count: int) -> pa.Table:
    numbers = np.arange(count, dtype=np.int64)
    cents = pa.array((numbers % 100_000).astype(np.int32)).cast(pa.decimal128(18, 2))
    return pa.table(
        {
            "id": pa.array(numbers),
            "customer": pa.array((numbers % 997).astype(np.int32)),
            "amount": pa.array(numbers / 7),
            "title": pa.array([f"order {number}" for number in numbers]),
            "paid": pa.array(numbers % 2 == 0),
            "price": cents,
            "at": pa.array(numbers * 1_000_000 + 1_700_000_000_000_000).cast(
                pa.timestamp("us", tz="UTC")
            ),
            "day": pa.array((numbers % 20_000).astype(np.int32)).cast(pa.date32()),
        }
    )


class Writing:
    """One sink, its driver's committer, and tasks one after the other."""

    def __init__(self, server: Any, table: str, **options: Any) -> None:
        self.sink = Postgres(
            server.url(), table=f"public.{table}", name=SinkName(f"bench {table}"), **options
        )
        self.identity = Identity(
            pipeline="bench",
            uid=Uid("abcdefgh2345"),
            sink=self.sink.name,
            generation=Generation(1),
        )
        self.committer: Committer = self.sink.committer(self.identity, DEFAULT_LIMITS)

    def prepare(self, epoch: int, rows: pa.Table) -> Receipt:
        number = EpochNumber(epoch)
        task = Task(
            handle=self.identity.handle(number, partition=0, attempt=next(_attempts)),
            schema=rows.schema,
            handout=self.committer.begin(Begin(epoch=number)),
        )
        writer = self.sink.writer(task)
        for batch in rows.to_batches(max_chunksize=BATCH_ROWS):
            writer.write(batch)
        return writer.prepare()


def append_writer() -> Comparison:
    comparison = Comparison(
        name="postgres_append_writer",
        peer_name="psql \\copy of a ready binary file",
        unit="rows/s",
        is_rate=True,
    )
    rows = some_rows(ROWS)
    with postgres_server() as server, tempfile.TemporaryDirectory() as folder:
        file = _binary_file(server, rows, Path(folder))
        make_table(server, "ours")
        make_table(server, "theirs")
        writing = Writing(server, "ours", strategy="prepared")
        writing.committer.check(rows.schema)
        epochs = itertools.count()

        def ours() -> float:
            epoch = next(epochs)
            execute(server, "TRUNCATE ours")
            with stopwatch() as seconds:
                receipt = writing.prepare(epoch, rows)
                writing.committer.commit(EpochNumber(epoch), [receipt])
                return ROWS / seconds()

        def theirs() -> float:
            execute(server, "TRUNCATE theirs")
            command = f"\\copy theirs from '{file}' with (format binary)"
            with stopwatch() as seconds:
                subprocess.run([server.psql, "-q", server.url(), "-c", command], check=True, env={})
                return ROWS / seconds()

        comparison.run(ours, theirs, rounds=ROUNDS)
        assert execute(server, "SELECT count(*) FROM ours") == (ROWS,)
        assert execute(server, "SELECT count(*) FROM theirs") == (ROWS,)
        comparison.beside = {"writer_peak_mb": _peak_mb(server)}
        writing.committer.close()
    return comparison


def _binary_file(server: Any, rows: pa.Table, folder: Path) -> Path:
    make_table(server, "ready")
    writing = Writing(server, "ready", strategy="prepared")
    writing.committer.check(rows.schema)
    writing.committer.commit(EpochNumber(0), [writing.prepare(0, rows)])
    writing.committer.close()
    file = folder / "ready.bin"
    command = f"\\copy ready to '{file}' with (format binary)"
    subprocess.run([server.psql, "-q", server.url(), "-c", command], check=True, env={})
    execute(server, "DROP TABLE ready")
    return file


def _peak_mb(server: Any) -> float:
    """What writing a large epoch adds to a process that holds one batch at a time."""
    make_table(server, "memory")
    code = (
        "import sys; from pathlib import Path; sys.path.insert(0, '.')\n"
        "from bench import postgres as b\n"
        "def kb(name): return next(int(line.split()[1]) for line in\n"
        "  Path('/proc/self/status').read_text().splitlines() if line.startswith(name))\n"
        f"w = b.Writing(type('S', (), {{'url': lambda s: {server.url()!r}}})(), 'memory')\n"
        "rows = b.some_rows(b.BATCH_ROWS); w.committer.check(rows.schema); w.prepare(0, rows)\n"
        "before = kb('VmRSS'); Path('/proc/self/clear_refs').write_text('5')\n"
        "w.prepare(1, b.pa.concat_tables([rows] * 200)); print(kb('VmHWM') - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return round(int(done.stdout) / 1024, 1)


def commit() -> Comparison:
    """The commit phase of small epochs, against a bare COMMIT of the same rows."""
    comparison = Comparison(
        name="postgres_commit",
        peer_name="BEGIN, INSERT of the same rows, COMMIT by psycopg: the COMMIT alone",
        unit="ms p50",
        is_rate=False,
    )
    rows = some_rows(100)
    with postgres_server() as server, PeakMemory() as peak:
        make_table(server, "ours")
        make_table(server, "theirs")
        writing = Writing(server, "ours")
        writing.committer.check(rows.schema)
        epochs = itertools.count()
        times: dict[str, list[float]] = {"begin": [], "rehearse": [], "commit": [], "abort": []}

        def ours() -> float:
            before = len(times["commit"])
            for _ in range(EPOCHS // ROUNDS):
                _one_epoch(writing, rows, next(epochs), times)
            return statistics.median(times["commit"][before:])

        comparison.run(ours, lambda: _bare_commits_ms(server, EPOCHS // ROUNDS), rounds=ROUNDS)
        for _ in range(50):
            epoch = EpochNumber(next(epochs))
            receipt = writing.prepare(epoch, rows)
            with stopwatch() as seconds:
                writing.committer.abort(epoch, [receipt])
                times["abort"].append(seconds() * 1000)
        writing.committer.close()
    comparison.beside = {
        f"{verb}_{name}_ms": round(share(some), 3)
        for verb, some in times.items()
        for name, share in (("p50", statistics.median), ("p99", _p99))
    }
    comparison.beside["peak_mb"] = round(peak.bytes / 1e6)
    say(str(comparison.beside))
    return comparison


def _one_epoch(writing: Writing, rows: pa.Table, epoch: int, times: dict[str, list[float]]) -> None:
    number = EpochNumber(epoch)
    with stopwatch() as seconds:
        writing.committer.begin(Begin(epoch=number))
        times["begin"].append(seconds() * 1000)
    receipt = writing.prepare(epoch, rows)
    with stopwatch() as seconds:
        writing.committer.rehearse(number, [receipt])
        times["rehearse"].append(seconds() * 1000)
    with stopwatch() as seconds:
        writing.committer.commit(number, [receipt])
        times["commit"].append(seconds() * 1000)


def _bare_commits_ms(server: Any, count: int) -> float:
    found = []
    with psycopg.connect(server.url(), autocommit=True) as connection:
        for _ in range(count):
            connection.execute("BEGIN")
            connection.execute(
                "INSERT INTO theirs (id, title) SELECT n, 'order' FROM generate_series(1, 100) n"
            )
            with stopwatch() as seconds:
                connection.execute("COMMIT")
                found.append(seconds() * 1000)
    return statistics.median(found)


def _p99(some: list[float]) -> float:
    return sorted(some)[max(0, round(len(some) * 0.99) - 1)]


RUNS = {"postgres_append_writer": append_writer, "postgres_commit": commit}
