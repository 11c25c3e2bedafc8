"""A real server, and a pipeline in miniature for each test, in schemas of its own."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import psycopg
import pytest
from kit.sql import place as shared
from kit.sql.place import keyed, orders, proxy  # noqa: F401  fixtures
from servers.pgbouncer import running_pgbouncer
from servers.postgres import NoServer, PostgresServer, debian_binaries, running_server
from servers.tcp_proxy import Proxy
from sinks.postgres.packed import PackedPostgres

from epochal.sinks.postgres import Postgres
from epochal.terms import Handle

_numbers = itertools.count(1)
_WAYS = {"columns": Postgres, "bytes": PackedPostgres}
_BOTH_WAYS = {"test_altered_tables", "test_rejects", "test_types"}
"""Modules whose tests see rows leave their tasks as columns, and again as bytes."""
_AS_BYTES = {"test_crashes"}
"""Modules that see the way of Spark only: the calls where a driver dies are the same in both."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Tests and classes elsewhere are marked with the ways that they see."""
    module = metafunc.module.__name__.rpartition(".")[2]
    marked = metafunc.definition.get_closest_marker("ways")
    if "place" in metafunc.fixturenames and (marked or module in _BOTH_WAYS | _AS_BYTES):
        both = [*_WAYS] if module in _BOTH_WAYS else ["bytes"]
        metafunc.parametrize("place", marked.args if marked else both, indirect=True)


def binaries() -> Path | None:
    """EPOCHAL_POSTGRES=15 runs everything on Debian's server."""
    return debian_binaries() if os.environ.get("EPOCHAL_POSTGRES") == "15" else None


@pytest.fixture(scope="session")
def server() -> Iterator[PostgresServer]:
    try:
        with running_server(binaries=binaries()) as running:
            yield running
    except NoServer as error:
        pytest.fail(f"no PostgreSQL to prove anything on: {error}", pytrace=False)


@dataclass(kw_only=True)
class Place(shared.Place):
    """Two schemas of one test: the user's and ours."""

    server: PostgresServer
    admin: psycopg.Connection[Any]
    kind: type[Postgres] = Postgres
    row_place: ClassVar[str] = "(0,{})"

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        cursor = self.admin.execute(statement)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []

    def url(self, **options: Any) -> str:
        return self.server.url(**options)

    def open_transactions(self) -> list[int]:
        rows = self.sql("SELECT pid FROM pg_stat_activity WHERE state LIKE 'idle in transaction%'")
        return [pid for (pid,) in rows]

    def other_connection(self) -> Place:
        return replace(self, admin=connect(self.server), lives=[])

    def is_anybody_waiting(self) -> bool:
        return bool(self.sql("SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"))

    def sessions(self, uid: str) -> list[int]:
        rows = self.sql(
            f"SELECT pid FROM pg_stat_activity WHERE application_name LIKE 'epochal-{uid}%'"
        )
        return [pid for (pid,) in rows]

    def end_session(self, number: int) -> None:
        self.sql(f"SELECT pg_terminate_backend({number}, 10000)")

    def slot(self, handle: Handle) -> str:
        """The table that holds the rows of an attempt."""
        ((slot,),) = self.sql(
            f"SELECT slot FROM {self.meta}_staging.slots WHERE handle = '{handle}'"
        )
        return f"{self.meta}_staging.slot_{slot}"

    def slots_used(self, handles: Sequence[str]) -> list[str]:
        listed = ", ".join(f"'{one}'" for one in handles)
        rows = self.sql(
            f"SELECT 'slot_' || slot FROM {self.meta}_staging.slots WHERE handle IN ({listed})"
        )
        return [name for (name,) in rows]

    def kill_any_session(self) -> None:
        self.sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
            " WHERE application_name LIKE 'ep%' ORDER BY random() LIMIT 1"
        )

    def setting(self, connection: Any) -> str:
        """What a task's session has set by `session_sql`."""
        ((value,),) = connection.ask("SELECT current_setting('epochal_test.said')")
        return str(value)

    def drop_staged(self, handle: Handle) -> None:
        self.sql(f"DROP TABLE {self.slot(handle)}")

    def reconnect(self) -> None:
        """After the server was killed."""
        self.admin.close()
        self.admin = connect(self.server)

    def leftovers(self) -> list[str]:
        """All staged attempts and prepared transactions."""
        registry = f"{self.meta}_staging.slots"
        is_there = self.sql(f"SELECT to_regclass('{registry}')") != [(None,)]
        staged = (
            self.sql(
                f"SELECT handle FROM {registry} WHERE handle IS NOT NULL"
                f" AND to_regclass('{self.meta}_staging.slot_' || slot) IS NOT NULL"
            )
            if is_there
            else []
        )
        prepared = self.sql("SELECT gid FROM pg_prepared_xacts")
        return [name for (name,) in staged + prepared]


def connect(server: PostgresServer) -> psycopg.Connection[Any]:
    return psycopg.connect(server.url(), autocommit=True, prepare_threshold=None)


@contextmanager
def make_place(server: PostgresServer, way: str = "columns") -> Iterator[Place]:
    number = next(_numbers)
    place = Place(
        server=server,
        schema=f"t{number}",
        meta=f"m{number}",
        admin=connect(server),
        kind=_WAYS[way],
    )
    place.sql(f"CREATE SCHEMA {place.schema}")
    try:
        yield place
    finally:
        for life in place.lives:
            life.close()
        admin = place.admin
        for (gid,) in admin.execute("SELECT gid FROM pg_prepared_xacts").fetchall():
            admin.execute(f"ROLLBACK PREPARED '{gid}'")
        for schema in (place.schema, place.meta, f"{place.meta}_staging"):
            admin.execute(f"DROP SCHEMA IF EXISTS {schema} CASCADE")
        admin.close()


@pytest.fixture
def place(server: PostgresServer, request: pytest.FixtureRequest) -> Iterator[Place]:
    with make_place(server, getattr(request, "param", "columns")) as made:
        yield made


@pytest.fixture(scope="module")
def mortal() -> Iterator[tuple[Place, Proxy]]:
    """A server that may be killed, with a proxy before it; it sees a COPY whichever the way is."""
    with running_server(binaries=binaries()) as doomed, make_place(doomed, "bytes") as made:
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
    with running_server(binaries=debian_binaries()) as running, make_place(running) as place:
        place.sql("CREATE EXTENSION citext")
        yield place


@pytest.fixture
def least(place: Place) -> Iterator[str]:
    """A role without rights."""
    role = f"role_{place.schema}"
    place.sql(f"CREATE ROLE {role} LOGIN")
    yield role
    for life in place.lives:
        life.close()
    place.sql(f"DROP OWNED BY {role}")
    place.sql(f"DROP ROLE {role}")
