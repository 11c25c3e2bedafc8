"""A function is called after the decision, with the whole epoch, at least once, under one token."""

from __future__ import annotations

import itertools
import pickle
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from kit.spool.spooled import left_in
from sinks.callback.called import Keeper

from epochal.errors import Misconfigured, TryAgain
from epochal.kit.spool.ledger import SpoolLedger
from epochal.logs import MemoryLog
from epochal.sinks.callback import Callback
from epochal.sinks.callback.sink import PROMISES, CallbackDelivery
from epochal.terms import EpochNumber
from epochal.testing.conformance import SinkConformance, Target, Trial
from epochal.testing.crash import Breach, Setting, crash_at_every_call


def target_at(folder: Path) -> Target:
    keeper = Keeper(str(folder / "called.db"))
    return Target(
        sink=Callback(keeper, spool=folder / "spool", name="called"),
        visible=keeper.rows,
        leftovers=lambda: left_in(folder / "spool"),
        cannot=PROMISES[0].cannot,
    )


@pytest.fixture(autouse=True)
def _importable_elsewhere(monkeypatch):
    """Another process must find the function by its module, as a user's would."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


class TestConformance(SinkConformance):
    def make(self, tmp_path: Path) -> Target:
        return target_at(tmp_path)


@pytest.fixture
def trial(tmp_path):
    return Trial(target_at(tmp_path))


@pytest.fixture
def keeper(trial):
    return trial.sink.function.get()


def rows(*ids: int) -> pa.RecordBatch:
    return pa.record_batch({"id": pa.array(ids, pa.int64()), "name": [f"n{i}" for i in ids]})


@pytest.fixture
def fresh(tmp_path):
    numbers = itertools.count()
    epochs = [[[rows(1, 2)], [rows(3)]]]

    def setting() -> Setting:
        target = target_at(tmp_path / str(next(numbers)))
        Path(target.sink.spool).mkdir(parents=True)
        log = MemoryLog()
        return Setting(
            log=lambda: log,
            sinks=lambda: [target.sink],
            epochs=epochs,
            schema=rows(1).schema,
            visible=lambda name: target.visible(),
            leftovers=target.leftovers,
        )

    return setting


def test_a_crash_at_any_call_leaves_every_row_kept_once(fresh):
    assert crash_at_every_call(fresh, second=False, effects_only=True).runs > 15


def test_the_judge_objects_to_an_epoch_that_is_proven_and_not_delivered(fresh, monkeypatch):
    monkeypatch.setattr(CallbackDelivery, "deliver", lambda *_: {})
    with pytest.raises(Breach, match="lost 3 rows"):
        crash_at_every_call(fresh, second=False, effects_only=True)


def test_a_call_whose_driver_died_is_made_again_under_the_same_token(trial, keeper, monkeypatch):
    receipts = [trial.prepare(0, trial.batch(1, 2)), trial.prepare(0, trial.batch(3), partition=1)]
    with monkeypatch.context() as patch:
        patch.setattr(SpoolLedger, "settle", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            trial.commit(0, *receipts)
    trial.commit(0, *receipts, generation=2)
    first, again = keeper.calls()
    assert first == again
    assert trial.ids() == [1, 2, 3]


def test_an_epoch_without_rows_is_proven_and_not_called(trial, keeper):
    trial.commit(0)
    trial.commit(1, trial.prepare(1))
    assert keeper.calls() == []
    assert [mark.epoch for mark in trial.committer().newest()] == [1]


def test_rows_come_in_the_order_of_partitions_however_receipts_are_listed(tmp_path):
    seen: list[pa.Table] = []
    trial = Trial(target_at(tmp_path))
    trial.sink = Callback(lambda epoch: seen.append(epoch.table()), spool=tmp_path / "s", name="x")
    receipts = [trial.prepare(0, trial.batch(at), partition=at) for at in (2, 0, 1)]
    trial.commit(0, *receipts)
    assert seen[0]["id"].to_pylist() == [0, 1, 2]


def test_a_function_that_raises_leaves_the_epoch_decided_and_is_called_again(tmp_path):
    trouble = [TryAgain("the service sleeps"), ValueError("a bug")]
    calls: list[int] = []

    def function(epoch) -> None:
        if trouble:
            raise trouble.pop(0)
        calls.append(epoch.rows)

    trial = Trial(target_at(tmp_path))
    trial.sink = Callback(function, spool=tmp_path / "s", name="x")
    receipt = trial.prepare(0, trial.batch(1, 2))
    for kind in (TryAgain, ValueError):
        with pytest.raises(kind):
            trial.commit(0, receipt)
        assert trial.committer().newest() == []
    trial.commit(0, receipt)
    assert calls == [2]


def test_rows_that_the_driver_does_not_see_are_refused_before_the_decision(trial, tmp_path):
    receipt = trial.prepare(0, trial.batch(1))
    elsewhere = Callback(trial.sink.function, spool=tmp_path / "another", name=trial.sink.name)
    committer = elsewhere.committer(trial.identity(), trial.target.limits)
    with pytest.raises(Misconfigured, match="does not see the rows") as caught:
        committer.rehearse(EpochNumber(0), [receipt])
    assert "share" in caught.value.hint


def test_a_spool_must_be_named():
    with pytest.raises(Misconfigured, match=r"needs spool=") as caught:
        Callback(print)
    assert "s3://" in caught.value.hint


def test_a_process_that_does_not_call_the_function_need_not_have_its_module(trial, monkeypatch):
    carried = pickle.dumps(trial.sink)
    monkeypatch.setitem(sys.modules, "sinks.callback.called", None)
    again = pickle.loads(carried)
    assert again.name == trial.sink.name
    assert again.target == trial.sink.target
    with pytest.raises(ImportError):
        again.function.get()
