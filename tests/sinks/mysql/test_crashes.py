"""Crashes at every call; the judge objects to code that is broken on purpose."""

from __future__ import annotations

import pytest
from kit.sql.crashes import *  # noqa: F403  every test there is one of this module, too
from kit.sql.crashes import settings_at

from epochal.errors import Refused
from epochal.kit.sql.ledger import Ledger
from epochal.kit.sql.staged import StagedSqlCommitter
from epochal.testing.crash import Breach, crash_at_every_call


def test_the_judge_objects_to_a_commit_that_forgets_rows(place, monkeypatch):
    monkeypatch.setattr(StagedSqlCommitter, "staged", lambda *_: {})
    with pytest.raises(Breach, match="lost 3 rows"):
        crash_at_every_call(settings_at(place), second=False)


def test_a_commit_that_proves_nothing_is_found_at_the_next_start(place, monkeypatch):
    monkeypatch.setattr(Ledger, "claim_epoch", lambda *_: True)
    monkeypatch.setattr(Ledger, "record", lambda *_: [])
    with pytest.raises(Refused, match="proves no epoch"):
        crash_at_every_call(settings_at(place), second=False)
