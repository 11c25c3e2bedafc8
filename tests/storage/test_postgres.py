"""What a store in PostgreSQL promises beyond the shared promises."""

from __future__ import annotations

import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import count

import psycopg
import pytest
from servers.postgres import PostgresServer
from servers.tcp_proxy import Proxy

from epochal.errors import CorruptRecord, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage import postgres as postgres_module
from epochal.storage.postgres import PostgresStore

SECRET = "hunter2-s3cret"
_RELOAD = "SELECT pg_reload_conf()"
_WAITING = (
    "FROM pg_stat_activity WHERE application_name = 'epochal-store' AND wait_event = 'SyncRep'"
)


def run(postgres: PostgresServer, *statements: str) -> tuple[object, ...] | None:
    """The first row of the last statement."""
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement)
        return cursor.fetchone() if cursor.description else None


def make_role(postgres: PostgresServer, name: str, setting: str) -> None:
    run(
        postgres,
        f"CREATE ROLE {name} LOGIN",
        f"ALTER ROLE {name} SET {setting}",
        f"GRANT CREATE ON DATABASE postgres TO {name}",
    )


@pytest.fixture
def url(postgres: PostgresServer, request: pytest.FixtureRequest) -> str:
    return f"{postgres.url()}#{request.node.name}"


def test_stores_of_one_table_do_not_meet(postgres):
    one = PostgresStore(f"{postgres.url()}#one")
    other = PostgresStore(f"{postgres.url()}#other%20one")
    assert one.put_if_absent("k", b"first") is True
    assert other.read("k") is None
    assert other.put_if_absent("k", b"mine") is True
    one.delete(["k"])
    assert list(one.names()) == []
    assert list(other.names()) == ["k"]
    one.close()
    other.close()


def test_a_table_of_a_newer_release_is_refused_with_its_number(postgres):
    store = PostgresStore(f"{postgres.url()}#one", schema="of_the_future")
    store.put("k", b"content")
    store.close()
    run(postgres, "COMMENT ON TABLE of_the_future.store IS 'epochal, format 7'")
    with pytest.raises(CorruptRecord, match="format 7, this release reads up to 1"):
        store.read("k")
    run(postgres, "COMMENT ON TABLE of_the_future.store IS NULL")
    assert store.read("k") == b"content"
    store.close()


def test_looking_creates_neither_schema_nor_table(postgres):
    run(postgres, "DROP SCHEMA IF EXISTS never_made CASCADE")
    store = PostgresStore(f"{postgres.url()}#looked-at", schema="never_made")
    assert (list(store.names()), store.read("k")) == ([], None)
    store.delete(["k"])
    store.close()
    assert run(postgres, "SELECT to_regnamespace('never_made') IS NULL") == (True,)


