"""The SQLite sink meets epochal's conformance suite."""

import sqlite3
from contextlib import closing
from pathlib import Path

from epochal_sqlite import SQLite

from epochal.testing.conformance import SinkConformance, Target


class TestSQLite(SinkConformance):
    def make(self, tmp_path: Path) -> Target:
        path = str(tmp_path / "shop.db")

        def read(query: str) -> list[dict[str, object]]:
            with closing(sqlite3.connect(path)) as connection:
                found = connection.execute(query)
                return [dict(zip(("id", "name"), row, strict=False)) for row in found]

        read("CREATE TABLE orders (id INTEGER, name TEXT)")
        return Target(
            sink=SQLite(path=path, table="orders"),
            visible=lambda: read("SELECT id, name FROM orders"),
            leftovers=lambda: read("SELECT name FROM sqlite_master WHERE name GLOB 'epochal-*'"),
        )
