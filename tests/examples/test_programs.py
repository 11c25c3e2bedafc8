"""The programs of examples/, run twice against real servers: the second run writes nothing."""

from __future__ import annotations

import importlib
import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import OFFSET_BEGINNING, Consumer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from pyiceberg.catalog import load_catalog
from servers.postgres import running_server

import epochal as ep
from epochal.testing import broker

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def postgres() -> Iterator[str]:
    with running_server() as server:
        yield server.url()


@pytest.fixture
def run(spark, tmp_path, monkeypatch):
    """Runs a program twice with the input of that name, in an empty folder."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def run(name, source, **settings):
        folder = tmp_path / "work"
        folder.mkdir()
        given = {"FOLDER": folder, "INPUT": EXAMPLES / "input" / source, **settings}
        for key, value in given.items():
            monkeypatch.setenv(key, str(value))
        program = importlib.import_module(name)
        for _ in range(2):
            program.run(spark)
        return folder

    return run


def rows_of(url: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(url) as connection:
        return [
            tuple(str(one) if one is not None else None for one in row)
            for row in connection.execute(query)
        ]


def test_orders_are_in_the_table_and_in_the_topic_once(run, postgres):
    with broker() as bootstrap:
        admin = AdminClient({"bootstrap.servers": bootstrap})
        admin.create_topics([NewTopic("orders.v1", 1)])["orders.v1"].result(30)
        run("orders", "orders", POSTGRES_URL=postgres, KAFKA_BOOTSTRAP=bootstrap)
        settings = {"group.id": "r", "enable.partition.eof": True}
        consumer = Consumer({"bootstrap.servers": bootstrap, **settings})
        consumer.assign([TopicPartition("orders.v1", 0, OFFSET_BEGINNING)])
        keys = []
        while (message := consumer.poll(60)) is not None and message.error() is None:
            keys.append(message.key().decode())
        consumer.close()
    assert rows_of(postgres, "SELECT id, amount, version FROM orders ORDER BY id") == [
        ("1", "14.00", "2"),
        ("2", "99.99", "1"),
        ("3", "5.00", "2"),
        ("4", "70.10", "1"),
    ]
    assert sorted(keys) == ["1", "1", "2", "3", "3", "4"]


def test_late_changes_lose_and_deleted_rows_stay_deleted(run, postgres):
    run("changes", "changes", POSTGRES_URL=postgres)
    assert rows_of(postgres, "SELECT id, city FROM customers ORDER BY id") == [
        ("1", "Bergen"),
        ("3", "Bonn"),
    ]
    assert rows_of(postgres, "SELECT id, version FROM customers_deleted") == [("2", "21")]


def test_each_epoch_is_one_snapshot(run):
    folder = run("events", "events")
    events = importlib.import_module("events")
    with closing(load_catalog("lake", **events.properties(str(folder)))) as catalog:
        table = catalog.load_table(events.TABLE)
        assert sorted(table.scan().to_arrow()["id"].to_pylist()) == [1, 2, 3, 4, 5]
        assert len(table.snapshots()) == 2


def test_rows_that_the_table_refuses_are_in_the_folder_for_them(run, postgres):
    folder = run("payments", "payments", POSTGRES_URL=postgres)
    assert rows_of(postgres, "SELECT id FROM payments ORDER BY id") == [("1",), ("3",), ("5",)]
    refused = ep.read_epochs(folder / "refused").to_table().to_pylist()
    assert sorted(json.loads(one["row"])["id"] for one in refused) == [2, 4]
    archive = ep.read_epochs(folder / "archive").to_table()
    assert sorted(archive["id"].to_pylist()) == [1, 2, 3, 4, 5]
    assert sorted(ep.read_epochs(folder / "large").to_table()["id"].to_pylist()) == [3, 5]


def test_a_sink_of_another_package_is_under_the_same_decision(run, spark):
    spark.sparkContext.addPyFile(str(EXAMPLES / "epochal-sqlite" / "epochal_sqlite.py"))
    folder = run("own_sink", "events")
    with closing(sqlite3.connect(folder / "events.db")) as connection:
        ids = sorted(one for (one,) in connection.execute("SELECT id FROM events"))
    assert ids == [1, 2, 3, 4, 5]
    assert sorted(ep.read_epochs(folder / "archive").to_table()["id"].to_pylist()) == ids
