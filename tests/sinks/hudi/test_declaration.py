"""What a Hudi sink refuses before anything runs, its ledger, and what it does without Spark."""

from __future__ import annotations

import pytest

import epochal as ep
from epochal.sinks.hudi.ledger import Ledger
from epochal.sinks.hudi.sink import FIXED, FIXED_FOR
from epochal.terms import NO_ROWS, EpochNumber, Generation, Identity, Limits, Proof, Receipt, Uid

ORDERS = Identity(pipeline="orders", uid=Uid("abcdefgh2345"), sink="hudi", generation=Generation(1))
LOCK = "hoodie.write.lock.provider"


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_every_option_that_would_break_a_promise_is_refused_with_its_reason(tmp_path, mode):
    fixed = {**FIXED, **FIXED_FOR[mode]}
    for option, (needed, because) in fixed.items():
        ep.Hudi(tmp_path, mode=mode, options={option: needed.lower()})
        with pytest.raises(ep.Misconfigured, match="leave it out") as refused:
            ep.Hudi(tmp_path, mode=mode, options={option: "something else"})
        assert because in str(refused.value)
        assert ep.Hudi(tmp_path, mode=mode).writer_options()[option] == needed


def test_eager_cleaning_is_refused_by_its_old_name_too(tmp_path):
    with pytest.raises(ep.Misconfigured, match="EAGER"):
        ep.Hudi(tmp_path, options={"hoodie.cleaner.policy.failed.writes": "EAGER"})


@pytest.mark.parametrize(
    ("table", "options", "fact"),
    [
        ("/t", {LOCK: "org.apache.hudi.client.transaction.lock.InProcessLockProvider"}, "nobody"),
        ("/t", {LOCK: "org.apache.hudi.client.transaction.lock.NoopLockProvider"}, "nobody"),
        ("/t", {"hoodie.write.lock.filesystem.expire": "0"}, "for ever"),
        ("s3a://lake/orders", {}, f"no {LOCK}"),
    ],
)
def test_a_lock_that_does_not_hold_other_drivers_off_is_refused(table, options, fact):
    with pytest.raises(ep.Misconfigured, match=fact):
        ep.Hudi(table, options=options)


def test_a_mode_and_an_index_that_are_not_there_are_refused_with_those_that_are(tmp_path):
    with pytest.raises(ep.Misconfigured, match=r"mode='merge'(.|\n)*append, upsert"):
        ep.Hudi(tmp_path, mode="merge")
    with pytest.raises(ep.Misconfigured, match=r"RECORD_INDEX(.|\n)*GLOBAL_SIMPLE"):
        ep.Hudi(tmp_path, options={"hoodie.index.type": "RECORD_INDEX"})
    assert ep.Hudi(tmp_path, options={"hoodie.index.type": "GLOBAL_BLOOM"}).has_global_keys
    assert not ep.Hudi(tmp_path, mode="upsert").has_global_keys


def test_only_upsert_takes_rows_that_update_earlier_ones(tmp_path):
    assert ep.Hudi(tmp_path).output_modes == {"append"}
    assert ep.Hudi(tmp_path, mode="upsert").output_modes == {"append", "update"}


def test_options_are_not_shown(tmp_path):
    sink = ep.Hudi(tmp_path, options={"hoodie.write.lock.zookeeper.url": "s3cret"})
    assert "s3cret" not in repr(sink)
    assert "s3cret" not in str(sink.describe())


def test_no_task_and_no_session_writes_rows(tmp_path):
    with pytest.raises(ep.Misconfigured, match="Hudi's own writer"):
        ep.Hudi(tmp_path).writer(None)


def test_without_spark_what_is_prepared_is_listed_and_nothing_else_is_claimed(
    tmp_path, monkeypatch
):
    monkeypatch.setattr("epochal.sinks.hudi.committer.running_spark", lambda: None)
    monkeypatch.setattr("epochal.sinks.hudi.client.running_spark", lambda: None)
    committer = ep.Hudi(tmp_path, name="hudi").committer(ORDERS, Limits())
    handle = ORDERS.job_handle(EpochNumber(3), 7)
    note = tmp_path / ".hoodie" / "epochal" / "prepared" / str(handle)
    note.parent.mkdir(parents=True)
    note.write_text("20261117185000123")
    receipt = Receipt(handle=handle, fingerprint=NO_ROWS)
    (ability,) = committer.check(None)
    assert not ability.granted
    assert "no Spark session" in ability.because
    assert [one.handle for one in committer.in_doubt()] == [handle]
    assert committer.outcome(EpochNumber(3), receipt) is Proof.UNKNOWN
    assert committer.newest() is None
    assert committer.recount().rows is None
    for verb in (committer.commit, committer.abort, committer.rehearse):
        with pytest.raises(ep.Misconfigured, match="can only list"):
            verb(EpochNumber(3), [receipt])
    assert note.exists()


def test_the_ledger_keeps_what_other_pipelines_wrote_and_two_epochs_of_its_own():
    other = Identity(pipeline="other", uid=Uid("zzzzzzzz2345"), sink="o", generation=Generation(1))
    text = Ledger(other, None).with_epoch(EpochNumber(9), [other.job_handle(EpochNumber(9), 0)])
    for epoch in range(4):
        handle = ORDERS.job_handle(EpochNumber(epoch), epoch)
        text = Ledger(ORDERS, text).with_epoch(EpochNumber(epoch), [handle])
    mine = Ledger(ORDERS, text)
    handles = [ORDERS.job_handle(EpochNumber(epoch), epoch) for epoch in range(5)]
    assert [mine.names(handle) for handle in handles] == [None, None, True, True, None]
    assert mine.names(ORDERS.job_handle(EpochNumber(3), 99)) is False
    assert [mine.is_done(EpochNumber(epoch)) for epoch in range(5)] == [True] * 4 + [False]
    assert mine.is_of(EpochNumber(3), frozenset({handles[3]}))
    assert not mine.is_of(EpochNumber(3), frozenset({handles[2]}))
    assert [(mark.uid, mark.epoch) for mark in mine.marks()] == [(ORDERS.uid, 3)]
    assert [(mark.uid, mark.epoch) for mark in Ledger(other, text).marks()] == [(other.uid, 9)]