def test_racers_for_the_first_key_of_all_make_one_table(postgres):
    """Creating the schema is a race of its own."""
    run(postgres, "DROP SCHEMA IF EXISTS raced_for CASCADE")
    stores = [PostgresStore(f"{postgres.url()}#racers", schema="raced_for") for _ in range(5)]
    start, wins = threading.Barrier(5), []

    def put(at: int) -> None:
        start.wait()
        if stores[at].put_if_absent("k", b"racer %d" % at):
            wins.append(b"racer %d" % at)

    threads = [threading.Thread(target=put, args=(at,)) for at in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wins == [stores[0].read("k")]
    for store in stores:
        store.close()


def test_a_lost_reply_to_a_put_is_unknown_and_the_next_call_connects_again(postgres, url):
    proxy = Proxy(postgres.port)
    store = PostgresStore(url.replace(str(postgres.port), str(proxy.port)))
    store.put_if_absent("k1", b"one")
    proxy.cut_when = lambda piece, to_server: "after" if to_server and b"INSERT" in piece else None
    for put in (store.put_if_absent, store.put):
        with pytest.raises(OutcomeUnknown):
            put("k2", b"two")
    proxy.cut_when = lambda piece, to_server: None
    assert set(store.names()) <= {"k1", "k2"}
    proxy.cut()
    assert store.read("k1") == b"one"
    store.close()
    proxy.close()
    with pytest.raises(TryAgain, match="cannot reach"):
        store.names()


def test_a_call_is_one_round_trip(postgres, url):
    proxy = Proxy(postgres.port)
    store = PostgresStore(url.replace(str(postgres.port), str(proxy.port)))
    store.put_if_absent("k", b"kept")
    sent: list[bytes] = []

    def count(piece: bytes, to_server: bool) -> None:
        if to_server:
            sent.append(piece)

    proxy.cut_when = count
    for number in range(5):
        assert store.read("k") == b"kept"
        assert len(sent) == number + 1
    store.close()
    proxy.close()


def test_a_session_that_the_server_has_ended_leaves_no_put_unknown(postgres, url):
    store = PostgresStore(url)
    store.put_if_absent("k", b"kept")
    for _ in range(3):
        ended = run(
            postgres,
            "SELECT count(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity"
            " WHERE application_name = 'epochal-store'",
        )
        assert ended == (1,)
        assert store.put_if_absent("k", b"other") is False
    store.close()


def test_a_session_that_was_not_used_for_long_is_asked_before_a_put(postgres, url, monkeypatch):
    """A firewall may have forgotten it, which nothing shows."""
    monkeypatch.setattr(postgres_module, "_TRUSTED_S", -1.0)
    proxy = Proxy(postgres.port)
    store = PostgresStore(url.replace(str(postgres.port), str(proxy.port)))
    store.put_if_absent("k1", b"one")
    first = iter([True])
    proxy.cut_when = lambda piece, to_server: "before" if to_server and next(first, False) else None
    assert store.put_if_absent("k2", b"two") is True
    assert proxy.cuts == 1
    store.close()
    proxy.close()


def test_a_put_outlives_a_killed_server(postgres, url):
    store = PostgresStore(url)
    assert store.put_if_absent("k", b"kept")
    postgres.restart()
    assert store.read("k") == b"kept"
    assert store.put_if_absent("k", b"other") is False
    store.close()


def test_a_put_is_durable_when_it_is_answered_whatever_the_role_is_set_to(postgres):
    make_role(postgres, "hasty", "synchronous_commit = 'off'")
    store = PostgresStore(f"{postgres.url(user='hasty')}#hasty", schema="hasty")
    store.put("k", b"x")
    assert store._connection.execute("SHOW synchronous_commit").fetchone() == ("on",)
    store.close()


def test_a_put_whose_standby_did_not_confirm_it_is_unknown_until_one_does(postgres, url):
    """Somebody cancels sessions that wait for a standby that is away."""
    store = PostgresStore(url)
    store.put("first", b"")

    def cancelled(key: str) -> tuple[bool, BaseException | None]:
        """Whether a put had to wait for a standby, and what it raised once that was cancelled."""
        with ThreadPoolExecutor(1) as thread:
            put = thread.submit(store.put_if_absent, key, b"mine")
            while not put.done() and not run(postgres, f"SELECT 1 {_WAITING}"):
                pass
            is_waiting = run(postgres, f"SELECT pg_cancel_backend(pid) {_WAITING}") is not None
            return is_waiting, put.exception()

    run(postgres, "ALTER SYSTEM SET synchronous_standby_names = 'nobody'", _RELOAD)
    try:
        tries = ((key, *cancelled(key)) for key in map(str, count()))
        # The server obeys a moment later.
        key, _, error = next(one for one in tries if one[1])
        assert isinstance(error, OutcomeUnknown)
        is_waiting, error = cancelled(key)
        assert is_waiting, "a key that is there was taken for confirmed"
        assert isinstance(error, OutcomeUnknown)
    finally:
        run(postgres, "ALTER SYSTEM RESET synchronous_standby_names", _RELOAD)
    assert store.put_if_absent(key, b"mine") is False
    assert store.read(key) == b"mine"
    store.close()


def test_a_server_that_only_reads_is_not_asked(postgres):
    """A standby may lag behind: what it does not show may be decided."""
    make_role(postgres, "reader", "default_transaction_read_only = 'on'")
    with pytest.raises(TryAgain, match="read-only"):
        PostgresStore(f"{postgres.url(user='reader')}#k").names()


def test_a_forked_child_does_not_use_its_parents_connection(url):
    store = PostgresStore(url)
    store.put_if_absent("k1", b"parent")
    kept = store._connection
    store._process = os.getpid() + 1
    store.put_if_absent("k2", b"child")
    assert store._connection is not kept
    assert list(store.names()) == ["k1", "k2"]
    store.close()
    kept.close()


def test_a_role_without_rights_is_reported_with_what_it_needs(postgres):
    make_role(postgres, "stranger", "work_mem = '4MB'")
    run(postgres, "CREATE SCHEMA IF NOT EXISTS closed")
    store = PostgresStore(f"{postgres.url(user='stranger')}#k", schema="closed")
    with pytest.raises(Misconfigured, match="permission denied") as caught:
        store.put("k", b"x")
    assert "closed.store" in caught.value.hint
    store.close()
    kept = PostgresStore(f"{postgres.url()}#k", schema="closed")
    kept.put("k", b"x")
    kept.close()
    for grant in re.findall(r"GRANT .*? (?:ON SCHEMA )?closed\S*", caught.value.hint):
        run(postgres, f"{grant.rstrip(',')} TO stranger")
    store = PostgresStore(f"{postgres.url(user='stranger')}#k", schema="closed")
    assert store.read("k") == b"x"
    store.put("k", b"y")
    store.delete("k")
    store.close()


def test_a_location_and_its_errors_show_no_secret(postgres):
    store = PostgresStore(f"postgresql://someone:{SECRET}@127.0.0.1:{postgres.port}/nope#orders")
    assert store.location == f"postgresql://127.0.0.1:{postgres.port}/nope#orders"
    with pytest.raises(Misconfigured) as caught:
        store.names()
    assert SECRET not in str(caught.value)
    for url in (f"postgresql://u:{SECRET}@h/x", f"postgresql://u:{SECRET}@h:x:y/z?q={SECRET}#name"):
        with pytest.raises(Misconfigured) as caught:
            PostgresStore(url)
        assert SECRET not in str(caught.value)
