"""The figures an operator asks for."""

import pytest

from epochal.coordinator.tracker import EPOCHS_KEPT, Tracker
from epochal.errors import GateRefused, Unsettled
from epochal.protocol.machine import Phase
from epochal.terms import EpochNumber
from proof.behaviour import OwnClock


@pytest.fixture
def clock():
    return OwnClock()


@pytest.fixture
def tracker(clock):
    return Tracker(clock)


def lived(tracker, clock, epoch, *phases, seconds=1.0):
    for phase in phases:
        tracker.enter(EpochNumber(epoch), phase)
        clock.sleep(seconds)


WHOLE = (Phase.ACTIVE, Phase.PREPARED, Phase.DECIDED, Phase.COMMITTING, Phase.COMMITTED)


def test_before_the_first_epoch_everything_is_well(tracker):
    metrics = tracker.metrics()
    assert metrics.commits == 0
    assert metrics.success_rate == 1.0
    assert tracker.last_epochs() == ()


def test_commits_aborts_and_failures_are_counted(tracker, clock):
    lived(tracker, clock, 0, *WHOLE)
    lived(tracker, clock, 1, Phase.ACTIVE, Phase.ABORTING, Phase.ABORTED)
    lived(tracker, clock, 1, *WHOLE)
    lived(tracker, clock, 2, *WHOLE[:4], Phase.FAILED)
    metrics = tracker.metrics()
    assert (metrics.commits, metrics.aborts, metrics.commit_failures) == (2, 1, 1)
    assert metrics.success_rate == 0.5


def test_each_phase_knows_how_long_it_took(tracker, clock):
    lived(tracker, clock, 0, *WHOLE, seconds=1.0)
    lived(tracker, clock, 1, *WHOLE, seconds=3.0)
    prepared = tracker.metrics().latency[Phase.PREPARED]
    assert (prepared.count, prepared.avg_s, prepared.max_s) == (2, 2.0, 3.0)
    assert (prepared.p50_s, prepared.p99_s) == (1.0, 3.0)
    assert tracker.last_epochs(1)[0].seconds[Phase.ACTIVE] == 3.0


def test_only_a_bounded_number_of_epochs_is_kept(tracker, clock):
    for epoch in range(EPOCHS_KEPT + 5):
        lived(tracker, clock, epoch, Phase.ACTIVE)
    kept = tracker.last_epochs()
    assert len(kept) == EPOCHS_KEPT
    assert kept[0].epoch == 5
    assert [figures.epoch for figures in tracker.last_epochs(2)] == [
        EPOCHS_KEPT + 3,
        EPOCHS_KEPT + 4,
    ]


def test_figures_that_were_given_out_do_not_change_under_their_reader(tracker, clock):
    lived(tracker, clock, 0, Phase.ACTIVE)
    (given,) = tracker.last_epochs()
    with tracker.timing("x", Phase.PREPARING):
        lived(tracker, clock, 0, *WHOLE[1:])
    assert (given.phase, given.sinks) == (Phase.ACTIVE, {})


def test_an_epoch_that_is_tried_again_is_a_second_entry(tracker, clock):
    lived(tracker, clock, 0, Phase.ACTIVE, Phase.ABORTED)
    lived(tracker, clock, 0, *WHOLE)
    assert [figures.phase for figures in tracker.last_epochs()] == [Phase.ABORTED, Phase.COMMITTED]


def test_a_coordinator_counts_the_rows_and_bytes_of_committed_epochs(bench2):
    coordinator = bench2.started()
    bench2.epoch(coordinator, 0)
    bench2.epoch(coordinator, 1)
    metrics = coordinator.tracker.metrics()
    assert (metrics.commits, metrics.rows, metrics.bytes) == (2, 6, 6)
    figures = coordinator.tracker.last_epochs()[0]
    assert figures.sinks["x"].rows == 2
    assert {sink.phase for sink in figures.sinks.values()} == {Phase.COMMITTED}
    assert figures.finished_at is not None


def test_rows_of_an_aborted_epoch_are_not_counted(bench):
    coordinator = bench.started(gates=[lambda epoch: "no"])
    with pytest.raises(GateRefused):
        bench.epoch(coordinator)
    metrics = coordinator.tracker.metrics()
    assert (metrics.rows, metrics.aborts) == (0, 1)


def test_a_decided_epoch_that_could_not_be_carried_out_is_a_failure(bench):
    coordinator = bench.started()
    bench.before["commit"] = [OSError("down")] * 1000
    with pytest.raises(Unsettled):
        bench.epoch(coordinator)
    assert coordinator.tracker.metrics().commit_failures == 1


class Noting:
    """A listener that keeps what it was events."""

    def __init__(self):
        self.events = []

    def claimed(self, state):
        self.events.append(("claimed", state.generation))

    def troubled(self, trouble):
        self.events.append(("troubled", trouble.code))

    def ended(self, epoch):
        self.events.append(("ended", epoch.epoch, epoch.phase, epoch.trouble))

    def close(self):
        self.events.append(("closed",))


def test_listeners_hear_of_claims_troubles_and_ends_in_order(bench):
    def refuse(_epoch):
        return "not today"

    coordinator = bench.coordinator(gates=[refuse])
    noting = Noting()
    coordinator.tracker.listen(noting)
    coordinator.start(bench.start())
    with pytest.raises(GateRefused):
        bench.epoch(coordinator)
    coordinator.stop()
    claimed, troubled, ended, closed = noting.events
    assert (claimed, troubled) == (("claimed", 1), ("troubled", "gate-refused"))
    assert (ended[1:3], ended[3].code) == ((0, Phase.ABORTED), "gate-refused")
    assert closed == ("closed",)


def test_an_error_that_passes_many_layers_is_reported_once(tracker):
    noting = Noting()
    tracker.listen(noting)
    error = Unsettled("no answer")
    tracker.troubled(error)
    tracker.troubled(error)
    assert noting.events == [("troubled", "unsettled")]


def test_what_one_sink_takes_is_measured_beside_the_epoch(tracker, clock):
    tracker.enter(EpochNumber(0), Phase.ACTIVE)
    with tracker.timing("x", Phase.COMMITTING):
        clock.sleep(2.0)
    assert tracker.current().sinks["x"].seconds == {Phase.COMMITTING: 2.0}


def test_the_present_phase_counts_up_to_now(tracker, clock):
    assert tracker.current() is None
    lived(tracker, clock, 0, Phase.ACTIVE, seconds=3.0)
    assert tracker.current().seconds == {Phase.ACTIVE: 3.0}


def test_a_sweep_reports_what_stays_in_doubt_once_it_has_cleared_what_it_could(bench):
    first = bench.started()
    bench.begin(first)
    first.preparing()
    bench.prepare(first)
    second = bench.coordinator("B")
    bench.before["abort"] = [OSError("no route")]
    second.start(bench.start())
    assert second.tracker.in_doubt()["x"].count == 2
    assert bench.started("C").tracker.in_doubt()["x"].count == 0
