"""Cables are cut, servers die, locks are held: every row is there once afterwards."""

from __future__ import annotations

import time
from contextlib import suppress

import pymysql
import pytest
from kit.sql.faults import *  # noqa: F403  every test there is one of this module, too
from kit.sql.faults import Wire

from epochal.errors import RowRejected, TryAgain
from epochal.sinks.mysql.dialect import DIALECT

pytestmark = pytest.mark.products("mariadb", "mysql")


@pytest.fixture(scope="module")
def wire() -> Wire:
    return Wire(
        is_goodbye=lambda piece: piece == b"\x01\x00\x00\x00\x01",
        words={
            ("staged", "load"): b"LOAD DATA",
            ("staged", "apply"): b"INSERT INTO",
            ("staged", "commit"): b"COMMIT",
            ("prepared", "prepare"): b"XA PREPARE",
            ("prepared", "commit"): b"XA COMMIT",
        },
    )


# Errors of the server


@BOTH  # noqa: F405
def test_nothing_is_proven_on_a_server_that_became_a_replica(orders, some, strategy):
    life = orders.life(strategy=strategy)
    receipts = life.write(0, some(1))
    # As on a replica that has not heard of the epoch yet.
    orders.sql(f"DELETE FROM {orders.meta}.ledger")
    orders.sql("SET GLOBAL read_only = 1")
    try:
        for ask in (life.committer.newest, lambda: life.committer.outcome(0, receipts[0])):
            with pytest.raises(TryAgain, match="read-only"):
                ask()
        with pytest.raises(TryAgain, match="read-only"):
            life.commit(0, receipts)
    finally:
        orders.sql("SET GLOBAL read_only = 0")


@BOTH  # noqa: F405
def test_a_decided_epoch_is_committed_once_a_read_only_server_takes_writes_again(
    orders, some, least, strategy
):
    """As while a cluster is switched over, and connections stay open."""
    life = orders.life(url=orders.url(user=least), strategy=strategy)
    orders.grant(life.sink)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    orders.sql("SET GLOBAL read_only = 1")
    try:
        with pytest.raises(TryAgain, match="read-only"):
            life.commit(0, receipts)
    finally:
        orders.sql("SET GLOBAL read_only = 0")
    life.commit(0, receipts)
    assert orders.rows(columns="id") == [(1,)]


@pytest.fixture
def eight_deadlocks(orders):
    """Counted in a table that no rollback reaches."""
    tries = f"{orders.schema}.tries"
    orders.sql(f"CREATE TABLE {tries} ENGINE=MyISAM SELECT 0 AS n")
    raised = "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213"
    counted = f"UPDATE {tries} SET n = n + 1; IF (SELECT n FROM {tries}) < 9 THEN {raised}; END IF"
    trigger(orders, f"BEGIN {counted}; END")


def test_a_lock_that_somebody_holds_ends_in_try_again(keyed, some):
    keyed.sql(f"INSERT INTO {keyed.schema}.orders (id) VALUES (1)")
    life = keyed.life(mode="upsert", keys="id", lock_timeout_s=1)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    other = keyed.server.connect(autocommit=False)
    with other.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {keyed.schema}.orders WHERE id = 1 FOR UPDATE")
        with pytest.raises(TryAgain, match="1205") as raised:
            life.rehearse(0, receipts)
    assert "INNODB_TRX" in raised.value.hint
    other.close()
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert keyed.rows(columns="id, name") == [(1, "n1")]


def test_the_haste_of_one_verb_is_not_that_of_the_next(orders, some):
    life = orders.life(lock_timeout_s=17)
    life.commit(0, life.write(0, some(1)))
    session = life.committer.pool.take()
    patience = session.query("SELECT @@innodb_lock_wait_timeout, @@lock_wait_timeout")
    life.committer.pool.give_back(session)
    assert patience == [(17, 17)]


def test_a_session_whose_connection_was_lost_is_given_back_and_another_is_taken(orders, some):
    life = orders.life()
    life.start(some(1))
    pool = life.committer.pool
    session = pool.take()
    session.begin(lock_wait_s=1, idle_max_s=60)
    ((number,),) = session.query("SELECT CONNECTION_ID()")
    orders.sql(f"KILL CONNECTION {number}")
    session.roll_back()
    for _ in range(2):
        with pytest.raises(pymysql.MySQLError) as raised:
            session.execute("SELECT 1")
        assert isinstance(life.committer.dialect.classify(raised.value, "ask"), TryAgain)
        session.roll_back()
    pool.give_back(session)
    life.write(0, some(1))
    assert orders.rows(columns="id") == [(1,)]


