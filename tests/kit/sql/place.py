"""`Place`: two schemas of one test on a real server, and the drivers that work in them.

The conftest of each database derives its own from it and has a fixture `place`; the fixtures here
build on that one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from servers.tcp_proxy import Proxy
from sinks.life import Life

from epochal.kit.sql.names import staging_name
from epochal.kit.sql.table_sink import TableSink
from epochal.terms import Handle, SinkName


@dataclass(kw_only=True)
class Place:
    """The user's schema and ours."""

    text: ClassVar[str] = "text"
    """The type of a column of text."""
    hashed: ClassVar[str] = "WITH (fillfactor = 70)"
    """Options of a table that are no columns."""
    row_place: ClassVar[str] = "{}"
    """The place in a staging table of the row of this number."""
    altered: ClassVar[str] = "ALTER COLUMN {} TYPE {}"
    """What ALTER TABLE does to give a column another type."""
    ordered: ClassVar[str] = "text"
    """The type of a column of short text that every letter counts in."""
    numbered: ClassVar[str] = "n serial,"
    """A column that the server fills, by rights of its own where there are such."""

    server: Any
    schema: str
    meta: str
    admin: Any
    kind: type[TableSink]
    lives: list[Life] = field(default_factory=list, repr=False)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        raise NotImplementedError

    def url(self, **options: Any) -> str:
        raise NotImplementedError

    def other_connection(self) -> Place:
        """The same place for somebody else, who closes `admin`."""
        raise NotImplementedError

    def open_transactions(self) -> list[int]:
        """The sessions that have one, of all users."""
        raise NotImplementedError

    def end_session(self, number: int) -> None:
        raise NotImplementedError

    def sessions(self, uid: str) -> list[int]:
        """Of the drivers and tasks of a pipeline."""
        raise NotImplementedError

    def slots_used(self, handles: Sequence[str]) -> list[str]:
        """The staging tables that hold these attempts."""
        raise NotImplementedError

    def kill_any_session(self) -> None:
        """End any session of a driver or a task."""
        raise NotImplementedError

    def drop_staged(self, handle: Handle) -> None:
        """As somebody might who finds a table that looks forgotten."""
        self.sql(f"DROP TABLE {self.meta}.{staging_name(handle)}")

    def is_anybody_waiting(self) -> bool:
        """Whether a transaction waits for a lock."""
        raise NotImplementedError

    def sink(self, table: str = "orders", *, url: str | None = None, **options: Any) -> Any:
        name = options.pop("name", SinkName(f"{self.schema}.{table}"))
        defaults = {"meta_schema": self.meta, "pool_min": 1, "connect_timeout_s": 10, "name": name}
        return self.kind(
            url or self.url(), table=f"{self.schema}.{table}", **{**defaults, **options}
        )

    def life(self, table: str = "orders", **options: Any) -> Life:
        generation = options.pop("generation", 1)
        return self.keep(Life(sink=self.sink(table, **options), generation=generation))

    def keep(self, life: Life) -> Life:
        """Close it when the test ends."""
        self.lives.append(life)
        return life

    def grant(self, sink: Any) -> None:
        """Give an account all that a sink asks for."""
        for statement in sink.grants():
            self.sql(statement)

    def rows(self, table: str = "orders", columns: str = "*") -> list[tuple[Any, ...]]:
        quoted = self.kind.names.quote(table)
        return self.sql(f"SELECT {columns} FROM {self.schema}.{quoted} ORDER BY 1")


@pytest.fixture
def proxy(server: Any) -> Iterator[Proxy]:
    running = Proxy(server.port)
    yield running
    running.close()


@pytest.fixture
def orders(place: Any) -> Any:
    """A table without a key."""
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint, name {place.text})")
    return place


@pytest.fixture
def keyed(place: Any) -> Any:
    place.sql(
        f"CREATE TABLE {place.schema}.orders"
        f" (id bigint PRIMARY KEY, name {place.text}, note varchar(99) DEFAULT 'untouched')"
    )
    return place
