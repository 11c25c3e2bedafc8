"""Cables are cut, servers die, locks are held: every row is there once afterwards."""

from __future__ import annotations

import time
from urllib.parse import quote

import psycopg
import psycopg_pool.base
import pytest
from kit.sql.faults import *  # noqa: F403  every test there is one of this module, too
from kit.sql.faults import Wire

from epochal.errors import OutcomeUnknown, RowRejected, TryAgain
from epochal.sinks.postgres.errors import ERRORS


@pytest.fixture(autouse=True)
def quick_to_connect_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool waits a second before it opens a connection again."""
    monkeypatch.setattr(psycopg_pool.base.AttemptWithBackoff, "INITIAL_DELAY", 0.02)


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire(
        is_goodbye=lambda piece: piece.startswith(b"X"),
        words={
            ("staged", "load"): b"COPY",
            ("staged", "apply"): b"INSERT INTO",
            ("staged", "commit"): b"COMMIT",
            ("prepared", "prepare"): b"PREPARE TRANSACTION",
            ("prepared", "commit"): b"COMMIT PREPARED",
        },
    )


# Errors of the server


@pytest.fixture
def eight_deadlocks(orders):
    orders.sql(f"CREATE SEQUENCE {orders.schema}.tries")
    raised = "RAISE EXCEPTION 'deadlock' USING ERRCODE = 'deadlock_detected'"
    trigger(orders, f"IF nextval('{orders.schema}.tries') < 9 THEN {raised}; END IF")


def test_a_lock_that_somebody_holds_ends_in_try_again(orders, some):
    life = orders.life(lock_timeout_s=0.2)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    with psycopg.connect(orders.server.url()) as other:
        other.execute(f"LOCK TABLE {orders.schema}.orders IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(TryAgain, match="55P03") as raised:
            life.rehearse(0, receipts)
        assert "pg_locks" in raised.value.hint
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert len(orders.rows()) == 1


def test_limits_of_the_server_end_neither_tasks_nor_a_rehearsal(orders, some):
    # The second came with version 17.
    limits = orders.sql(
        "SELECT name FROM pg_settings"
        " WHERE name IN ('idle_in_transaction_session_timeout', 'transaction_timeout')"
    )
    short = " ".join(f"-c {name}=3000" for (name,) in limits)
    url = f"{orders.server.url()}?options={quote(short)}"
    life = orders.life(url=url)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    task = orders.life(url=url, name="slow").writer(some(2).schema, 0)
    task.write(some(2).to_batches()[0])
    task._buffer.drain()
    held = set(orders.open_transactions())
    assert len(held) == 2
    other = psycopg.connect(url)
    other.execute("SELECT 1")
    while set(orders.open_transactions()) > held:
        time.sleep(0.02)
    with pytest.raises(psycopg.Error, match="terminat"):
        other.execute("SELECT 1")
    other.close()
    assert set(orders.open_transactions()) == held
    task.abort()
    life.commit(0, receipts)
    assert orders.rows(columns="id") == [(1,)]


def test_a_statement_that_takes_too_long_ends_in_try_again(orders, some):
    trigger(orders, "PERFORM pg_sleep(60)")
    life = orders.life(statement_timeout_s=1)
    life.start(some(1))
    with pytest.raises(TryAgain, match="statement_timeout_s"):
        life.rehearse(0, [life.prepare(some(1), 0)])


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ("53100", TryAgain),
        ("53200", TryAgain),
        ("40001", TryAgain),
        ("25006", TryAgain),
        ("42501", RowRejected),
    ],
)
def test_errors_are_sorted_by_what_may_be_done_next(orders, some, state, error):
    trigger(orders, f"RAISE EXCEPTION 'no' USING ERRCODE = '{state}'")

    def undo() -> None:
        assert orders.rows() == []
        orders.sql(f"DROP TRIGGER t ON {orders.schema}.orders")

    orders.life().write_after(undo, some(1), error, state)
    assert len(orders.rows()) == 1


@pytest.mark.parametrize(("is_commit", "kind"), [(True, OutcomeUnknown), (False, TryAgain)])
def test_a_server_that_does_not_know_itself_is_believed(is_commit, kind):
    error = psycopg.errors.StatementCompletionUnknown("perhaps")
    assert type(ERRORS.classify(error, "commit", is_commit=is_commit)) is kind


def trigger(place, body: str) -> None:
    place.sql(
        f"CREATE FUNCTION {place.schema}.f() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN {body}; RETURN NEW; END $$"
    )
    place.sql(
        f"CREATE TRIGGER t BEFORE INSERT ON {place.schema}.orders"
        f" FOR EACH ROW EXECUTE FUNCTION {place.schema}.f()"
    )


def test_constraints_that_wait_for_the_commit_are_met_before_the_decision(place, some):
    place.sql(f"CREATE TABLE {place.schema}.parents (id bigint PRIMARY KEY)")
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint REFERENCES {place.schema}.parents"
        " DEFERRABLE INITIALLY DEFERRED, name text)"
    )
    place.sql(f"INSERT INTO {place.schema}.parents VALUES (1)")
    life = place.life()
    life.start(some(1))
    with pytest.raises(RowRejected, match=r'"id":2.*\(id\)=\(2\) is not present'):
        life.rehearse(0, [life.prepare(some(1, 2), 0)])
    life.write(1, some(1))
    assert place.rows(columns="id") == [(1,)]
