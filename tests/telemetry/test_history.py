"""The history writer: complete, bounded, and never a delay of an epoch; JSON logs."""

from __future__ import annotations

import json
import logging
import threading
import time

import pyarrow as pa
import pytest

from epochal import Limits, Memory, Session
from epochal.clock import SystemClock
from epochal.coordinator import Tracker
from epochal.errors import Misconfigured
from epochal.protocol.machine import Phase
from epochal.protocol.state import State
from epochal.storage.memory import MemoryStore
from epochal.telemetry import log_as_json
from epochal.telemetry.history import LIVE, History
from epochal.telemetry.history_writer import Recorder
from epochal.terms import EpochNumber, Generation, Uid

SCHEMA = pa.schema([("id", pa.int64())])


class SlowStore(MemoryStore):
    """A store that may hang or fail."""

    def __init__(self):
        super().__init__()
        self.is_failing = False
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def put(self, key, content):
        self.may_go_on.wait()
        if self.is_failing:
            raise OSError("disk full")
        super().put(key, content)


@pytest.fixture
def store(monkeypatch):
    # A driver that ends does not wait long for its history; on a busy machine these tests must.
    monkeypatch.setattr("epochal.telemetry.history_writer._CLOSE_WAIT_MAX_S", 60.0)
    return SlowStore()


def recorded(store, epochs_kept=100_000, **how):
    tracker = Tracker(SystemClock())
    recorder = Recorder(tracker, store, **{"flush_every_s": 0.02, **how}, epochs_kept=epochs_kept)
    tracker.listen(recorder)
    claim(tracker, generation=1)
    return tracker


def claim(tracker, *, generation):
    who = {"uid": Uid("a" * 12), "pipeline": "p", "location": "/", "driver": "d"}
    tracker.claimed(State(**who, generation=Generation(generation)))


def lived(tracker, first, last):
    for epoch in range(first, last):
        tracker.enter(EpochNumber(epoch), Phase.ACTIVE)
        tracker.enter(EpochNumber(epoch), Phase.COMMITTED)


def written(store):
    return [one.epoch for one in History(store=store).all()]


def test_every_epoch_is_written_once_over_many_segments(store):
    tracker = recorded(store)
    lived(tracker, 0, 1200)
    tracker.close()
    assert written(store) == list(range(1200))
    assert len(History(store=store).segments()) == 3


def test_the_history_is_bounded(store):
    tracker = recorded(store, epochs_kept=1000)
    lived(tracker, 0, 3000)
    tracker.close()
    assert len(History(store=store).segments()) == 2
    assert written(store)[-1] == 2999


def test_a_storage_that_hangs_delays_neither_an_epoch_nor_the_end(store, monkeypatch):
    monkeypatch.setattr("epochal.telemetry.history_writer._CLOSE_WAIT_MAX_S", 0.1)
    store.may_go_on.clear()
    tracker = recorded(store)
    lived(tracker, 0, 100)
    tracker.close()
    assert tracker.metrics().commits == 100
    store.may_go_on.set()


def test_a_storage_that_fails_for_a_while_gets_all_lines_afterwards(store, caplog):
    store.is_failing = True
    tracker = recorded(store)
    lived(tracker, 0, 10)
    deadline_s = time.monotonic() + 120
    while not caplog.records:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    store.is_failing = False
    tracker.close()
    assert written(store) == list(range(10))
    assert [one.levelno for one in caplog.records].count(logging.WARNING) == 1


def test_a_storage_that_deletes_nothing_keeps_every_line_and_the_heartbeat(store, caplog):
    def refuse(keys):
        raise Misconfigured("may not delete")

    store.delete = refuse
    tracker = recorded(store, epochs_kept=500)
    lived(tracker, 0, 2000)
    tracker.close()
    assert written(store) == list(range(2000))
    assert History(store=store).live().epoch == 1999
    assert "can't be deleted: may not delete" in caplog.text


def test_lines_that_can_not_be_written_do_not_make_a_driver_look_dead(store):
    put = store.put

    def put_heartbeat(key, content):
        if key != LIVE:
            raise Misconfigured("may not write")
        put(key, content)

    store.put = put_heartbeat
    tracker = recorded(store)
    lived(tracker, 0, 2)
    tracker.close()
    assert written(store) == []
    assert History(store=store).live().epoch == 1


def test_a_segment_belongs_to_one_generation(store):
    store.may_go_on.clear()
    tracker = recorded(store)
    lived(tracker, 0, 2)
    claim(tracker, generation=2)
    lived(tracker, 2, 3)
    store.may_go_on.set()
    tracker.close()
    assert [(one.epoch, one.generation) for one in History(store=store).all()] == [
        (0, 1),
        (1, 1),
        (2, 2),
    ]
    assert [name.split("-")[1] for name in History(store=store).segments()] == [
        "0000000001",
        "0000000002",
    ]


def test_a_listener_that_raises_changes_nothing(caplog):
    class Broken:
        def claimed(self, state):
            raise RuntimeError("no")

        troubled = ended = claimed

        def close(self):
            raise RuntimeError("no")

    tracker = Tracker(SystemClock())
    tracker.listen(Broken())
    lived(tracker, 0, 1)
    tracker.close()
    assert tracker.metrics().commits == 1
    assert "Broken failed: no" in caplog.text


def test_no_history_is_kept_if_the_limit_is_zero(tmp_path):
    with Session(
        "p",
        sinks=[Memory()],
        schema=SCHEMA,
        log=str(tmp_path),
        limits=Limits(history_epochs_kept=0),
    ) as session:
        session.begin(0)
        session.commit()
    assert not (tmp_path / "history").exists()


def test_log_lines_are_json_with_pipeline_epoch_and_sink_and_without_secrets(tmp_path, capsys):
    class Logging(Memory):
        def committer(self, identity, limits):
            committer = super().committer(identity, limits)
            whole = committer.commit

            def commit(epoch, receipts):
                logging.getLogger("epochal").warning("at postgresql://etl:hunter2@db/x")
                whole(epoch, receipts)

            committer.commit = commit
            return committer

    handler = log_as_json()
    try:
        with Session(
            "shop", sinks=[Logging(name="orders")], schema=SCHEMA, log=str(tmp_path)
        ) as session:
            session.begin(0)
            session.commit()
    finally:
        logging.getLogger("epochal").removeHandler(handler)
    (line,) = [one for one in capsys.readouterr().err.splitlines() if "postgresql" in one]
    entry = json.loads(line)
    assert (entry["pipeline"], entry["epoch"], entry["sink"]) == ("shop", 0, "orders")
    assert (entry["level"], entry["logger"]) == ("warning", "epochal")
    assert "hunter2" not in line
