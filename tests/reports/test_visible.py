"""Which epochs are visible where, from the log and from the targets."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from typer.testing import CliRunner

import epochal as ep
from epochal.cli import application
from epochal.errors import Refused, TryAgain
from epochal.protocol.state import GivenUp
from epochal.reports.inspect import committer_of
from epochal.reports.recover import recover
from epochal.reports.resolve import give_up
from epochal.reports.status import require_record
from epochal.sinks.memory.sink import MemoryCommitter
from epochal.terms import EpochNumber


def through(report) -> dict[str, int | None]:
    return {name: one.through for name, one in report.sinks.items()}


def commit_alone(sink, shop) -> None:
    """As a driver does that dies before it commits the other sinks."""
    state = require_record(shop.log).record.state
    with committer_of(sink, state, shop.limits) as committer:
        committer.commit(state.unsettled.epoch, state.unsettled.receipts[sink.name])


def test_all_epochs_of_a_stopped_pipeline_are_visible_everywhere(shop):
    shop.run(epochs=3)
    report = ep.visible(shop.pipeline)
    assert (report.through, report.decided) == (2, 2)
    assert through(report) == {"orders": 2, "audit": 2}
    assert ep.visible(shop.log_path) == report


def test_a_decided_epoch_is_visible_where_its_target_proves_it(shop):
    shop.run(epochs=3)
    dead = shop.die(at="decided")
    commit_alone(shop.orders, shop)
    report = ep.visible(shop.pipeline)
    assert (shop.orders.rows().num_rows, shop.audit.rows().num_rows) == (8, 6)
    assert (report.through, report.decided) == (2, 3)
    assert through(report) == {"orders": 3, "audit": 2}
    assert report.sinks["audit"].pending == 3
    from_log = ep.visible(shop.log_path)
    assert through(from_log) == {"orders": 2, "audit": 2}
    assert from_log.sinks["orders"].pending == 3
    del dead


def test_the_newest_epoch_of_a_running_driver_is_visible_before_the_next_is_decided(shop):
    with shop.session() as session:
        shop.epoch(session)
        shop.epoch(session, rows=0)
        assert ep.visible(shop.pipeline).through == 1
        assert ep.visible(shop.log_path).through == 0


def test_a_target_that_does_not_answer_is_named_and_the_others_are_reported(shop, monkeypatch):
    shop.run(epochs=1)
    dead = shop.die(at="decided")
    commit_alone(shop.orders, shop)

    def unreachable(self, epoch, receipt):
        if self._identity.sink == "audit":
            raise TryAgain("connection refused")
        return found(self, epoch, receipt)

    found = MemoryCommitter.outcome
    monkeypatch.setattr(MemoryCommitter, "outcome", unreachable)
    report = ep.visible(shop.pipeline)
    assert through(report) == {"orders": 1, "audit": 0}
    assert report.sinks["audit"].because == "connection refused"
    del dead


def test_a_target_that_went_back_shows_no_more_than_it_proves(shop, monkeypatch):
    shop.run(epochs=3)

    def restored(self):
        marks = newest(self)
        is_audit = self._identity.sink == "audit"
        return [replace(mark, epoch=EpochNumber(0)) for mark in marks] if is_audit else marks

    newest = MemoryCommitter.newest
    monkeypatch.setattr(MemoryCommitter, "newest", restored)
    report = ep.visible(shop.pipeline)
    assert (report.through, through(report)) == (0, {"orders": 2, "audit": 0})
    assert report.sinks["audit"].because.startswith(
        "the target went back in time; missing there: epochs 1 to 2"
    )


def test_nobody_waits_for_an_epoch_that_was_given_up(shop):
    shop.run(epochs=1)
    dead = shop.die(at="decided")
    given_up = GivenUp(
        epoch=EpochNumber(1), sink="orders", kept_at="s3://kept/1", by="ann", because="gone"
    )
    give_up(shop.opened, given_up, dry_run=False)
    recover(shop.opened)
    report = ep.visible(shop.pipeline)
    assert through(report) == {"orders": 1, "audit": 1}
    assert report.given_up == {"orders": [1]}
    del dead


def test_the_command_prints_what_a_job_waits_for(shop):
    shop.run(epochs=2)
    run = CliRunner().invoke(application(["visible"]), ["visible", shop.log_path, "--json"])
    assert run.exit_code == 0, run.output
    report = json.loads(run.stdout)
    assert (report["report"], report["through"]) == ("visible", 1)
    shown = CliRunner().invoke(application(["visible"]), ["visible", shop.log_path])
    assert "every sink shows all rows through epoch 1" in shown.stderr


def test_a_place_without_a_log_is_refused(tmp_path):
    with pytest.raises(Refused, match="holds no epoch log"):
        ep.visible(str(tmp_path))
