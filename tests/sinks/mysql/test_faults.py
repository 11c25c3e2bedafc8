"""Cables are cut, servers die, locks are held: every row is there once afterwards."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import pyarrow as pa
import pytest

from epochal.contract import Limits
from epochal.errors import EpochalError, OutcomeUnknown, RowRejected, TryAgain
from epochal.logs.memory import MemoryLog
from epochal.terms import EpochNumber, Proof
from epochal.testing.driver import Driver, JobFailed
from epochal.testing.world import Checkpoint

BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])
EVERY_STEP = "EPOCHAL_EVERY_STEP" in os.environ
EPOCHS = 1
ROWS = 5
HURRY = Limits(
    retry_backoff_ms=(1,),
    commit_retry_max_s=5,
    decide_retry_max_s=5,
    sweep_every_s=0,
    buffer_rows=2,
)


def rows_of(epoch: int) -> pa.Table:
    numbers = range(ROWS)
    return pa.table(
        {
            "id": pa.array([epoch * 100 + n for n in numbers], pa.int64()),
            "name": [f"n{n}" for n in numbers],
        }
    )


@dataclass
class Pipeline:
    """What outlives a driver: the log and the engine's checkpoint."""

    log: MemoryLog = field(default_factory=MemoryLog)
    engine: Checkpoint = field(default_factory=lambda: Checkpoint([f"{n}" for n in range(EPOCHS)]))

    def run(self, sink) -> None:
        """One life of a driver: two tasks an epoch, each in several blocks."""
        Driver(
            log=self.log,
            sinks=[sink],
            engine=self.engine,
            read=lambda epoch: [
                rows_of(epoch).slice(0, 3).to_batches(max_chunksize=1),
                rows_of(epoch).slice(3).to_batches(),
            ],
            epochs=EPOCHS,
            limits=HURRY,
            schema=rows_of(0).schema,
        ).run()

    def run_into_trouble(self, sink) -> None:
        with suppress(EpochalError, JobFailed, OSError):
            self.run(sink)


def judge(place) -> None:
    wanted = sorted(key for epoch in range(EPOCHS) for key in rows_of(epoch)["id"].to_pylist())
    assert [key for (key,) in place.rows(columns="id")] == wanted
    assert place.leftovers() == []


def recover(place, sink, pipeline: Pipeline, *, is_whole: bool) -> None:
    """Whatever happened, the next start finishes it, and nothing was visible twice or in part."""
    seen = [key for (key,) in place.rows(columns="id")]
    assert len(seen) == len(set(seen))
    assert not is_whole or len(seen) % ROWS == 0
    pipeline.run(sink)
    judge(place)


_QUIT = b"\x01\x00\x00\x00\x01"


class Nth:
    """Says when the Nth piece that looks like one of a kind comes by; once."""

    def __init__(self, number: int, verdict: str, *, to_server: bool) -> None:
        self._left = number
        self._verdict = verdict
        self._to_server = to_server
        self._lock = threading.Lock()

    def __call__(self, piece: bytes, to_server: bool) -> str | None:
        if to_server is not self._to_server or piece == _QUIT:
            return None
        with self._lock:
            self._left -= 1
            return self._verdict if self._left == 0 else None


@BOTH
@pytest.mark.parametrize("to_server", [True, False], ids=["request", "reply"])
def test_a_connection_cut_at_any_step_loses_and_doubles_nothing(orders, proxy, strategy, to_server):
    far = orders.url(port=proxy.port)
    cuts = 0
    # Each case begins elsewhere; EPOCHAL_EVERY_STEP=1 takes all of them, in some minutes.
    first = 1 + 2 * to_server + (strategy == "staged")
    for number in range(1, 1000) if EVERY_STEP else range(first, 1000, 8):
        proxy.cut_when = Nth(number, "before", to_server=to_server)
        before, pipeline = proxy.cuts, Pipeline()
        sink = orders.sink(url=far, strategy=strategy, name=f"cut {number}")
        pipeline.run_into_trouble(sink)
        proxy.cut_when = lambda piece, to_server: None
        if proxy.cuts == before:
            break
        cuts += 1
        recover(orders, sink, pipeline, is_whole=strategy == "staged")
        orders.sql(f"TRUNCATE {orders.schema}.orders")
    assert cuts > 5


@pytest.mark.parametrize("verdict", ["before", "after"])
@BOTH
def test_a_lost_reply_to_commit_is_settled_by_proof(orders, proxy, some, strategy, verdict):
    word = b"COMMIT" if strategy == "staged" else b"XA COMMIT"
    life = orders.life(url=orders.url(port=proxy.port), strategy=strategy)
    life.start(some(1))
    receipts = [life.prepare(some(1, 2), 0, 0), life.prepare(some(3), 0, 1)]
    life.rehearse(0, receipts)
    proxy.cut_when = lambda piece, to_server: verdict if to_server and word in piece else None
    with pytest.raises(OutcomeUnknown):
        life.commit(0, receipts)
    proxy.cut_when = lambda piece, to_server: None
    proofs = {life.committer.outcome(EpochNumber(0), receipt) for receipt in receipts}
    assert proofs <= {Proof.UNKNOWN, Proof.COMMITTED}
    life.commit(0, receipts)
    assert orders.rows(columns="id") == [(1,), (2,), (3,)]
    assert {life.committer.outcome(EpochNumber(0), one) for one in receipts} == {Proof.COMMITTED}
    assert orders.leftovers() == []


