"""A pause: the driver ends its epoch and is not fenced, and nobody starts until it is resumed."""

import threading

import pytest

from epochal.coordinator import by_hand
from epochal.coordinator.idle_sweep import IdleSweep
from epochal.coordinator.journal import newest_record
from epochal.errors import Fenced, Refused
from epochal.protocol.state import GivenUp, RecordKind
from epochal.terms import Limits
from proof.calls import SimLog


@pytest.fixture
def log(bench):
    return SimLog(bench.send, "person")


def pause(log):
    return by_hand.pause(log, by="ada", because="the database is upgraded")


def test_a_driver_that_is_paused_within_an_epoch_ends_it_and_begins_no_other(bench, log):
    driver = bench.started()
    bench.begin(driver)
    driver.preparing()
    receipts = bench.prepare(driver)
    pause(log)
    bench.conclude(driver, receipts)
    assert bench.visible() == ["e0p0r0", "e0p1r0"]
    with pytest.raises(Refused, match=r"paused by ada at .* UTC: the database is upgraded") as why:
        bench.begin(driver, 1)
    assert "epochal resume /chk" in why.value.hint
    driver.stop()
    newest = newest_record(log).record
    assert newest.kind is RecordKind.STOP
    assert newest.state.is_stopped
    assert newest.state.is_clear


def test_an_idle_driver_learns_of_a_pause_by_its_sweep(bench, log):
    driver = bench.started()
    bench.epoch(driver)
    pause(log)
    bench.clock.sleep(Limits().sweep_every_s)
    heard, is_heard = [], threading.Event()

    def on_pause(found):
        heard.append(found)
        is_heard.set()

    sweep = IdleSweep(
        driver, threading.Lock(), every_s=60.0, on_error=heard.append, on_pause=on_pause
    )
    assert is_heard.wait(30)
    sweep.stop()
    sweep.join()
    assert [found.by for found in heard] == ["ada"]
    driver.stop()
    assert newest_record(log).record.kind is RecordKind.STOP


def test_nobody_starts_a_paused_pipeline_until_it_is_resumed(bench, log):
    bench.started().stop()
    pause(log)
    assert by_hand.pause(log, by="bob", because="another reason").pause.by == "ada"
    with pytest.raises(Refused, match="paused by ada"):
        bench.started("B")
    by_hand.resume(log, by="ada")
    successor = bench.started("B")
    bench.epoch(successor)
    assert bench.visible() == ["e0p0r0", "e0p1r0"]


def test_a_driver_that_did_not_notice_the_pause_goes_on_once_it_is_resumed(bench, log):
    driver = bench.started()
    pause(log)
    by_hand.resume(log, by="ada")
    for epoch in range(3):
        bench.epoch(driver, epoch)
    assert driver.state.pause is None


def test_a_pause_lets_no_driver_go_on_that_was_taken_over(bench, log):
    old = bench.started()
    bench.started("B")
    pause(log)
    bench.begin(old)
    old.preparing()
    with pytest.raises(Fenced, match="written by another driver"):
        bench.conclude(old, bench.prepare(old))


def test_a_pause_lets_no_driver_go_on_above_what_a_person_changed(bench, log):
    bench.before["commit"] = [OSError("down")] * 100
    driver = bench.started()
    with pytest.raises(Exception, match="down"):
        bench.epoch(driver)
    by_hand.give_up(log, GivenUp(epoch=0, sink="x", kept_at="there", by="ada", because="gone"))
    pause(log)
    driver.stop()
    assert newest_record(log).record.kind is RecordKind.PAUSE
    assert newest_record(log).record.state.given_up


def test_a_person_who_pauses_while_the_driver_decides_loses_no_race(bench, log):
    """The record lands between the driver's own put and its listing, and before each put."""
    driver = bench.started()
    send = bench.send
    left = [True] * 6

    def send_and_pause(call):
        answer = send(call)
        if call.verb in {"put_if_absent", "numbers"} and call.actor == "A" and left:
            left.pop()
            person = SimLog(send, "person")
            pause(person)
            by_hand.resume(person, by="ada")
        return answer

    driver._journal._log._send = send_and_pause
    for epoch in range(3):
        bench.epoch(driver, epoch)
    driver.stop()
    assert not left
    assert newest_record(log).record.kind is RecordKind.STOP
    assert newest_record(log).record.state.expected == 3
