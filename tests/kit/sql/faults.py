"""Cables are cut and servers die: every row is there once afterwards, on every database.

A module of tests for each database imports these, beside its own fixtures `orders` (a table of id
and name without a key), `proxy` (before its server), `mortal` (a place on a server that may be
killed, and a proxy before it), `some`, `wire`, which knows the words on it, and `eight_deadlocks`,
which the first row into `orders` meets.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

import pyarrow as pa
import pytest

from epochal.errors import EpochalError, OutcomeUnknown, RowRejected, TryAgain
from epochal.logs import MemoryLog
from epochal.session import Session
from epochal.terms import EpochNumber, Limits, Proof
from epochal.testing.driver import Checkpoint, Driver, JobFailed


@dataclass(frozen=True, kw_only=True)
class Wire:
    is_goodbye: Callable[[bytes], bool]
    """Whether a piece is only a client's goodbye."""
    words: Mapping[tuple[str, str], bytes]
    """By strategy and step: what a request of that step holds."""


BOTH = pytest.mark.parametrize("strategy", ["staged", "prepared"])
EVERY_STEP = "EPOCHAL_EVERY_STEP" in os.environ
EPOCHS = 1
ROWS = 5
HURRY = Limits(
    retry_backoff_ms=(1,),
    commit_retry_max_s=2,
    decide_retry_max_s=2,
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


class Nth:
    """Reports the Nth piece of a kind, once."""

    def __init__(self, number: int, wire: Wire, *, to_server: bool) -> None:
        self._left = number
        self._wire = wire
        self._to_server = to_server
        self._lock = threading.Lock()

    def __call__(self, piece: bytes, to_server: bool) -> str | None:
        if to_server is not self._to_server or self._wire.is_goodbye(piece):
            return None
        with self._lock:
            self._left -= 1
            return "before" if self._left == 0 else None


@pytest.mark.ways("columns", "bytes")
@BOTH
@pytest.mark.parametrize("to_server", [True, False], ids=["request", "reply"])
def test_a_connection_cut_at_any_step_loses_and_doubles_nothing(
    orders, proxy, wire, strategy, to_server
):
    far = orders.url(port=proxy.port)
    cuts = 0
    # Each case begins elsewhere; EPOCHAL_EVERY_STEP=1 takes all of them, in some minutes.
    first = 1 + 2 * to_server + (strategy == "staged")
    for number in range(1, 1000) if EVERY_STEP else range(first, 1000, 8):
        proxy.cut_when = Nth(number, wire, to_server=to_server)
        before, pipeline = proxy.cuts, Pipeline()
        sink = orders.sink(url=far, strategy=strategy, name=f"cut {number}", pool_min=0)
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
def test_a_lost_reply_to_commit_is_settled_by_proof(
    orders, proxy, some, *, wire, strategy, verdict
):
    word = wire.words[strategy, "commit"]
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


def test_a_rehearsal_that_was_lost_while_gates_ran_is_no_ground_for_a_decision(keyed, some):
    def gate(epoch):
        for number in keyed.open_transactions():
            keyed.end_session(number)
        if is_taken:
            keyed.sql(f"INSERT INTO {keyed.schema}.orders (id) VALUES (2)")

    rows, is_taken = some(1, 2), True
    options = {"log": MemoryLog(), "schema": rows.schema, "gates": [gate], "limits": HURRY}
    with Session("orders", sinks=[keyed.sink()], **options) as session:
        session.begin(0)
        session.write(rows)
        with pytest.raises(RowRejected):
            session.commit()
        assert keyed.rows(columns="id") == [(2,)]
        keyed.sql(f"DELETE FROM {keyed.schema}.orders")
        is_taken = False
        session.begin(0)
        session.write(rows)
        session.commit()
    assert keyed.rows(columns="id") == [(1,), (2,)]
    assert keyed.leftovers() == []


def test_an_upsert_locks_keys_in_their_order(keyed, some):
    """Rows come as 3, 2, 1; somebody who has changed 1 goes on to 3, and nobody is in the way."""
    life = keyed.life(mode="upsert", keys="id")
    life.write(0, some(1, 2, 3))
    receipts = [life.prepare(some(3, 2, 1, name="m"), 1)]
    change = f"UPDATE {keyed.schema}.orders SET note = 'theirs' WHERE id = "
    keyed.sql("START TRANSACTION")
    keyed.sql(f"{change}1")
    with ThreadPoolExecutor(1) as ours:
        applied = ours.submit(life.rehearse, 1, receipts)
        other = keyed.other_connection()
        while not other.is_anybody_waiting():
            time.sleep(0.02)
        keyed.sql(f"{change}3")
        keyed.sql("COMMIT")
        other.admin.close()
        applied.result()
    life.commit(1, receipts)
    assert keyed.rows(columns="id, name, note") == [
        (1, "m1", "theirs"),
        (2, "m2", "untouched"),
        (3, "m3", "theirs"),
    ]


@pytest.mark.usefixtures("eight_deadlocks")
def test_deadlocks_are_waited_out(orders, some):
    life = orders.life()
    life.write(0, some(1))
    assert orders.rows(columns="id") == [(1,)]


def test_a_driver_that_is_gone_holds_rows_for_a_bounded_time(orders, some):
    patience = Limits(retry_backoff_ms=(1,), decide_retry_max_s=0.5, commit_retry_max_s=0.5)
    life = orders.life()
    life.limits = patience
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    deadline_s = time.monotonic() + 120
    while orders.open_transactions():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    life.committer.confirm(EpochNumber(0), receipts)
    life.commit(0, receipts)
    assert orders.rows(columns="id") == [(1,)]


@BOTH
def test_a_task_whose_kept_connection_died_opens_another(orders, proxy, some, strategy):
    life = orders.life(url=orders.url(port=proxy.port), strategy=strategy)
    life.write(0, some(1))
    proxy.cut()
    life.write(1, some(2))
    assert len(orders.rows()) == 2


def test_a_pool_that_is_used_up_is_reported(orders, some):
    life = orders.life(pool_min=1, pool_max=1, connect_timeout_s=1)
    life.start(some(1))
    receipts = [life.prepare(some(1), 0)]
    life.rehearse(0, receipts)
    with pytest.raises(TryAgain, match=r"all 1 connections .* are in use"):
        life.committer.in_doubt()
    life.commit(0, receipts)
    assert len(orders.rows()) == 1


# The server dies


@contextmanager
def killed_when(proxy, server, word: bytes, *, passes: bool) -> Iterator[None]:
    """Kill the server at a request with this text, before it or right after it."""
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
    ("staged", "load"),
    ("staged", "commit"),
    ("staged", "apply"),
    ("prepared", "prepare"),
    ("prepared", "commit"),
]


@pytest.mark.parametrize("passes", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(("strategy", "step"), KILLS)
def test_a_server_that_is_killed_at_a_step_loses_and_doubles_nothing(
    mortal, wire, strategy, step, passes
):
    place, proxy = mortal
    pipeline = Pipeline()
    sink = partial(
        place.sink,
        url=place.url(port=proxy.port),
        strategy=strategy,
        name=f"{strategy} {step} {passes}",
        pool_min=0,
    )
    with killed_when(proxy, place.server, wire.words[strategy, step], passes=passes):
        pipeline.run_into_trouble(sink(connect_timeout_s=1))
    _wait_until_dead(place.server)
    place.server.start()
    place.reconnect()
    recover(place, sink(), pipeline, is_whole=strategy == "staged")
    place.sql(f"TRUNCATE {place.schema}.orders")


def _wait_until_dead(server) -> None:
    deadline_s = time.monotonic() + 60
    while server._process is not None:
        assert time.monotonic() < deadline_s, "the server was not killed"
        time.sleep(0.02)


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
    place.reconnect()
    assert place.rows(columns="id") == [(0,), (1,)]
    assert place.leftovers() == []
