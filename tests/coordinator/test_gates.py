"""A gate's word on a prepared epoch, before it is decided."""

import sys

import pytest

from epochal.coordinator.gates import PreparedEpoch, run_gates
from epochal.errors import GateRefused, Misconfigured
from epochal.protocol.machine import Phase


def prepared(bench):
    coordinator = bench.started()
    bench.begin(coordinator)
    return PreparedEpoch(number=0, prepared=bench.prepare(coordinator))


@pytest.mark.parametrize("word", [None, True])
def test_a_gate_lets_an_epoch_pass(bench, word):
    run_gates([lambda epoch: word], prepared(bench))


def named_gate(epoch):
    return False


@pytest.mark.parametrize(
    ("gate", "text"),
    [
        (named_gate, "gate named_gate refused: it returned False"),
        (lambda epoch: "too few rows", "too few rows"),
        (lambda epoch: 1 / 0, "failed: ZeroDivisionError"),
        (lambda epoch: sys.exit(3), "failed: SystemExit: 3"),
        (lambda epoch: pytest.fail("no rows"), "failed: Failed: no rows"),
        (lambda epoch: epoch.rows("nowhere") > 0, "'nowhere', which this pipeline does not have"),
    ],
)
def test_a_refusal_carries_the_gates_own_words(bench, gate, text):
    with pytest.raises(GateRefused, match=text) as caught:
        run_gates([gate], prepared(bench))
    assert caught.value.hint


def test_ctrl_c_during_a_gate_is_the_users_and_refuses_nothing(bench):
    def gate(epoch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_gates([gate], prepared(bench))


def test_an_error_of_ours_from_a_gate_keeps_its_class(bench):
    def gate(epoch):
        raise Misconfigured("no such table")

    with pytest.raises(Misconfigured, match="no such table"):
        run_gates([gate], prepared(bench))


def test_a_gate_sees_rows_bytes_and_receipts_by_sink(bench):
    epoch = prepared(bench)
    assert (epoch.rows("x"), epoch.bytes("x"), len(epoch.receipts("x"))) == (2, 2, 2)


def test_the_first_refusal_is_the_last_word(bench):
    asked = []
    with pytest.raises(GateRefused):
        run_gates([lambda epoch: "no", asked.append], prepared(bench))
    assert asked == []


def test_a_refused_epoch_is_aborted_and_nothing_became_visible(bench):
    coordinator = bench.started(gates=[lambda epoch: "no"])
    with pytest.raises(GateRefused):
        bench.epoch(coordinator)
    assert coordinator.phase is Phase.ABORTED
    assert bench.visible() == []
    assert not bench.world.targets["x"].prepared
    assert bench.verbs("commit") == []
    assert coordinator.state.last is None


def test_a_refused_epoch_can_be_tried_again_under_the_same_number(bench):
    words = iter(["no", None])
    coordinator = bench.started(gates=[lambda epoch: next(words)])
    with pytest.raises(GateRefused):
        bench.epoch(coordinator)
    bench.begin(coordinator)
    coordinator.preparing()
    bench.conclude(coordinator, bench.prepare(coordinator, attempt=9))
    assert len(bench.visible()) == 2
