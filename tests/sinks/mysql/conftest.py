"""Real servers, and a pipeline in miniature for each test, in databases of its own.

A test runs on MariaDB unless the marker `products`, of its module, its class or its own, says
otherwise: what is sharp runs on both.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, ClassVar

import pymysql
import pytest
from kit.sql import place as shared
from kit.sql.place import keyed, orders, proxy  # noqa: F401  fixtures
from servers.mysql import DatabaseProcess, MariaDBServer, MySQLServer, running_server
from servers.processes import NoServer
from servers.tcp_proxy import Proxy

from epochal.kit.sql.names import staging_name
from epochal.sinks.mysql import MySQL
from epochal.terms import Handle

_numbers = itertools.count(1)


_KINDS: Mapping[str, type[DatabaseProcess]] = {"mariadb": MariaDBServer, "mysql": MySQLServer}
_ONCE = frozenset(
    {
        "test_a_commit_that_proves_nothing_is_found_at_the_next_start",
        "test_a_task_takes_less_than_100_mb_whatever_the_size_of_its_epoch",
        "test_the_judge_objects_to_a_commit_that_forgets_rows",
    }
)
"""Long tests of our own memory and of the judge, which no server has a part in."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """
    The products of a test; EPOCHAL_MYSQL=mysql runs everything there, and nowhere else, but for
    tests that are marked with another product alone.
    """
    if "product" not in metafunc.fixturenames:
        return
    marked = metafunc.definition.get_closest_marker("products")
    products = marked.args if marked is not None else ("mariadb",)
    if metafunc.function.__name__ in _ONCE:
        products = products[:1]
    alone = os.environ.get("EPOCHAL_MYSQL")
    if marked is not None and alone not in products:
        alone = None
    metafunc.parametrize("product", [alone] if alone else products, indirect=True, scope="module")


@pytest.fixture(scope="module")
def product(request: pytest.FixtureRequest) -> str:
    """`mariadb` or `mysql`."""
    return str(request.param)


@pytest.fixture(scope="session")
def servers() -> Iterator[Callable[[str], DatabaseProcess]]:
    """The server of a product, started at the first call and kept for the whole run."""
    with ExitStack() as stack:
        yield cache(lambda product: stack.enter_context(_running(product)))


@contextmanager
def _running(product: str) -> Iterator[DatabaseProcess]:
    try:
        with running_server(kind=_KINDS[product]) as running:
            yield running
    except NoServer as error:
        pytest.fail(f"no {product} to prove anything on: {error}", pytrace=False)


@pytest.fixture(scope="module")
def server(servers: Callable[[str], DatabaseProcess], product: str) -> DatabaseProcess:
    return servers(product)


@dataclass(kw_only=True)
class Place(shared.Place):
    """Two databases of one test: the user's and ours."""

    text: ClassVar[str] = "longtext"
    hashed: ClassVar[str] = "PARTITION BY HASH (id) PARTITIONS 2"
    altered: ClassVar[str] = "MODIFY COLUMN {} {}"
    ordered: ClassVar[str] = "varchar(9) COLLATE utf8mb4_bin"
    numbered: ClassVar[str] = ""

    server: DatabaseProcess
    admin: pymysql.Connection[Any]
    kind: type[MySQL] = MySQL

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        with self.admin.cursor() as cursor:
            cursor.execute(statement)
            return list(cursor.fetchall())

    def url(self, **options: Any) -> str:
        """Without TLS through a proxy, which looks at what passes."""
        plain = "?ssl_disabled=true" if "port" in options else ""
        return self.server.url(database=self.schema, **options) + plain

    @property
    def is_mariadb(self) -> bool:
        return isinstance(self.server, MariaDBServer)

    def make_account(self, name: str, password: str = "") -> None:
        """A new account of this name, without rights."""
        self.sql(f"DROP USER IF EXISTS {name}")
        self.sql(f"CREATE USER {name} IDENTIFIED BY '{password}'")

    def grant(self, sink: MySQL) -> None:
        for statement in sink.grants():
            if not (self.is_mariadb and "XA_RECOVER_ADMIN" in statement):
                self.sql(statement)

    def open_transactions(self) -> list[int]:
        # The server reads its list again only if nobody has read it for 0.1 s.
        time.sleep(0.15)
        rows = self.sql(
            "SELECT trx_mysql_thread_id FROM information_schema.innodb_trx"
            " WHERE trx_mysql_thread_id <> 0"
        )
        return [number for (number,) in rows]

    def other_connection(self) -> Place:
        return replace(self, admin=self.server.connect(), lives=[])

    def is_anybody_waiting(self) -> bool:
        time.sleep(0.15)
        waiting = "SELECT 1 FROM information_schema.innodb_trx WHERE trx_state = 'LOCK WAIT'"
        return bool(self.sql(waiting))

    def sessions(self, uid: str) -> list[int]:
        rows = self.sql(f"SELECT id FROM information_schema.processlist WHERE db = '{self.schema}'")
        return [number for (number,) in rows]

    def end_session(self, number: int) -> None:
        self.sql(f"KILL CONNECTION {number}")
        while number in self.open_transactions():
            pass

    def reconnect(self) -> None:
        """After the server was killed."""
        self.admin.close()
        self.admin = self.server.connect()

    def leftovers(self) -> list[str]:
        """All staged attempts and prepared transactions."""
        return self.staged() + self.prepared()

    def staged(self) -> list[str]:
        """Slots that are used, and tables of an attempt's own."""
        tables = [
            name
            for (name,) in self.sql(
                "SELECT table_name FROM information_schema.tables"
                f" WHERE table_schema = '{self.staging}'"
            )
        ]
        if not tables:
            return []
        used = self.sql(f"SELECT slot FROM {self.staging}.slots WHERE handle IS NOT NULL")
        own = [name for name in tables if not name.startswith("slot")]
        return sorted([*own, *(slot for (slot,) in used)])

    @property
    def staging(self) -> str:
        return f"{self.meta}_staging"

    def slots_used(self, handles: Sequence[str]) -> list[str]:
        listed = ", ".join(f"'{one}'" for one in handles)
        rows = self.sql(f"SELECT slot FROM {self.staging}.slots WHERE handle IN ({listed})")
        return [slot for (slot,) in rows]

    def kill_any_session(self) -> None:
        """Of those that have this test's database as their own."""
        rows = self.sql(
            f"SELECT id FROM information_schema.processlist WHERE db = '{self.schema}'"
            " ORDER BY RAND() LIMIT 1"
        )
        for (number,) in rows:
            with suppress(pymysql.MySQLError):
                self.sql(f"KILL CONNECTION {number}")

    def setting(self, connection: Any) -> str:
        """What a task's session has set by `session_sql`."""
        with connection.cursor() as cursor:
            cursor.execute("SELECT @said")
            return str(cursor.fetchone()[0])

    def drop_staged(self, handle: Handle) -> None:
        self.sql(f"DROP TABLE {self.staging}.{self.slot(handle)}")

    def slot(self, handle: Handle) -> str:
        """The staging table of an attempt."""
        used = self.sql(f"SELECT slot FROM {self.staging}.slots WHERE handle = '{handle}'")
        return used[0][0] if used else staging_name(handle)

    def prepared(self) -> list[str]:
        listed = [data for *_, data in self.sql("XA RECOVER")]
        return [one if isinstance(one, str) else one.decode() for one in listed]


