"""Metrics during an epoch; gauges end with the driver."""

from __future__ import annotations

import pytest

from epochal.contract import Room
from epochal.coordinator import Tracker
from epochal.protocol.machine import Phase
from epochal.protocol.recovery import Judgement, Verdict
from epochal.protocol.state import State
from epochal.telemetry.metrics import MetricsListener
from epochal.terms import EpochNumber, Generation, InDoubt, Uid
from proof.behaviour import OwnClock


class Kept:
    """Meters that keep every measurement."""

    def __init__(self):
        self.sums: dict = {}
        self.gauges: dict = {}

    def add(self, name, labels, amount):
        self.sums[name, labels] = self.sums.get((name, labels), 0) + amount

    def observe(self, name, labels, seconds):
        self.add(name, labels, seconds)

    def watch(self, name, labels, read):
        self.gauges[name, labels] = read

    def unwatch(self, name, labels):
        del self.gauges[name, labels]

    def gauge(self, name, *labels):
        return self.gauges[f"epochal_{name}", labels]()


class Passing(OwnClock):
    """A clock whose date advances with its seconds."""

    def now(self):
        return 1_700_000_000.0 + self.monotonic()


@pytest.fixture
def clock():
    return Passing()


@pytest.fixture
def kept():
    return Kept()


@pytest.fixture
def tracker(clock, kept):
    tracker = Tracker(clock)
    tracker.listen(MetricsListener(tracker, [kept], now=clock.now))
    tracker.claimed(
        State(
            uid=Uid("a" * 12),
            pipeline="p",
            location="/",
            generation=Generation(7),
            sinks={"k": {"kind": "kafka"}, "f": {"kind": "files"}},
        )
    )
    return tracker


def test_an_open_kafka_transaction_blocks_consumers_until_it_is_committed(tracker, clock, kept):
    assert kept.gauge("kafka_lso_pinned_seconds", "p", "k") == 0
    assert ("epochal_kafka_lso_pinned_seconds", ("p", "f")) not in kept.gauges
    for phase in (Phase.ACTIVE, Phase.PREPARING, Phase.PREPARED, Phase.DECIDED, Phase.COMMITTING):
        tracker.enter(EpochNumber(0), phase)
        clock.sleep(10)
    assert kept.gauge("kafka_lso_pinned_seconds", "p", "k") == 40
    tracker.sink_committed("k")
    assert kept.gauge("kafka_lso_pinned_seconds", "p", "k") == 0


def test_an_epoch_is_unsettled_from_its_decision_until_its_end(tracker, kept):
    seen = []
    for phase in (Phase.ACTIVE, Phase.PREPARED, Phase.DECIDED, Phase.COMMITTING, Phase.COMMITTED):
        tracker.enter(EpochNumber(3), phase)
        seen.append(kept.gauge("decided_unsettled", "p"))
    assert seen == [0, 0, 1, 1, 0]
    assert (kept.gauge("last_epoch", "p"), kept.gauge("generation", "p")) == (3, 7)
    tracker.enter(EpochNumber(4), Phase.FAILED)
    assert kept.gauge("decided_unsettled", "p") == 1


def test_the_age_of_handles_in_doubt_grows(tracker, clock, kept):
    found = InDoubt(name="x", handle=None, age_s=5.0)
    judged = [Judgement(found=found, verdict=Verdict.LEAVE, because="")]
    tracker.swept("f", judged, 1)
    clock.sleep(10)
    assert kept.gauge("in_doubt", "p", "f") == 1
    assert kept.gauge("oldest_in_doubt_seconds", "p", "f") == 15


def test_gauges_end_with_the_driver_and_counters_stay(tracker, kept):
    tracker.enter(EpochNumber(0), Phase.ACTIVE)
    tracker.enter(EpochNumber(0), Phase.COMMITTED)
    tracker.close()
    assert kept.gauges == {}
    assert kept.sums["epochal_epochs_total", ("p", "committed")] == 1


def test_the_size_of_a_spool_is_that_of_the_last_clean_up(tracker, kept):
    assert kept.gauge("spool_bytes", "p", "k") == 0
    tracker.has_room("k", Room(used_bytes=700))
    assert kept.gauge("spool_bytes", "p", "k") == 700
    assert ("epochal_spool_bytes", ("p", "f")) not in kept.gauges


def test_counters_are_there_before_the_first_event(kept, tracker):
    """Prometheus sees no increase in a series that begins with one."""
    for code in ("fenced", "gate-refused", "backpressure"):
        assert kept.sums["epochal_errors_total", ("p", code)] == 0
    assert kept.sums["epochal_rejected_rows_total", ("p", "f")] == 0


def test_what_log_and_history_keep_is_shown_beside_their_limits(tracker, kept):
    assert kept.gauge("kept", "p", "log") == kept.gauge("kept_limit", "p", "history") == 0
    tracker.keeps("log", 200, limit=64)
    tracker.keeps("history", 3, limit=200)
    assert (kept.gauge("kept", "p", "log"), kept.gauge("kept_limit", "p", "log")) == (200, 64)
    assert (kept.gauge("kept", "p", "history"), kept.gauge("kept_limit", "p", "history")) == (
        3,
        200,
    )
