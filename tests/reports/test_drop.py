"""Dropping removes what a dead pipeline left, and never rows or a running pipeline."""

from __future__ import annotations

import pytest

from epochal import Memory, Postgres
from epochal.errors import Refused
from epochal.reports.drop import drop
from epochal.reports.recover import recover
from epochal.telemetry.history import history_of


def ledgers(shop):
    return shop.orders._reference.store()._ledgers


def test_a_dry_run_shows_what_would_be_removed_and_removes_nothing(shop):
    shop.run(epochs=1)
    driver = shop.die("prepared")
    before = shop.log.numbers()
    report = drop(shop.opened, dry_run=True)
    assert len(report.sinks["orders"]) == 2
    assert (shop.log.numbers(), len(ledgers(shop))) == (before, 1)
    assert driver is not None


def test_everything_is_removed_but_the_rows(shop):
    shop.run(epochs=1)
    driver = shop.die("prepared")
    shop.log.put_list("0" * 64, b"left by a killed driver")
    report = drop(shop.opened, dry_run=False)
    assert shop.log.numbers() == []
    assert shop.log.list_names() == []
    assert history_of(shop.log).store.names() == []
    assert ledgers(shop) == {}
    assert shop.orders._reference.store()._prepared == {}
    assert shop.orders.rows()["id"].to_pylist() == [0, 1]
    assert report.left == {}
    shop.run(epochs=1)
    assert shop.orders.rows().num_rows == 4
    assert driver is not None


def test_an_interrupted_drop_is_finished_by_the_next(shop, monkeypatch):
    shop.run(epochs=1)
    with monkeypatch.context() as patch:
        patch.setattr(
            "epochal.storage.local.LocalStore.delete",
            lambda *_: (_ for _ in ()).throw(OSError("full")),
        )
        with pytest.raises(OSError, match="full"):
            drop(shop.opened, dry_run=False)
    assert ledgers(shop) == {}
    drop(shop.opened, dry_run=False)
    assert shop.log.numbers() == []


def test_the_log_is_kept_while_a_target_is_not_reached(shop, monkeypatch):
    shop.run(epochs=1)
    whole = Memory.committer

    def away(self, identity, limits):
        if self.name == "audit":
            raise OSError("no route")
        return whole(self, identity, limits)

    with monkeypatch.context() as patch:
        patch.setattr(Memory, "committer", away)
        report = drop(shop.opened, dry_run=False)
    assert report.left == {"audit": "not reached: no route"}
    assert shop.log.numbers() != []
    assert drop(shop.opened, dry_run=False).left == {}
    assert shop.log.numbers() == []


def test_a_running_pipeline_can_not_be_dropped_even_if_declared_dead(shop):
    with shop.session() as session:
        shop.epoch(session)
        for is_dead in (False, True):
            with pytest.raises(Refused, match="is running"):
                drop(shop.opened, dry_run=False, is_dead=is_dead)
        shop.epoch(session)
    assert shop.orders.rows().num_rows == 4


def test_a_decided_epoch_is_committed_before_anything_is_dropped(shop):
    driver = shop.die("decided")
    with pytest.raises(Refused, match="would lose rows"):
        drop(shop.opened, dry_run=False)
    recover(shop.opened)
    drop(shop.opened, dry_run=False)
    assert shop.orders.rows().num_rows == 2
    assert driver is not None


def test_a_driver_on_another_machine_must_be_declared_dead(shop):
    driver = shop.die("prepared", driver=shop.elsewhere)
    with pytest.raises(Refused, match="is on another machine"):
        drop(shop.opened, dry_run=False)
    drop(shop.opened, dry_run=False, is_dead=True)
    assert shop.log.numbers() == []
    assert driver is not None


def test_a_ledger_of_a_database_forgets_one_pipeline_and_no_other(shop, postgres):
    with postgres.connect() as connection:
        connection.execute("CREATE TABLE dropped (id bigint)")
        shop.orders = Postgres(
            postgres.url, table="dropped", name="orders", meta_schema="dropped_meta"
        )
        shop.run(epochs=1)
        report = drop(shop.opened, dry_run=True)
        assert report.sinks["orders"] != []
        drop(shop.opened, dry_run=False)
        assert drop_count(connection) == 0
        assert connection.execute("SELECT count(*) FROM dropped").fetchone() == (2,)


def drop_count(connection) -> int:
    (count,) = connection.execute(
        "SELECT count(*) FROM dropped_meta.ledger WHERE sink_name = 'orders' AND pipeline = 'shop'"
    ).fetchone()
    return count
