"""The epoch log in PostgreSQL: the promises of every log, and what is its own."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator

import psycopg
import pytest
from servers.postgres import NoServer, PostgresServer, running_server
from servers.tcp_proxy import Proxy

from epochal.errors import Misconfigured, OutcomeUnknown, TryAgain
from epochal.logs.postgres import PostgresLog

SECRET = "hunter2-s3cret"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    try:
        with running_server() as running:
            yield running
    except NoServer as error:
        pytest.fail(f"no PostgreSQL to prove anything on: {error}", pytrace=False)


@pytest.fixture
def url(server: PostgresServer, request: pytest.FixtureRequest) -> str:
    return f"{server.url()}#{request.node.name}"


def test_a_log_that_was_never_written_is_empty_and_nothing_is_made(server, url):
    log = PostgresLog(url)
    assert list(log.numbers()) == []
    assert log.read(0) is None
    log.delete([0, 1])
    log.close()


def test_a_slot_is_filled_once_and_logs_of_one_table_do_not_meet(server):
    one, other = PostgresLog(f"{server.url()}#one"), PostgresLog(f"{server.url()}#other%20one")
    assert one.put_if_absent(7, b"first") is True
    assert one.put_if_absent(7, b"second") is False
    assert one.read(7) == b"first"
    assert other.read(7) is None
    assert other.put_if_absent(7, b"mine") is True
    one.delete([7, 8])
    assert list(one.numbers()) == []
    assert list(other.numbers()) == [7]
    one.close()
    other.close()


def test_numbers_rise_and_records_of_any_size_come_back(url):
    log = PostgresLog(url)
    numbers = [0, 1, 9, 10, 10**12, 2**63 - 1]
    for number in random.Random(1).sample(numbers, k=len(numbers)):
        assert log.put_if_absent(number, b"x")
    assert list(log.numbers()) == numbers
    for size in (0, 1, 3 * 1024 * 1024):
        record = random.Random(size).randbytes(size)
        log.put_if_absent(100 + size, record)
        assert log.read(100 + size) == record
    log.close()


def test_of_many_racers_for_a_slot_exactly_one_wins(url, server):
    psycopg.connect(server.url(), autocommit=True).execute(
        "DROP SCHEMA IF EXISTS epochal CASCADE"
    ).connection.close()
    wins: dict[int, list[int]] = {slot: [] for slot in range(8)}
    start = threading.Barrier(5)

    def run(racer: int) -> None:
        log = PostgresLog(url)
        for slot, winners in wins.items():
            start.wait()
            if log.put_if_absent(slot, b"racer %d" % racer):
                winners.append(racer)
        log.close()

    threads = [threading.Thread(target=run, args=(racer,)) for racer in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    log = PostgresLog(url)
    for slot, winners in wins.items():
        assert len(winners) == 1
        assert log.read(slot) == b"racer %d" % winners[0]
    log.close()


def test_a_lost_answer_to_a_put_is_unknown_and_the_next_call_connects_again(server, url):
    proxy = Proxy(server.port)
    log = PostgresLog(url.replace(str(server.port), str(proxy.port)))
    log.put_if_absent(1, b"one")
    proxy.cut_when = lambda piece, to_server: "after" if to_server and b"INSERT" in piece else None
    with pytest.raises(OutcomeUnknown):
        log.put_if_absent(2, b"two")
    proxy.cut_when = lambda piece, to_server: None
    assert set(log.numbers()) <= {1, 2}
    proxy.cut()
    assert log.read(1) == b"one"
    log.close()
    proxy.close()
    with pytest.raises(TryAgain, match="cannot reach"):
        log.numbers()


def test_a_put_outlives_a_killed_server(server, url):
    log = PostgresLog(url)
    assert log.put_if_absent(1, b"kept")
    server.restart()
    assert log.read(1) == b"kept"
    assert log.put_if_absent(1, b"other") is False
    log.close()


def test_a_forked_child_does_not_speak_on_its_parents_connection(url):
    log = PostgresLog(url)
    log.put_if_absent(1, b"parent")
    kept = log._connection
    log._process = os.getpid() + 1
    log.put_if_absent(2, b"child")
    assert log._connection is not kept
    assert list(log.numbers()) == [1, 2]
    log.close()
    kept.close()


def test_what_it_is_called_shows_no_secret(server):
    log = PostgresLog(f"postgresql://someone:{SECRET}@127.0.0.1:{server.port}/nope#orders")
    assert log.place == f"postgresql://127.0.0.1:{server.port}/nope#orders"
    with pytest.raises(Misconfigured) as told:
        log.numbers()
    assert SECRET not in str(told.value)
    for url in (f"postgresql://u:{SECRET}@h/x", f"postgresql://u:{SECRET}@h:x:y/z?q={SECRET}#name"):
        with pytest.raises(Misconfigured) as told:
            PostgresLog(url)
        assert SECRET not in str(told.value)
