"""The SQLite sink meets epochal's conformance suite."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

from epochal_sqlite import SQLite

from epochal.testing.conformance import SinkConformance, Target
from epochal.testing.crash import statements


class TestSQLite(SinkConformance):
    def make(self, tmp_path: Path) -> Target:
        path = str(tmp_path / "shop.db")
        sink = SQLite(path=path, table="orders")

        def read(query: str) -> list[dict[str, object]]:
            with closing(sqlite3.connect(path)) as connection:
                found = connection.execute(query)
                return [dict(zip(("id", "name"), row, strict=False)) for row in found]

        @contextmanager
        def locked() -> Iterator[SQLite]:
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                connection.execute("BEGIN EXCLUSIVE")
                yield replace(sink, busy_timeout_s=0.01)

        read("CREATE TABLE orders (id INTEGER, name TEXT CHECK (name <> 'refused'))")
        return Target(
            sink=sink,
            visible=lambda: read("SELECT id, name FROM orders"),
            leftovers=lambda: read("SELECT name FROM sqlite_master WHERE name GLOB 'epochal-*'"),
            refused=(2, "refused"),
            unreachable=locked,
            misconfigured={
                "a missing file": replace(sink, path=str(tmp_path / "nowhere.db")),
                "a missing table": replace(sink, table="ordres"),
            },
            calls=partial(statements, sqlite3),
        )
