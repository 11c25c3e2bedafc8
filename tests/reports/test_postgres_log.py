"""Pipelines whose log is a PostgreSQL table: a history beside it, and the console's view of it."""

from __future__ import annotations

import threading
import time

import pytest

from epochal.console.index import Index
from epochal.logs import open_log
from epochal.reports.epochs import epochs
from epochal.reports.status import pipeline_status


@pytest.fixture
def place(shop, postgres, request, monkeypatch):
    """A log of its own for each test."""
    url = f"{postgres.url}#{request.node.name}"
    monkeypatch.setattr(type(shop), "log_path", url)
    return url


@pytest.fixture
def log(place):
    opened = open_log(place)
    yield opened
    opened.close()


def test_a_log_in_postgresql_has_a_history_in_a_table_beside_it(shop, place, log, postgres):
    shop.run(epochs=3)
    shop.run(epochs=1)
    report = epochs(log, limit=2)
    assert [(one.epoch, one.rows, one.read_from) for one in report.epochs] == [
        (3, 4, "history"),
        (2, 4, "history"),
    ]
    older = epochs(log, limit=5, cursor=report.cursor)
    assert [(one.epoch, one.generation) for one in older.epochs] == [(1, 1), (0, 1)]
    assert pipeline_status(log).driver.seen_at is not None
    with postgres.connect() as connection:
        kept = connection.execute(
            "SELECT key FROM epochal.store_history WHERE store = %s ORDER BY 1",
            (place.partition("#")[2],),
        ).fetchall()
    assert [name for (name,) in kept] == [
        "00000000000000000000-0000000001-0000.jsonl",
        "00000000000000000003-0000000002-0000.jsonl",
        "live.json",
    ]


def test_a_history_that_is_locked_delays_no_epoch(shop, log, postgres, monkeypatch):
    monkeypatch.setattr("epochal.telemetry.history_writer.REMOTE_FLUSH_EVERY_S", 0.01)
    shop.run(epochs=1)
    with shop.session() as session, postgres.connect() as connection, connection.transaction():
        connection.execute("LOCK TABLE epochal.store_history")
        await_one_that_waits(postgres)
        done = threading.Thread(target=lambda: [shop.epoch(session) for _ in range(3)])
        done.start()
        done.join(120)
        assert not done.is_alive(), "an epoch waited for its history"
    assert [one.epoch for one in epochs(log).epochs] == [3, 2, 1, 0]
    assert {one.read_from for one in epochs(log).epochs} == {"history"}


def await_one_that_waits(postgres):
    """The history writer hangs at the lock."""
    waiting = (
        "SELECT 1 FROM pg_locks WHERE relation = 'epochal.store_history'::regclass AND NOT granted"
    )
    deadline_s = time.monotonic() + 120
    with postgres.connect() as connection:
        while connection.execute(waiting).fetchone() is None:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_the_console_reads_a_log_whose_user_is_only_in_its_address(shop, place):
    shop.run(epochs=2)
    index = Index(place)
    index.refresh()
    ((key, found),) = index.snapshot.pipelines.items()
    assert (found.pipeline, found.last_epoch) == ("shop", 1)
    log = index.log(key)
    assert [one.epoch for one in epochs(log).epochs] == [1, 0]
    log.close()
    assert index.snapshot.unreadable == []
