"""A session that is idle still sweeps its targets, and finds out that it was taken over."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace

import pyarrow as pa
import pytest

from epochal import Memory, Session
from epochal.contract import Task
from epochal.coordinator import idle_sweep
from epochal.errors import Fenced
from epochal.logs import MemoryLog
from epochal.terms import EpochNumber, Generation, Limits

SCHEMA = pa.schema([("id", pa.int64())])
OFTEN = Limits(sweep_every_s=0.0)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_sweep, "_EVERY_MIN_S", 0.01)


def wait_for(fact: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not fact():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def session_on(log: MemoryLog, sink: Memory) -> Session:
    return Session("orders", sinks=[sink], schema=SCHEMA, log=log, limits=OFTEN)


def test_what_a_zombie_prepares_goes_although_no_epoch_begins():
    sink = Memory(name="m")
    session_on(log := MemoryLog(), sink).close()
    with session_on(log, sink) as session:
        session.begin(session.next_epoch)
        session.write([{"id": 1}])
        session.commit()
        committer = session._coordinator._targets.committers["m"]
        mine = session._coordinator.identity("m")
        zombie = replace(mine, generation=Generation(1))
        handle = zombie.handle(session.next_epoch, partition=0, attempt=1)
        sink.writer(Task(handle=handle, schema=SCHEMA)).prepare()
        wait_for(lambda: not committer.in_doubt())
    assert sink.rows().to_pylist() == [{"id": 1}]


def test_no_sweep_comes_between_the_verbs_of_an_open_epoch():
    sink = Memory(name="m")
    with session_on(MemoryLog(), sink) as session:
        session.begin(0)
        handle = session._coordinator.identity("m").handle(EpochNumber(0), partition=7, attempt=9)
        sink.writer(Task(handle=handle, schema=SCHEMA)).prepare()
        session._coordinator.sweep()
        assert len(session._coordinator._targets.committers["m"].in_doubt()) == 1


def test_an_idle_session_that_was_taken_over_finds_out_by_itself(caplog):
    log, sink = MemoryLog(), Memory(name="m")
    old = session_on(log, sink)
    with caplog.at_level(logging.ERROR, logger="epochal"):
        new = session_on(log, sink)
        wait_for(lambda: "another driver has taken this pipeline over" in caplog.text)
    with pytest.raises(Fenced):
        old.begin(0)
    old.close()
    new.begin(0)
    new.close()


def sweeps() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "epochal-idle-sweep"}


def test_the_thread_ends_with_its_session_also_where_it_is_never_closed():
    before = sweeps()
    session_on(MemoryLog(), Memory(name="m")).close()
    wait_for(lambda: sweeps() <= before)
    session_on(MemoryLog(), Memory(name="m"))
    gc.collect()
    wait_for(lambda: sweeps() <= before)