def test_limits_of_the_server_end_neither_tasks_nor_a_rehearsal(orders, some):
    own = ("idle_transaction_timeout", "idle_write_transaction_timeout")
    limits = ("wait_timeout", *(own if orders.is_mariadb else ()))
    before = orders.sql(f"SELECT {', '.join(f'@@global.{name}' for name in limits)}")[0]
    orders.sql("SET GLOBAL " + ", ".join(f"{name} = 1" for name in limits))
    try:
        life = orders.life()
        life.start(some(1))
        receipts = [life.prepare(some(1), 0)]
        life.rehearse(0, receipts)
        task = orders.life(name="slow").writer(some(2).schema, 0)
        task.write(some(2).to_batches()[0])
        task._buffer.drain()
        held = set(orders.open_transactions())
        assert len(held) == 2
        other = orders.server.connect()
        with other.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {orders.schema}.orders")
        listed = f"SELECT 1 FROM information_schema.processlist WHERE id = {other.thread_id()}"
        while orders.sql(listed):
            time.sleep(0.02)
        assert set(orders.open_transactions()) == held
        task.abort()
        life.commit(0, receipts)
    finally:
        changed = zip(limits, before, strict=True)
        orders.sql("SET GLOBAL " + ", ".join(f"{name} = {value}" for name, value in changed))
    assert orders.rows(columns="id") == [(1,)]


def test_a_statement_that_takes_too_long_ends_in_try_again(orders, some):
    trigger(orders, "SET @waited = SLEEP(30)")
    life = orders.life(statement_timeout_s=1)
    life.start(some(1))
    with pytest.raises(TryAgain, match="statement_timeout_s"):
        life.rehearse(0, [life.prepare(some(1), 0)])
    assert orders.rows() == []
    # Nor does the server go on with it: no transaction is left that holds locks.
    deadline = time.monotonic() + 20
    while orders.open_transactions():
        assert time.monotonic() < deadline, "the server is still sleeping in the trigger"


@pytest.mark.products("mariadb")
def test_a_query_of_the_catalog_that_is_interrupted_is_never_taken_for_an_empty_one(orders, some):
    """Of 300 queries with so little time, some fifty get an empty answer from the server."""
    life = orders.life()
    life.start(some(1))
    session = life.committer.pool.take()
    session.execute("SET SESSION max_statement_time = 0.0001")
    question = DIALECT.layout_sql(orders.schema, "orders")
    for _ in range(300):
        with suppress(TryAgain), life.committer.dialect.classified("ask"):
            assert session.query(question) != []


@pytest.mark.parametrize(
    ("number", "error"),
    [
        *((number, TryAgain) for number in (1021, 1047, 1114, 1205, 1290, 1792, 1836, 3101)),
        (1644, RowRejected),
    ],
)
def test_errors_are_sorted_by_what_may_be_done_next(orders, some, number, error):
    trigger(orders, f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'no'")

    def undo() -> None:
        assert orders.rows() == []
        orders.sql(f"DROP TRIGGER {orders.schema}.t")

    orders.life().write_after(undo, some(1), error, str(number))
    assert len(orders.rows()) == 1


def trigger(place, body: str) -> None:
    place.sql(
        f"CREATE TRIGGER {place.schema}.t BEFORE INSERT ON {place.schema}.orders"
        f" FOR EACH ROW {body}"
    )


def test_a_foreign_key_that_is_not_met_is_reported_before_the_decision(place, some):
    place.sql(f"CREATE TABLE {place.schema}.parents (id bigint PRIMARY KEY)")
    place.sql(
        f"CREATE TABLE {place.schema}.orders (id bigint, name longtext,"
        " FOREIGN KEY (id) REFERENCES parents (id))"
    )
    place.sql(f"INSERT INTO {place.schema}.parents VALUES (1)")
    life = place.life()
    life.start(some(1))
    with pytest.raises(RowRejected, match=r'"id": 2.*foreign key constraint fails'):
        life.rehearse(0, [life.prepare(some(1, 2), 0)])
    life.write(1, some(1))
    assert place.rows(columns="id") == [(1,)]


def test_a_check_that_is_not_met_names_the_row(place, some):
    place.sql(f"CREATE TABLE {place.schema}.orders (id bigint CHECK (id <> 4321), name longtext)")
    life = place.life()
    life.start(some(1))
    with pytest.raises(RowRejected, match=r'partition 1, row \{"id": 4321, "name": "n4321"\}'):
        life.write(0, some(*range(10)), some(*range(4000, 4400)))
    assert place.rows() == []
