"""Sinks whose prepared rows are in the way: they prepare last, and their time is limited."""

import pytest

from epochal.contract import Deadline
from epochal.coordinator.gates import AskedTooEarly, Early, PreparedEpoch, run_gates
from epochal.errors import GateRefused, TryAgain
from epochal.protocol.machine import Phase
from epochal.terms import SinkName

EARLY, LATE = SinkName("x"), SinkName("y")


@pytest.fixture
def bench(bench2):
    return bench2


def only(receipts, sink):
    return {sink: receipts[sink]}


def rehearsed(bench):
    return [call.name for call in bench.calls if call.verb == "rehearse"]


def test_early_sinks_are_rehearsed_before_late_ones_prepare_and_not_again(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    coordinator.examine(only(receipts, EARLY))
    assert rehearsed(bench) == [EARLY]
    bench.conclude(coordinator, receipts)
    assert rehearsed(bench) == [EARLY, LATE]
    assert coordinator.phase is Phase.COMMITTED


def test_a_gate_is_asked_once_unless_it_asks_about_a_late_sink(bench):
    asked = []

    def of_early(epoch):
        asked.append(("early", epoch.rows(EARLY)))

    def of_late(epoch):
        asked.append(("late", epoch.rows(LATE)))

    def of_all(epoch):
        asked.append(("all", sum(epoch.rows(sink) for sink in epoch.prepared)))

    coordinator = bench.started(gates=[of_early, of_late, of_all])
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    coordinator.examine(only(receipts, EARLY))
    assert asked == [("early", 2)]
    bench.conclude(coordinator, receipts)
    assert asked == [("early", 2), ("late", 2), ("all", 4)]


def test_a_gate_that_swallows_every_exception_still_does_not_see_a_part_for_the_whole(bench):
    def careless(epoch):
        try:
            return sum(epoch.rows(sink) for sink in epoch.prepared) == 4
        except Exception:  # noqa: BLE001  that is what makes it careless
            return True

    coordinator = bench.started()
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    early = Early(only(receipts, EARLY), frozenset({LATE}))
    left = run_gates([careless], PreparedEpoch(number=0, prepared=early))
    assert left == [careless]
    with pytest.raises(AskedTooEarly):
        len(early)


def test_an_epoch_that_is_refused_early_is_aborted_before_late_sinks_prepare(bench):
    coordinator = bench.started(gates=[lambda epoch: "no"])
    bench.begin(coordinator)
    coordinator.preparing()
    receipts = bench.prepare(coordinator)
    with pytest.raises(GateRefused):
        coordinator.examine(only(receipts, EARLY))
    assert coordinator.phase is Phase.ABORTED
    assert bench.visible(EARLY) == bench.visible(LATE) == []


def keeps_rows_until(monkeypatch, coordinator, at_s):
    """Have the sinks' rehearsals return this deadline."""
    committer = type(coordinator._targets.committers[LATE])
    original = committer.rehearse

    def rehearse(self, epoch, some):
        original(self, epoch, some)
        return Deadline(at_s=at_s, kept_s=60.0, hint="smaller epochs")

    monkeypatch.setattr(committer, "rehearse", rehearse)


@pytest.mark.parametrize("spent_s", [0.0, 53.0])
def test_an_epoch_with_time_left_is_decided(bench, monkeypatch, spent_s):
    coordinator = bench.started(gates=[lambda epoch: bench.clock.sleep(spent_s)])
    bench.begin(coordinator)
    coordinator.preparing()
    keeps_rows_until(monkeypatch, coordinator, bench.clock.monotonic() + 60.0)
    bench.conclude(coordinator, bench.prepare(coordinator))
    assert coordinator.phase is Phase.COMMITTED


@pytest.mark.parametrize(("spent_s", "left_s"), [(55.0, 5), (61.0, 0)])
def test_an_epoch_whose_time_runs_out_while_a_gate_is_asked_is_aborted_and_not_decided(
    bench, monkeypatch, spent_s, left_s
):
    coordinator = bench.started(gates=[lambda epoch: bench.clock.sleep(spent_s)])
    bench.begin(coordinator)
    coordinator.preparing()
    keeps_rows_until(monkeypatch, coordinator, bench.clock.monotonic() + 60.0)
    with pytest.raises(TryAgain, match=f"{left_s} s are left of the 60 s") as caught:
        bench.conclude(coordinator, bench.prepare(coordinator))
    assert caught.value.hint == "smaller epochs"
    assert coordinator.phase is Phase.ABORTED
    assert bench.visible(LATE) == []