@BOTH
def test_a_task_whose_kept_connection_died_opens_another(orders, proxy, some, strategy):
    life = orders.life(url=orders.url(port=proxy.port), strategy=strategy)
    life.write(0, some(1))
    proxy.cut()
    life.write(1, some(2))
    assert len(orders.rows()) == 2


# The server dies


@contextmanager
def killed_when(proxy, server, word: bytes, *, passes: bool) -> Iterator[None]:
    """Kill the server when a request with this word comes by, before it or right after it."""
    fired = threading.Event()

    def look(piece: bytes, to_server: bool) -> str | None:
        if to_server and word in piece and not fired.is_set():
            fired.set()
            if passes:
                threading.Timer(0.01, server.kill).start()
                return None
            server.kill()
            return "before"
        return None

    proxy.cut_when = look
    try:
        yield
    finally:
        proxy.cut_when = lambda piece, to_server: None
        assert fired.is_set()


KILLS = [
    ("staged", b"LOAD DATA"),
    ("staged", b"COMMIT"),
    ("staged", b"INSERT INTO"),
    ("prepared", b"XA PREPARE"),
    ("prepared", b"XA COMMIT"),
]


@pytest.mark.parametrize("passes", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("strategy", "word"), KILLS, ids=str)
def test_a_server_that_is_killed_at_a_step_loses_and_doubles_nothing(
    mortal, strategy, word, passes
):
    place, proxy = mortal
    pipeline = Pipeline()
    sink = place.sink(
        url=place.url(port=proxy.port),
        strategy=strategy,
        name=f"{strategy} {word!r} {passes}",
        connect_timeout_s=1,
    )
    with killed_when(proxy, place.server, word, passes=passes):
        pipeline.run_into_trouble(sink)
    _wait_until_dead(place.server)
    place.server.start()
    place.admin.close()
    place.admin = place.server.connect()
    recover(place, sink, pipeline, is_whole=strategy == "staged")
    place.sql(f"TRUNCATE {place.schema}.orders")


def _wait_until_dead(server) -> None:
    deadline = threading.Event()
    for _ in range(200):
        if server._process is None:
            return
        deadline.wait(0.02)
    raise AssertionError("the server was not killed")


def test_what_is_prepared_outlives_the_server(mortal, some):
    place, _ = mortal
    lives = [place.life(strategy=strategy, name=strategy) for strategy in ("staged", "prepared")]
    receipts = []
    for number, life in enumerate(lives):
        life.start(some(1))
        receipts.append([life.prepare(some(number), 0)])
    lives[0].rehearse(0, receipts[0])
    place.server.restart()
    for life, some_receipts in zip(lives, receipts, strict=True):
        other = place.keep(life.fresh(generation=2))
        assert [one.handle for one in other.committer.in_doubt()] == [some_receipts[0].handle]
        other.commit(0, some_receipts)
    place.admin.close()
    place.admin = place.server.connect()
    assert place.rows(columns="id") == [(0,), (1,)]
    assert place.leftovers() == []


# What the server says


def test_a_lock_that_somebody_holds_ends_in_try_again(keyed, some):
    keyed.sql(f"INSERT INTO {keyed.schema}.orders (id) VALUES (1)")
    life = keyed.life(mode="upsert", keys="id", lock_timeout_s=1)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    other = keyed.server.connect(autocommit=False)
    with other.cursor() as cursor:
        cursor.execute(f"SELECT * FROM {keyed.schema}.orders WHERE id = 1 FOR UPDATE")
        with pytest.raises(TryAgain, match="1205") as told:
            life.rehearse(0, receipts)
    assert "INNODB_TRX" in told.value.hint
    other.close()
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert keyed.rows(columns="id, name") == [(1, "n1")]


def test_a_statement_that_takes_too_long_ends_in_try_again(orders, some):
    trigger(orders, "SET @waited = SLEEP(5)")
    life = orders.life(statement_timeout_s=0.2)
    life.start(some(1))
    with pytest.raises(TryAgain, match="statement_timeout_s"):
        life.rehearse(0, [life.prepare(some(1), 0)])
    assert orders.rows() == []


@pytest.mark.parametrize(
    ("number", "error"), [(1114, TryAgain), (1021, TryAgain), (1213, TryAgain), (1644, RowRejected)]
)
def test_errors_are_sorted_by_what_may_be_done_next(orders, some, number, error):
    trigger(orders, f"SIGNAL SQLSTATE '45000' SET MYSQL_ERRNO = {number}, MESSAGE_TEXT = 'no'")
    life = orders.life()
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    with pytest.raises(error, match=str(number)):
        life.rehearse(0, receipts)
    assert orders.rows() == []
    orders.sql(f"DROP TRIGGER {orders.schema}.t")
    life.rehearse(0, receipts)
    life.commit(0, receipts)
    assert len(orders.rows()) == 1


def trigger(place, body: str) -> None:
    place.sql(
        f"CREATE TRIGGER {place.schema}.t BEFORE INSERT ON {place.schema}.orders"
        f" FOR EACH ROW {body}"
    )


def test_a_pool_that_is_used_up_says_so(orders, some):
    life = orders.life(pool_min=1, pool_max=1, connect_timeout_s=1)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    with pytest.raises(TryAgain, match=r"all 1 connections .* are in use"):
        life.committer.in_doubt()
    life.commit(0, receipts)
    assert len(orders.rows()) == 1


def test_a_foreign_key_that_is_not_met_is_told_before_the_decision(place, some):
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
