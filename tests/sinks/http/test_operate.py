"""The audit at a receiver, and what a dropped pipeline leaves at one and in a spool."""

from __future__ import annotations

import json

import pytest
from servers.receiver import ReceiverServer
from sinks.http.conftest import TOKEN
from sinks.http.left import left_at

from epochal.kit.sink_base import Operable
from epochal.sinks.http import Http
from epochal.terms import Uid
from epochal.testing.trial import Target, Trial

OTHER = Uid("zyxwvuts7654")


@pytest.fixture
def trial_at():
    trials = []

    def made(url: str, name: str, **options) -> Trial:
        sink = Http(url, name=name, retries_max=0, **{"token": TOKEN, **options})
        trials.append(Trial(Target(sink=sink, visible=list)))
        return trials[-1]

    yield made
    for trial in trials:
        trial.close()


def committed(trial: Trial, epoch: int, *ids: int, **whose) -> None:
    trial.commit(epoch, trial.prepare(epoch, trial.batch(*ids), **whose), **whose)


def test_rows_are_counted_at_the_receiver_by_epoch_and_life(receiver, trial_at):
    trial = trial_at(receiver.url, "counted")
    committed(trial, 0, 1, 2, 3)
    committed(trial, 1, 4)
    committed(trial, 0, 9, uid=OTHER)
    undecided = trial.prepare(2, trial.batch(5, 6))
    committer = trial.committer()
    assert isinstance(committer, Operable)
    found = committer.recount()
    assert (found.rows, found.epochs, found.is_alone) == (4, {0: 3, 1: 1}, True)
    assert len(receiver.rows("counted")) == 5
    trial.abort(2, undecided)


def test_a_receiver_that_keeps_no_rows_is_not_counted(tmp_path, trial_at):
    server = ReceiverServer(tmp_path, tokens=(TOKEN,), keeps_rows=False)
    server.start()
    try:
        trial = trial_at(server.url, "handed on")
        committed(trial, 0, 1)
        found = trial.committer().recount()
        assert found.rows is None
        assert "keeps no rows" in found.because
    finally:
        server.kill()


def test_a_dropped_sink_leaves_its_rows_and_the_mark_that_shows_them(receiver, trial_at):
    trial = trial_at(receiver.url, "dropped")
    for epoch in range(3):
        committed(trial, epoch, epoch)
    committer = trial.committer()
    assert isinstance(committer, Operable)
    shown = committer.drop(is_dry_run=True)
    assert "epochs below 2" in shown.removed[0]
    assert "readers of whole epochs" in shown.kept
    assert committer.drop(is_dry_run=False) == shown
    assert [row["id"] for row in receiver.rows("dropped", whole="true")] == [0, 1, 2]
    assert left_at(receiver, "dropped") == []
    assert committer.drop(is_dry_run=False) == shown
    assert not trial.committer(uid=OTHER).drop(is_dry_run=False).removed


def test_calls_that_a_service_refused_stay_for_a_person(service, tmp_path, trial_at):
    trial = trial_at(
        service.url, "keyed", mode="idempotency-key", spool=tmp_path, on_reject="keep", token=None
    )
    service.answers = lambda _, body: 422 if b'"id":2' in body.replace(b" ", b"") else None
    committed(trial, 0, 1, 2, 3)
    dropped = trial.committer().drop(is_dry_run=False)
    assert "calls that the service refused" in dropped.kept
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert [json.loads(file.read_text())["rows"][0]["id"] for file in files] == [2]
