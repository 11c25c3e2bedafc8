"""A real server, and a pipeline in miniature for each test, in databases of its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import pymysql
import pytest
from kit.sql import place as shared
from kit.sql.place import keyed, orders, proxy  # noqa: F401  fixtures
from servers.mariadb import MariaDBServer, NoServer, running_server
from servers.tcp_proxy import Proxy

from epochal.sinks.mysql import MySQL

_numbers = itertools.count(1)


@pytest.fixture(scope="session")
def server() -> Iterator[MariaDBServer]:
    try:
        with running_server() as running:
            yield running
    except NoServer as error:
        pytest.fail(f"no MariaDB to prove anything on: {error}", pytrace=False)


@dataclass(kw_only=True)
class Place(shared.Place):
    """Two databases of one test: the user's and ours."""

    text: ClassVar[str] = "longtext"
    altered: ClassVar[str] = "MODIFY COLUMN {} {}"

    server: MariaDBServer
    admin: pymysql.Connection[Any]
    kind: type[MySQL] = MySQL

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.admin.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def url(self, **options: Any) -> str:
        return self.server.url(database=self.schema, **options)

    def reconnect(self) -> None:
        """After the server was killed."""
        self.admin.close()
        self.admin = self.server.connect()

    def leftovers(self) -> list[str]:
        """All staging tables and prepared transactions."""
        staged = self.sql(
            f"SELECT table_name FROM information_schema.tables WHERE table_schema = '{self.meta}'"
            " AND table_name <> 'ledger'"
        )
        return [name for (name,) in staged] + self.prepared()

    def prepared(self) -> list[str]:
        return [data.decode() for *_, data in self.sql("XA RECOVER")]


@contextmanager
def make_place(server: MariaDBServer) -> Iterator[Place]:
    number = next(_numbers)
    place = Place(server=server, schema=f"t{number}", meta=f"m{number}", admin=server.connect())
    place.sql(f"CREATE DATABASE {place.schema}")
    try:
        yield place
    finally:
        for life in place.lives:
            life.close()
        for xid in place.prepared():
            place.sql(f"XA ROLLBACK '{xid}'")
        for schema in (place.schema, place.meta):
            place.sql(f"DROP DATABASE IF EXISTS {schema}")
        place.admin.close()


@pytest.fixture
def place(server: MariaDBServer) -> Iterator[Place]:
    with make_place(server) as made:
        yield made


@pytest.fixture(scope="module")
def mortal() -> Iterator[tuple[Place, Proxy]]:
    """A server that may be killed, with a proxy before it."""
    with running_server() as doomed, make_place(doomed) as made:
        made.sql(f"CREATE TABLE {made.schema}.orders (id bigint, name longtext)")
        between = Proxy(doomed.port)
        yield made, between
        between.close()
