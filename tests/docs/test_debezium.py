"""The page about Debezium: its code, fed with envelopes made by hand, and real databases."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from decimal import Decimal
from pathlib import Path
from typing import Any

import psycopg
import pytest
from servers import mysql, postgres

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "debezium.md"
FIELDS = {"id": "int64", "name": "string", "total": "string", "placed_at": "int64"}


def envelope(op: str, lsn: int, before: dict | None = None, after: dict | None = None) -> str:
    """As Debezium 3's PostgreSQL connector writes it, with schemas.enable=true."""
    row = [{"type": kind, "optional": True, "field": name} for name, kind in FIELDS.items()]
    schema = {
        "type": "struct",
        "name": "shop.public.orders.Envelope",
        "version": 2,
        "fields": [
            {"type": "struct", "fields": row, "optional": True, "field": "before"},
            {"type": "struct", "fields": row, "optional": True, "field": "after"},
            {"type": "string", "optional": False, "field": "op"},
        ],
    }
    source = {
        "version": "3.0.2.Final",
        "connector": "postgresql",
        "name": "shop",
        "db": "shop",
        "ts_ms": 1731400000000 + lsn,
        "snapshot": "first" if op == "r" else "false",
        "schema": "public",
        "table": "orders",
        "txId": 700 + lsn,
        "lsn": lsn,
        "xmin": None,
    }
    payload = {"before": before, "after": after, "source": source, "op": op, "transaction": None}
    return json.dumps({"schema": schema, "payload": payload})


def row(key: int, name: str, total: str = "1.50", **more: Any) -> dict:
    return {"id": key, "name": name, "total": total, "placed_at": 1731400000123456, **more}


EPOCHS: list[list[str | None]] = [
    [
        envelope("r", 100, after=row(1, "Ann")),
        envelope("r", 100, after=row(2, "Bob")),
        envelope("c", 110, after=row(3, "Cid", "99.99")),
        envelope("u", 120, before=row(1, "Ann"), after=row(1, "Anna")),
    ],
    [
        envelope("d", 140, before={"id": 2, "name": None, "total": None, "placed_at": None}),
        None,
        envelope("u", 150, before=row(3, "Cid"), after=row(3, "Cyd", "100.00")),
        envelope("t", 155),
    ],
    [
        # Another partition of the topic lags behind: all of these are older than what is there.
        envelope("u", 115, before=row(1, "Ann"), after=row(1, "late")),
        envelope("u", 130, before=row(2, "Bob"), after=row(2, "late")),
        envelope("d", 145, before=row(3, "Cid")),
    ],
]


@pytest.fixture(scope="module")
def urls() -> Iterator[tuple[Any, Any]]:
    with ExitStack() as stack:
        ours = stack.enter_context(postgres.running_server())
        theirs = stack.enter_context(mysql.running_server(kind=mysql.MySQLServer))
        yield ours, theirs


def feed(folder: Path, epoch: int, values: list[str | None]) -> None:
    folder.mkdir(exist_ok=True)
    lines = [json.dumps({"value": value}) for value in values]
    file = folder / f"{epoch}.json"
    file.write_text("\n".join(lines))
    os.utime(file, (1_731_400_000 + epoch,) * 2)  # Spark reads older files first


def run(spark, tmp_path: Path, urls: tuple[Any, Any], code: str) -> None:
    known: dict[str, Any] = {}
    exec(code, known)
    source = tmp_path / "topic"
    records = (
        spark.readStream.schema("value string").option("maxFilesPerTrigger", 1).json(str(source))
    )
    made = known["copy_of_orders"](urls[0].url(), urls[1].url(database="shop"))
    query = made.start(
        known["changes"](records), checkpoint=str(tmp_path / "checkpoint"), availableNow=True
    )
    query.awaitTermination()
    assert made.error is None


def test_a_debezium_stream_arrives_in_both_databases(spark, tmp_path, urls):
    ours, theirs = urls
    there = theirs.connect()
    with there.cursor() as cursor:
        cursor.execute("CREATE DATABASE shop")
        cursor.execute(
            "CREATE TABLE shop.orders (id bigint PRIMARY KEY, name varchar(50), total"
            " decimal(12,2), placed_at datetime(6), version bigint, deleted_at datetime(6))"
        )
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    for epoch, values in enumerate(EPOCHS):
        feed(tmp_path / "topic", epoch, values)
    run(spark, tmp_path, urls, code)

    def in_postgres(query: str) -> list[tuple]:
        with psycopg.connect(ours.url()) as connection:
            return connection.execute(query).fetchall()

    def in_mysql(query: str) -> list[tuple]:
        with there.cursor() as cursor:
            cursor.execute(query)
            return list(cursor.fetchall())

    listed = "SELECT id, name, total, version FROM {} ORDER BY id"
    anna, cyd = (1, "Anna", Decimal("1.50"), 120), (3, "Cyd", Decimal("100.00"), 150)
    assert in_postgres(listed.format("orders")) == [anna, cyd]
    assert in_postgres("SELECT id, version FROM orders_deleted") == [(2, 140)]
    bob = (2, "Bob", Decimal("1.50"), 140)
    assert in_mysql(listed.format("shop.orders")) == [anna, bob, cyd]
    assert in_mysql("SELECT id FROM shop.orders WHERE deleted_at IS NOT NULL") == [(2,)]

    # A column is new at the source: the page says what to do.
    wider = code.replace("placed_at bigint", "placed_at bigint, note string").replace(
        '"e.source.lsn AS version"', '"e.after.note AS note", "e.source.lsn AS version"'
    )
    with there.cursor() as cursor:
        cursor.execute("ALTER TABLE shop.orders ADD COLUMN note varchar(50)")
    feed(tmp_path / "topic", 3, [envelope("c", 160, after=row(4, "Dan", note="new"))])
    run(spark, tmp_path, urls, wider)
    noted = [(1, None), (3, None), (4, "new")]
    assert in_postgres("SELECT id, note FROM orders ORDER BY id") == noted
    assert in_mysql("SELECT id, note FROM shop.orders WHERE id <> 2 ORDER BY id") == noted
    there.close()
