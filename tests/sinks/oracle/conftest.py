"""H2 in Oracle mode behind a stand-in of oracledb, and a pipeline in miniature for each test."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
from servers.h2 import H2Server
from sinks.life import Life
from sinks.oracle.standin import StandIn

from epochal.kit.sql.client import IdleConnections
from epochal.sinks.oracle import Oracle, client, writer
from epochal.terms import SinkName

SECRET = "hunter2-s3cret"
_VIEWS = """
CREATE VIEW PUBLIC.ALL_OBJECTS AS SELECT TABLE_SCHEMA AS OWNER, TABLE_NAME AS OBJECT_NAME,
  'TABLE' AS OBJECT_TYPE FROM INFORMATION_SCHEMA.TABLES;
CREATE VIEW PUBLIC.ALL_TAB_COLS AS SELECT TABLE_SCHEMA AS OWNER, TABLE_NAME, COLUMN_NAME,
  ORDINAL_POSITION AS COLUMN_ID, CHARACTER_MAXIMUM_LENGTH AS DATA_LENGTH,
  CHARACTER_MAXIMUM_LENGTH AS CHAR_LENGTH, 'C' AS CHAR_USED,
  NUMERIC_PRECISION AS DATA_PRECISION, NUMERIC_SCALE AS DATA_SCALE,
  CASE DATA_TYPE WHEN 'CHARACTER VARYING' THEN 'VARCHAR2' WHEN 'CHARACTER LARGE OBJECT' THEN 'CLOB'
    WHEN 'BINARY LARGE OBJECT' THEN 'BLOB' WHEN 'TIMESTAMP' THEN
      CASE DATETIME_PRECISION WHEN 0 THEN 'DATE' ELSE 'TIMESTAMP(6)' END
    WHEN 'DOUBLE PRECISION' THEN 'BINARY_DOUBLE' ELSE 'NUMBER' END AS DATA_TYPE,
  CASE IS_NULLABLE WHEN 'NO' THEN 'N' ELSE 'Y' END AS NULLABLE,
  LENGTH(COLUMN_DEFAULT) AS DEFAULT_LENGTH, 'NO' AS VIRTUAL_COLUMN, IS_IDENTITY AS IDENTITY_COLUMN,
  'NO' AS HIDDEN_COLUMN FROM INFORMATION_SCHEMA.COLUMNS;
CREATE VIEW PUBLIC.ALL_TAB_COLUMNS AS SELECT * FROM PUBLIC.ALL_TAB_COLS;
CREATE VIEW PUBLIC.ALL_INDEXES AS SELECT INDEX_SCHEMA AS OWNER, INDEX_NAME,
  TABLE_SCHEMA AS TABLE_OWNER, TABLE_NAME,
  CASE WHEN INDEX_TYPE_NAME IN ('PRIMARY KEY', 'UNIQUE INDEX') THEN 'UNIQUE' ELSE 'NONUNIQUE' END
    AS UNIQUENESS FROM INFORMATION_SCHEMA.INDEXES;
CREATE VIEW PUBLIC.ALL_IND_COLUMNS AS SELECT INDEX_SCHEMA AS INDEX_OWNER, INDEX_NAME, COLUMN_NAME
  FROM INFORMATION_SCHEMA.INDEX_COLUMNS
"""


@pytest.fixture(scope="session")
def h2() -> Iterator[H2Server]:
    server = H2Server()
    for statement in _VIEWS.split(";"):
        server.ask("admin", "run", statement)
    yield server
    server.stop()


@dataclass(kw_only=True)
class Place:
    """The schema of the sink's user."""

    module: StandIn
    schema: str = "ETL"
    lives: list[Life] = field(default_factory=list)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        answer = self.module.h2.ask("admin", "run", statement)
        self.module.h2.ask("admin", "commit")
        return answer if isinstance(answer, list) else []

    def sink(self, table: str = "orders", **options: Any) -> Oracle:
        name = options.pop("name", SinkName(table))
        return Oracle(
            f"oracle://etl:{SECRET}@db/shop", table=table, name=name, **{"pool_min": 1, **options}
        )

    def life(self, table: str = "orders", **options: Any) -> Life:
        return self.keep(Life(sink=self.sink(table, **options)))

    def keep(self, life: Life) -> Life:
        self.lives.append(life)
        return life

    def rows(self, table: str = "orders", columns: str = "*") -> list[tuple[Any, ...]]:
        return self.sql(f"SELECT {columns} FROM ETL.{table} ORDER BY 1")

    def leftovers(self) -> list[str]:
        staged = self.sql(
            "SELECT TABLE_NAME FROM INFORMATION_SCHEMA.TABLES WHERE TABLE_SCHEMA = 'ETL'"
            " AND SUBSTR(TABLE_NAME, 1, 2) = 'ep'"
        )
        return [name for (name,) in staged] + list(self.module.parked)

    def called(self, *verbs: str) -> list[tuple[Any, ...]]:
        return [call for call in self.module.calls if call[0] in verbs]


@pytest.fixture
def place(h2: H2Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    module = StandIn(h2)
    monkeypatch.setattr(client, "oracledb", module)
    monkeypatch.setattr(writer, "_connections", IdleConnections(answers=client.answers))
    made = Place(module=module)
    yield made
    for life in made.lives:
        life.close()
    h2.ask("admin", "alone")
    tables = made.sql("SELECT TABLE_NAME FROM INFORMATION_SCHEMA.TABLES WHERE TABLE_SCHEMA = 'ETL'")
    for (name,) in tables:
        made.sql(f'DROP TABLE ETL."{name}" CASCADE CONSTRAINTS')


@pytest.fixture
def orders(place: Place) -> Place:
    place.sql("CREATE TABLE ETL.orders (id NUMBER(19), name CLOB)")
    return place


@pytest.fixture
def keyed(place: Place) -> Place:
    place.sql(
        "CREATE TABLE ETL.orders (id NUMBER(19) PRIMARY KEY, name VARCHAR2(200),"
        " note VARCHAR2(99) DEFAULT 'untouched')"
    )
    return place