@contextmanager
def make_place(server: DatabaseProcess) -> Iterator[Place]:
    number = next(_numbers)
    place = Place(server=server, schema=f"t{number}", meta=f"m{number}", admin=server.connect())
    place.sql(f"CREATE DATABASE {place.schema}")
    try:
        yield place
    finally:
        for life in place.lives:
            life.close()
        # Those of a test that failed hold locks, and DROP DATABASE would wait for a day.
        for number in place.sessions(""):
            with suppress(pymysql.MySQLError):
                place.sql(f"KILL CONNECTION {number}")
        for xid in place.prepared():
            place.sql(f"XA ROLLBACK '{xid}'")
        for schema in (place.schema, place.meta, place.staging):
            place.sql(f"DROP DATABASE IF EXISTS {schema}")
        place.admin.close()


@pytest.fixture
def place(server: DatabaseProcess) -> Iterator[Place]:
    with make_place(server) as made:
        yield made


@pytest.fixture(scope="module")
def mortal(product: str) -> Iterator[tuple[Place, Proxy]]:
    """A server that may be killed, with a proxy before it."""
    with _running(product) as doomed, make_place(doomed) as made:
        made.sql(f"CREATE TABLE {made.schema}.orders (id bigint, name longtext)")
        between = Proxy(doomed.port)
        yield made, between
        between.close()


@pytest.fixture
def least(place: Place) -> Iterator[str]:
    """An account without rights."""
    place.make_account("least")
    yield "least"
    for life in place.lives:
        life.close()
    place.sql("DROP USER least")
