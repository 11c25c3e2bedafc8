"""Settling by hand. An undecided epoch can't be committed."""

from __future__ import annotations

from functools import partial

import pytest

from epochal.coordinator.journal import newest_record
from epochal.errors import Refused, WentBack
from epochal.protocol.state import GivenUp, RecordKind
from epochal.reports import resolve
from epochal.reports.doctor import diagnose
from epochal.reports.recover import recover
from epochal.reports.status import pipeline_status
from epochal.terms import EpochNumber


def finish(shop, sink="orders", epoch=0, **more):
    return resolve.finish(shop.opened, sink=sink, epoch=epoch, by="ann", **more)


def listed(shop):
    return list(shop.orders._reference.store()._prepared)


def test_one_sink_of_a_decided_epoch_is_finished_with_the_evidence_on_record(shop):
    driver = shop.die("decided")
    shown = finish(shop, dry_run=True)
    assert shown.step == "would commit epoch 0 on 'orders'"
    assert shown.evidence == [
        "decided by generation 1: 1 receipt, 2 rows",
        "the target proves: 1 unknown",
    ]
    assert shop.orders.rows().num_rows == 0
    assert finish(shop, dry_run=False).step == "epoch 0 is committed on 'orders'"
    assert (shop.orders.rows().num_rows, shop.audit.rows().num_rows) == (2, 0)
    assert list(newest_record(shop.log).record.state.pending) == ["audit"]
    assert "ann finished sink 'orders'" in newest_record(shop.log).record.note
    finish(shop, "audit", dry_run=False)
    assert newest_record(shop.log).record.state.unsettled is None
    recover(shop.opened)
    assert (shop.orders.rows().num_rows, shop.audit.rows().num_rows) == (2, 2)
    assert driver is not None


@pytest.mark.parametrize(("sink", "epoch"), [("orders", 1), ("unknown", 0)])
def test_a_sink_that_is_not_pending_can_not_be_finished(shop, sink, epoch):
    driver = shop.die("decided")
    with pytest.raises(Refused):
        finish(shop, sink, epoch, dry_run=False)
    assert driver is not None


def test_an_undecided_epoch_can_not_be_finished(shop):
    driver = shop.die("prepared")
    with pytest.raises(Refused, match="is not waiting"):
        finish(shop, dry_run=False)
    assert shop.orders.rows().num_rows == 0
    assert driver is not None


def test_a_sink_that_is_given_up_is_not_counted_and_its_rows_are_on_record(shop):
    shop.run(epochs=1)
    driver = shop.die("decided")
    given_up = GivenUp(
        epoch=EpochNumber(1), sink="orders", kept_at="s3://kept/1", by="ann", because="gone"
    )
    assert resolve.give_up(shop.log_alone, given_up, dry_run=True).step.startswith("would give")
    assert pipeline_status(shop.log).given_up == []
    resolve.give_up(shop.opened, given_up, dry_run=False)
    report = pipeline_status(shop.log)
    assert (report.given_up[0].kept_at, report.given_up[0].by) == ("s3://kept/1", "ann")
    assert "the target proves: 1 unknown" in report.given_up[0].evidence
    assert {sink.name: sink.rows for sink in report.sinks} == {"orders": 2, "audit": 4}
    recover(shop.opened)
    assert (shop.orders.rows().num_rows, shop.audit.rows().num_rows) == (2, 4)
    assert driver is not None


def test_an_undecided_handle_is_aborted_after_a_claim_and_on_record(shop):
    driver = shop.die("prepared")
    (name,) = listed(shop)
    shown = resolve.abort(shop.opened, sink="orders", name=name, by="ann", dry_run=True)
    assert "no decision names it" in shown.evidence[0]
    assert listed(shop) == [name]
    resolve.abort(shop.opened, sink="orders", name=name, by="ann", dry_run=False)
    newest = newest_record(shop.log).record
    assert (newest.kind, newest.state.generation) == (RecordKind.RESOLVED, 2)
    assert f"ann aborted {name}" in newest.note
    assert listed(shop) == []
    assert driver is not None


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_handle_that_a_decision_names_can_not_be_aborted(shop, dry_run):
    driver = shop.die("decided")
    (name,) = listed(shop)
    with pytest.raises(Refused, match="nothing there may be aborted"):
        resolve.abort(shop.opened, sink="orders", name=name, by="ann", dry_run=dry_run)
    recover(shop.opened)
    assert shop.orders.rows().num_rows == 2
    assert driver is not None


def test_a_handle_that_is_not_listed_can_not_be_aborted(shop):
    shop.run(epochs=1)
    with pytest.raises(Refused, match="lists nothing named"):
        resolve.abort(shop.opened, sink="orders", name="x", by="ann", dry_run=False)


def test_nothing_is_settled_by_hand_while_a_driver_is_running(shop):
    with shop.session() as session:
        session.begin(0)
        with pytest.raises(Refused, match="seems to be running"):
            resolve.abort(shop.opened, sink="orders", name="x", by="ann", dry_run=False)


def test_aborting_one_handle_does_not_record_a_clean_stop(shop):
    driver = shop.die("prepared")
    (name,) = listed(shop)
    resolve.abort(shop.opened, sink="orders", name=name, by="ann", dry_run=False)
    assert shop.audit._reference.store()._prepared
    assert not newest_record(shop.log).record.state.is_stopped
    assert driver is not None


def test_a_target_that_went_back_is_accepted_with_what_is_missing_on_record(shop):
    shop.run(epochs=3)
    (ledger,) = shop.orders._reference.store()._ledgers.values()
    ledger.handles[EpochNumber(1)] = ledger.handles.pop(EpochNumber(2))
    ledger.settled_below = EpochNumber(1)
    with pytest.raises(WentBack, match="epoch 2 was committed there"):
        recover(shop.opened)
    assert diagnose(shop.opened).problems == [
        "orders: the target went back in time; missing there: epoch 2 (offsets: not in the log)"
    ]
    accept = partial(resolve.accept, shop.opened, sink="orders", by="ann", because="restored")
    shown = accept(dry_run=True)
    assert shown.step == "would accept that 'orders' went back, and go on after epochs up to 1"
    assert "missing there: epoch 2" in shown.evidence[1]
    assert pipeline_status(shop.log).accepted == []
    accept(dry_run=False)
    (on_record,) = pipeline_status(shop.log).accepted
    assert (on_record.sink, on_record.after, on_record.through) == ("orders", 1, 2)
    assert (on_record.by, on_record.because) == ("ann", "restored")
    assert newest_record(shop.log).record.kind is RecordKind.ACCEPTED
    recover(shop.opened)
    assert "nothing to accept" in accept(dry_run=False).step
