"""Standbys in reports, and commands that claim while standbys are there."""

from __future__ import annotations

import time

import pytest

from epochal.cli.status import status as show_status
from epochal.coordinator.journal import Journal
from epochal.errors import Refused
from epochal.reports.doctor import diagnose
from epochal.reports.drop import drop
from epochal.reports.recover import recover
from epochal.reports.status import pipeline_status
from epochal.storage.leases import lease_at
from epochal.telemetry import standby as standby_module
from epochal.telemetry.standby import Presence, Role, members_of, present_at


@pytest.fixture
def standby(shop):
    """A driver that says it waits, for the lease beside the log."""
    shop.run(epochs=1)
    lease = lease_at(shop.log.store)
    presence = Presence(members_of(shop.log), lease)
    presence.role = Role.WAITING
    while [one.role for one in present_at(shop.log)] != ["waiting"]:
        time.sleep(0.01)
    yield presence
    presence.close()
    lease.close()


def test_status_doctor_and_their_json_show_who_waits_and_since_when(shop, standby, capsys):
    (found,) = pipeline_status(shop.log).standbys
    assert (found.role, found.lease) == ("waiting", lease_at(shop.log.store).location)
    assert abs(found.since - time.time()) < 60
    assert diagnose(shop.opened).standbys == [found]
    show_status(shop.log_path)
    shown = capsys.readouterr().err
    assert "standby: waiting since" in shown
    assert found.driver in shown


def test_a_standby_that_was_killed_is_not_shown_and_is_removed_by_another(
    shop, standby, monkeypatch
):
    members = members_of(shop.log)
    (name,) = members.all()
    monkeypatch.setattr(standby_module, "_OVERDUE_FACTOR", -1)
    assert members.present() == []
    members.remove_overdue()
    assert name not in members.all()


def test_a_command_holds_the_lease_while_it_claims(shop, standby, monkeypatch):
    lease = lease_at(shop.log.store)
    held = []
    claim = Journal.claim

    def claim_beside_a_standby(journal, *given, **named):
        held.append(lease.acquire("a standby"))
        return claim(journal, *given, **named)

    monkeypatch.setattr(Journal, "claim", claim_beside_a_standby)
    recover(shop.opened)
    assert held
    assert not any(held), "a standby could have taken over in the middle of a command"
    assert lease.acquire("a standby") is True
    lease.close()


def test_a_command_names_who_has_the_lease_and_claims_nothing(shop, standby, monkeypatch):
    monkeypatch.setattr("epochal.reports.liveness._LEASE_WAIT_S", 0.1)
    lease = lease_at(shop.log.store)
    assert lease.acquire("a standby") is True
    before = pipeline_status(shop.log).driver.generation
    for command in (
        lambda: recover(shop.opened),
        lambda: drop(shop.opened, dry_run=False),
    ):
        with pytest.raises(
            Refused, match=r"standby drivers are at work.*pid .*: waiting"
        ) as refused:
            command()
        assert "epochal pause" in refused.value.hint
    assert pipeline_status(shop.log).driver.generation == before
    drop(shop.opened, dry_run=True)
    recover(shop.opened, take_over=True)
    assert pipeline_status(shop.log).driver.generation == before + 1
    lease.close()


def test_a_lease_elsewhere_is_not_taken_by_a_command(shop, tmp_path):
    shop.run(epochs=1)
    elsewhere = lease_at(shop.log.store.beside("other"))
    presence = Presence(members_of(shop.log), elsewhere)
    while not present_at(shop.log):
        time.sleep(0.01)
    with pytest.raises(Refused, match="standby drivers are at work"):
        recover(shop.opened)
    presence.close()
    recover(shop.opened)
