"""A real server, and a pipeline in miniature for each test, in schemas of its own."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from servers.pgbouncer import running_pgbouncer
from servers.postgres import NoServer, PostgresServer, debian_binaries, running_server
from servers.tcp_proxy import Proxy

from epochal.contract import Committer, Limits, Task
from epochal.sinks.postgres import Postgres
from epochal.terms import EpochNumber, Generation, Identity, Receipt, SinkName, Uid

CACHE = Path(__file__).resolve().parents[3] / ".cache"
UID = Uid("abcdefgh2345")
QUICK = Limits(retry_backoff_ms=(1, 5))
_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    try:
        with running_server() as running:
            yield running
    except NoServer as error:
        pytest.fail(f"no PostgreSQL to prove anything on: {error}", pytrace=False)


@dataclass(kw_only=True)
class Life:
    """One driver of one pipeline with one sink, and its tasks."""

    sink: Postgres
    generation: int = 1
    uid: Uid = UID
    run: str | None = None
    attempts: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    opened: list[Committer] = field(default_factory=list)

    @property
    def identity(self) -> Identity:
        return Identity(
            pipeline="orders",
            uid=self.uid,
            sink=self.sink.name,
            generation=Generation(self.generation),
            run=self.run,
        )

    @property
    def committer(self) -> Any:
        """The driver's: one a life."""
        if not self.opened:
            self.opened.append(self.sink.committer(self.identity, QUICK))
        return self.opened[0]

    def fresh(self, **changes: Any) -> Life:
        """Another process with the same sink."""
        return replace(self, opened=[], **changes)

    def close(self) -> None:
        for committer in self.opened:
            committer.close()
        self.opened.clear()

    def start(self, rows: pa.Table) -> None:
        self.committer.check(rows.schema)

    def writer(self, schema: pa.Schema, epoch: int, partition: int = 0) -> Any:
        handout = self.committer.begin(EpochNumber(epoch))
        handle = self.identity.handle(
            EpochNumber(epoch), partition=partition, attempt=next(self.attempts)
        )
        return self.sink.writer(Task(handle=handle, schema=schema, handout=handout, limits=QUICK))

    def prepare(self, rows: pa.Table, epoch: int, partition: int = 0) -> Receipt:
        writer = self.writer(rows.schema, epoch, partition)
        for batch in rows.to_batches(max_chunksize=1000):
            writer.write(batch)
        return writer.prepare()

    def rehearse(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.rehearse(EpochNumber(epoch), receipts)

    def commit(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.commit(EpochNumber(epoch), receipts)

    def write(self, epoch: int, *parts: pa.Table) -> list[Receipt]:
        """A whole epoch, each table a task."""
        if not self.opened and parts:
            self.start(parts[0])
        receipts = [self.prepare(rows, epoch, number) for number, rows in enumerate(parts)]
        self.rehearse(epoch, receipts)
        self.commit(epoch, receipts)
        return receipts


@dataclass(kw_only=True)
class Place:
    """Two schemas of one test: the user's and ours."""

    server: PostgresServer
    schema: str
    meta: str
    admin: psycopg.Connection[Any]
    lives: list[Life] = field(default_factory=list)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self.admin.execute(statement)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def sink(self, table: str = "orders", *, url: str | None = None, **options: Any) -> Postgres:
        name = options.pop("name", SinkName(f"{self.schema}.{table}"))
        defaults = {"meta_schema": self.meta, "pool_min": 1, "connect_timeout_s": 10, "name": name}
        return Postgres(
            url or self.server.url(), table=f"{self.schema}.{table}", **{**defaults, **options}
        )

    def life(self, table: str = "orders", **options: Any) -> Life:
        generation = options.pop("generation", 1)
        life = Life(sink=self.sink(table, **options), generation=generation)
        return self.keep(life)

    def keep(self, life: Life) -> Life:
        self.lives.append(life)
        return life

    def rows(self, table: str = "orders", columns: str = "*") -> list[tuple[Any, ...]]:
        return self.sql(f'SELECT {columns} FROM {self.schema}."{table}" ORDER BY 1')

    def leftovers(self) -> list[str]:
        """Staging tables and prepared transactions, whoever made them."""
        staged = self.sql(
            "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace"
            f" WHERE n.nspname = '{self.meta}' AND c.relkind = 'r' AND c.relname <> 'ledger'"
        )
        prepared = self.sql("SELECT gid FROM pg_prepared_xacts")
        return [name for (name,) in staged + prepared]


@contextmanager
def make_place(server: PostgresServer) -> Iterator[Place]:
    number = next(_numbers)
    admin = psycopg.connect(server.url(), autocommit=True, prepare_threshold=None)
    place = Place(server=server, schema=f"t{number}", meta=f"m{number}", admin=admin)
    place.sql(f"CREATE SCHEMA {place.schema}")
    try:
        yield place
    finally:
        for life in place.lives:
            life.close()
        admin = place.admin
        for (gid,) in admin.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            admin.execute(f"ROLLBACK PREPARED '{gid}'")
        for schema in (place.schema, place.meta):
            admin.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        admin.close()


@pytest.fixture
def place(server: PostgresServer) -> Iterator[Place]:
    with make_place(server) as made:
        yield made


@pytest.fixture
def proxy(server: PostgresServer) -> Iterator[Proxy]:
    running = Proxy(server.port)
    yield running
    running.close()


@pytest.fixture
def orders(place: Place) -> Place:
    """A table without a key."""
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint, name text)")
    return place


@pytest.fixture
def keyed(place: Place) -> Place:
    place.sql(
        f"CREATE TABLE {place.schema}.orders"
        " (id bigint PRIMARY KEY, name text, note text DEFAULT 'untouched')"
    )
    return place


Rows = Callable[..., pa.Table]


@pytest.fixture
def some() -> Rows:
    """Rows with these ids."""

    def made(*ids: int, name: str = "n") -> pa.Table:
        return pa.table(
            {"id": pa.array(ids, pa.int64()), "name": [f"{name}{number}" for number in ids]}
        )

    return made


@pytest.fixture(scope="module")
def mortal() -> Iterator[tuple[Place, Proxy]]:
    """A server that may be killed, with a proxy before it."""
    with running_server() as doomed, make_place(doomed) as made:
        made.sql(f"CREATE TABLE {made.schema}.orders (id bigint, name text)")
        between = Proxy(doomed.port)
        yield made, between
        between.close()


@pytest.fixture(scope="module")
def pooled(server: PostgresServer) -> Iterator[int]:
    """The port of a pooler before the server."""
    with running_pgbouncer(server) as port:
        yield port


@pytest.fixture(scope="module")
def older() -> Iterator[Place]:
    """A place on an older server, with an extension."""
    with running_server(binaries=debian_binaries(CACHE)) as running, make_place(running) as place:
        place.sql("CREATE EXTENSION citext")
        yield place
