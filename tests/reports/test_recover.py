"""Recovery: planned, done, and refused while a driver is running."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from epochal import Limits, Memory
from epochal.errors import Misconfigured, OutcomeUnknown, Refused, Unsettled
from epochal.logs import open_log
from epochal.reports import resolve
from epochal.reports.drop import drop
from epochal.reports.recover import plan_recovery, recover
from epochal.reports.status import pipeline_status
from epochal.sinks.memory.sink import MemoryCommitter


def test_a_dry_run_lists_the_steps_and_changes_nothing(shop):
    driver = shop.die("decided")
    before = shop.log.numbers()
    report = plan_recovery(shop.opened)
    assert report.is_dry_run
    assert report.steps == [
        "claim generation 2; generation 1 is fenced",
        "commit epoch 0 on orders: 1 receipt (1 unknown)",
        "commit epoch 0 on audit: 1 receipt (1 unknown)",
    ]
    assert report.needs_a_person == []
    assert shop.log.numbers() == before
    assert shop.orders.rows().num_rows == 0
    assert driver is not None


def test_recovery_commits_what_is_decided_once_and_may_be_repeated(shop):
    driver = shop.die("decided")
    for expected in ("commit epoch 0 on audit", "nothing is in doubt"):
        report = recover(shop.opened)
        assert any(step.startswith(expected) for step in report.steps)
        assert shop.orders.rows()["id"].to_pylist() == [0, 1]
        assert shop.audit.rows()["id"].to_pylist() == [0, 1]
    assert pipeline_status(shop.log).unsettled is None
    assert pipeline_status(shop.log).driver.liveness.value == "stopped"
    assert driver is not None


def test_recovery_aborts_what_no_decision_names(shop):
    driver = shop.die("prepared")
    report = recover(shop.opened)
    assert "abort 1 attempt on orders that no decision names" in report.steps
    assert plan_recovery(shop.opened).steps[1:] == ["nothing is in doubt"]
    assert shop.orders.rows().num_rows == 0
    shop.run(epochs=1)
    assert shop.orders.rows()["id"].to_pylist() == [0, 1]
    assert driver is not None


def test_the_log_of_a_copied_checkpoint_discards_nothing_that_the_original_has_decided(
    shop, monkeypatch
):
    """The copy was made between two epochs of a driver, which failed in the second one."""
    session = shop.session(limits=Limits(commit_retry_max_s=0.0))
    shop.epoch(session)
    (shop.root / "chk" / "metadata").write_text("{}")  # Spark's: the log lies in a checkpoint
    shutil.copytree(shop.root / "chk", shop.root / "backup")
    with monkeypatch.context() as broken, session:
        broken.setattr(MemoryCommitter, "commit", away)
        with pytest.raises(Unsettled):
            shop.epoch(session)
    backup = replace(shop.opened, log=open_log(str(shop.root / "backup" / "epochal" / "log")))
    by_the_copy = {
        "recover": lambda: recover(backup),
        "accept": lambda: resolve.accept(
            backup, sink="orders", by="me", because="-", dry_run=False
        ),
        "drop": lambda: drop(backup, dry_run=False),
    }
    for act in by_the_copy.values():
        with pytest.raises(Refused, match=r"backup seems to be a copy.* bound to .*/chk/"):
            act()
    recover(shop.opened)
    assert shop.orders.rows().num_rows == 4
    with pytest.raises(Refused, match="the log is older than the target"):
        recover(backup, take_over=True)  # who insists meets the rules of every start


def away(*_: object) -> None:
    raise OutcomeUnknown("connection refused")


def test_a_running_driver_is_not_fenced_by_accident(shop):
    with shop.session() as session:
        shop.epoch(session)
        with pytest.raises(Refused, match="seems to be running") as caught:
            recover(shop.opened)
        assert "--take-over" in caught.value.hint
        shop.epoch(session)
    assert shop.orders.rows().num_rows == 4


def test_a_driver_of_unknown_state_on_another_machine_is_not_fenced_either(shop):
    driver = shop.die("decided", driver=shop.elsewhere)
    with pytest.raises(Refused, match="is on another machine"):
        recover(shop.opened)
    recover(shop.opened, take_over=True)
    assert shop.orders.rows().num_rows == 2
    assert driver is not None


def test_recovery_needs_more_than_the_log(shop):
    shop.run(epochs=1)
    with pytest.raises(Misconfigured, match="holds no credentials"):
        recover(shop.log_alone)


def test_a_target_that_can_not_be_reached_needs_a_person(shop, monkeypatch):
    driver = shop.die("decided")

    def unreachable(self, identity, limits):
        raise OSError("connection refused")

    monkeypatch.setattr(Memory, "committer", unreachable)
    report = plan_recovery(shop.opened)
    assert report.needs_a_person == ["orders: connection refused", "audit: connection refused"]
    assert [sink.receipts[0].proof for sink in report.sinks] == ["not queried", "not queried"]
    assert driver is not None


def test_rows_that_a_target_discarded_are_reported_and_stay_decided(shop):
    driver = shop.die("decided")
    place = shop.orders._reference.store()
    place.abort(list(place._prepared))
    assert any("discarded" in need for need in plan_recovery(shop.opened).needs_a_person)
    with pytest.raises(Unsettled, match=r"orders \(1\)"):
        recover(shop.opened)
    assert pipeline_status(shop.log).unsettled.epoch == 0
    assert shop.audit.rows().num_rows == 2
    assert driver is not None
