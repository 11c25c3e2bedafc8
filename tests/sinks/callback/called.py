"""A function that keeps what it is called with in a SQLite file, once per token."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Keeper:
    """Deduplicates by token, as the guide recommends; counts every call."""

    file: str

    def __call__(self, epoch) -> None:
        with closing(self._open()) as db, db:
            db.execute("INSERT INTO calls VALUES (?)", (epoch.token,))
            if db.execute("SELECT 1 FROM seen WHERE token = ?", (epoch.token,)).fetchone():
                return
            db.execute("INSERT INTO seen VALUES (?)", (epoch.token,))
            rows = [row for batch in epoch.batches() for row in batch.to_pylist()]
            db.executemany("INSERT INTO rows VALUES (?)", [(json.dumps(row),) for row in rows])

    def rows(self) -> list[dict]:
        with closing(self._open()) as db:
            return [json.loads(row) for (row,) in db.execute("SELECT row FROM rows")]

    def calls(self) -> list[str]:
        with closing(self._open()) as db:
            return [token for (token,) in db.execute("SELECT token FROM calls")]

    def _open(self) -> sqlite3.Connection:
        db = sqlite3.connect(Path(self.file))
        for table in ("calls (token)", "seen (token)", "rows (row)"):
            db.execute(f"CREATE TABLE IF NOT EXISTS {table}")
        return db
