"""Rows in a spool are durable, whole, listed by their handle, and numbered once and for all."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest
from obstore.store import LocalStore

from epochal.errors import CorruptRecord, InvariantBroken, Misconfigured, PreparedLost, TryAgain
from epochal.kit.spool.committer import SpoolCommitter
from epochal.kit.spool.ledger import SpoolLedger
from epochal.kit.spool.rows import RowSpool, spool_url
from epochal.terms import (
    EpochNumber,
    Fingerprint,
    Generation,
    Identity,
    Mark,
    Proof,
    Receipt,
    Uid,
)

ME = Identity(pipeline="p", uid=Uid("aaaabbbbcccc"), sink="s", generation=Generation(1))
OTHER = Identity(pipeline="p", uid=Uid("ddddeeeeffff"), sink="s", generation=Generation(1), run="r")
SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.string())])
ZERO, ONE, TWO = (EpochNumber(number) for number in range(3))


@pytest.fixture(params=["local", "objects"])
def root(request, tmp_path, monkeypatch) -> str:
    """A folder, and the same folder behind the object store's client."""
    if request.param == "local":
        return str(tmp_path)
    client = LocalStore(tmp_path)
    monkeypatch.setattr("epochal.storage.objects.from_url", lambda url, **_: client)
    return "s3://bucket/spool"


@pytest.fixture
def spool(root) -> RowSpool:
    return RowSpool.at(root)


def batch(*numbers: int) -> pa.RecordBatch:
    return pa.record_batch(
        {"n": list(numbers), "text": [f"row {number}" for number in numbers]}, schema=SCHEMA
    )


def write(spool, handle, *batches):
    writer = spool.writer(handle, SCHEMA)
    for one in batches:
        writer.write(one)
    return writer.finish()


def test_rows_come_back_in_their_order_as_often_as_they_are_read(spool, root):
    handle = ME.handle(ZERO, partition=0, attempt=1)
    spooled = write(spool, handle, batch(3, 1), batch(2))
    assert spooled.rows == 3
    assert spooled.bytes > 0
    for again in (spool, RowSpool.at(root)):
        found = pa.Table.from_batches(again.read(handle, rows=3))
        assert found == pa.Table.from_batches([batch(3, 1), batch(2)])


def test_rows_that_are_still_written_are_not_there_yet(spool):
    handle = ME.handle(ZERO, partition=0, attempt=1)
    writer = spool.writer(handle, SCHEMA)
    writer.write(batch(1))
    assert not spool.has(handle)
    writer.finish()
    assert spool.has(handle)


def test_attempts_are_listed_by_uid_and_sink_and_can_be_removed(spool):
    mine = [ME.handle(ZERO, partition=0, attempt=attempt) for attempt in (1, 2)]
    theirs = OTHER.handle(ZERO, partition=0, attempt=1)
    written = [write(spool, handle, batch(1)) for handle in (*mine, theirs)]
    assert spool.size(ME.uid, ME.tag) == sum(one.bytes for one in written[:2]) > 0
    found = spool.listed(ME.uid, ME.tag)
    assert [one.handle for one in found] == mine
    assert all(one.age_s is not None and one.age_s < 60 for one in found)
    for _ in range(2):
        spool.remove(mine)
    assert spool.listed(ME.uid, ME.tag) == []
    assert spool.size(ME.uid, ME.tag) == 0
    assert [one.handle for one in spool.listed(OTHER.uid, OTHER.tag)] == [theirs]


def test_a_task_that_was_swept_while_it_wrote_fails(tmp_path):
    spool = RowSpool.at(str(tmp_path))
    handle = ME.handle(ZERO, partition=0, attempt=1)
    writer = spool.writer(handle, SCHEMA)
    writer.write(batch(1))
    assert [one.handle for one in spool.listed(ME.uid, ME.tag)] == [handle]
    spool.remove([handle])
    with pytest.raises(TryAgain):
        writer.finish()
    assert spool.listed(ME.uid, ME.tag) == []


def test_an_attempt_without_rows_leaves_no_file(spool):
    handle = ME.handle(ZERO, partition=0, attempt=1)
    assert write(spool, handle).rows == 0
    assert spool.listed(ME.uid, ME.tag) == []
    assert list(spool.read(handle, rows=0)) == []


def test_what_is_discarded_is_gone(spool):
    handle = ME.handle(ZERO, partition=0, attempt=1)
    writer = spool.writer(handle, SCHEMA)
    writer.write(batch(1))
    writer.discard()
    assert spool.listed(ME.uid, ME.tag) == []


def test_rows_that_are_gone_or_others_are_never_read_as_fewer(spool):
    handle = ME.handle(ZERO, partition=0, attempt=1)
    with pytest.raises(PreparedLost) as raised:
        spool.read(handle, rows=1)
    assert raised.value.handles == (str(handle),)
    write(spool, handle, batch(1, 2))
    with pytest.raises(InvariantBroken, match="holds 2 rows"):
        list(spool.read(handle, rows=3))


def test_memory_does_not_grow_with_the_number_of_batches(spool):
    handle = ME.handle(ZERO, partition=0, attempt=1)
    large = pa.record_batch({"n": [1], "text": [os.urandom(500_000).hex()]}, schema=SCHEMA)
    writer, before = spool.writer(handle, SCHEMA), pa.total_allocated_bytes()
    for _ in range(30):
        writer.write(large)
        assert pa.total_allocated_bytes() - before < 8_000_000
    assert writer.finish().bytes > 15_000_000
    assert sum(one.num_rows for one in spool.read(handle, rows=30)) == 30


def test_the_ledger_proves_the_newest_epoch_of_every_life(spool):
    mine, theirs = SpoolLedger(spool.store, ME), SpoolLedger(spool.store, OTHER)
    assert mine.newest() == []
    for epoch in (ZERO, ONE):
        mine.settle(epoch, frozenset({"h"}), {"rows": 1})
    theirs.settle(TWO, frozenset(), {})
    marks = {Mark(uid=ME.uid, epoch=ONE), Mark(uid=OTHER.uid, epoch=TWO, run="r")}
    assert set(mine.newest()) == marks
    mine.prune(EpochNumber(9))
    assert mine.find(ZERO) is None
    assert mine.find(ONE).handles == {"h"}
    assert set(theirs.newest()) == marks


def test_acknowledgements_of_several_drivers_add_up(spool):
    first, second = SpoolLedger(spool.store, ME), SpoolLedger(spool.store, ME)
    assert first.acknowledged(ZERO) is None
    first.acknowledge(ZERO, [])
    assert second.acknowledged(ZERO) == []
    first.acknowledge(ZERO, [[0, 1]])
    second.acknowledge(ZERO, [[2, 3]])
    first.acknowledge(ZERO, [[4, 5]])
    assert sorted(second.acknowledged(ZERO)) == [[0, 1], [2, 3], [4, 5]]
    second.forget_delivery(ZERO)
    assert first.acknowledged(ZERO) is None


def test_an_entry_that_somebody_else_wrote_is_an_error(spool):
    ledger = SpoolLedger(spool.store, ME)
    ledger.settle(ZERO, frozenset(), {})
    spool.store.put(f"ledger/s{ME.tag}/{ME.uid}/{0:020d}.json", b"{}")
    with pytest.raises(CorruptRecord):
        ledger.find(ZERO)


def test_a_spool_is_a_path_a_file_url_or_an_object_store():
    assert spool_url("X", "here") == str(Path("here").absolute())
    assert spool_url("X", "file:///a/b") == "/a/b"
    assert spool_url("X", "s3://bucket/folder") == "s3://bucket/folder"
    with pytest.raises(Misconfigured, match="names the machine"):
        spool_url("X", "file://host/a")
    with pytest.raises(Misconfigured, match="needs spool"):
        spool_url("X", None)


# Delivering


class Deliveries:
    """A target that takes batches, and can be told what happens on the way."""

    def __init__(self, spool: RowSpool) -> None:
        self._spool = spool
        self.taken: list[int] = []
        self.on_the_way = lambda: None

    def check(self, schema):
        return []

    def deliver(self, epoch, receipts):
        for receipt in receipts:
            self.on_the_way()
            for one in self._spool.read(receipt.handle, rows=receipt.rows):
                self.taken += one["n"].to_pylist()
        return {}

    def kept(self) -> str:
        return ""

    def close(self) -> None:
        """Nothing is open."""


def committer_of(spool: RowSpool) -> tuple[SpoolCommitter, Deliveries]:
    deliveries = Deliveries(spool)
    ledger = SpoolLedger(spool.store, ME)
    return SpoolCommitter(ME, spool, ledger, deliveries), deliveries


def receipt_of(spool: RowSpool, *numbers: int) -> Receipt:
    handle = ME.handle(ZERO, partition=0, attempt=1)
    spooled = write(spool, handle, batch(*numbers))
    return Receipt(handle=handle, fingerprint=Fingerprint(spooled.rows))


def test_rows_that_vanish_before_their_delivery_may_be_written_again(spool):
    committer, _ = committer_of(spool)
    receipt = receipt_of(spool, 1, 2)
    spool.remove([receipt.handle])
    with pytest.raises(PreparedLost):
        committer.commit(ZERO, [receipt])
    assert committer.outcome(ZERO, receipt) is Proof.ABORTED


def test_rows_that_vanish_on_the_way_are_never_written_again(spool):
    committer, deliveries = committer_of(spool)
    receipt = receipt_of(spool, 1, 2)
    deliveries.on_the_way = lambda: spool.remove([receipt.handle])
    for _ in range(2):
        with pytest.raises(InvariantBroken, match="delivery had begun") as raised:
            committer.commit(ZERO, [receipt])
        assert "give-up" in raised.value.hint
    assert committer.outcome(ZERO, receipt) is Proof.UNKNOWN


def test_a_driver_that_is_overtaken_on_the_way_finds_its_work_done(spool):
    slow, deliveries = committer_of(spool)
    quick, others = committer_of(spool)
    receipt = receipt_of(spool, 1, 2)
    deliveries.on_the_way = lambda: quick.commit(ZERO, [receipt])
    slow.commit(ZERO, [receipt])
    assert (deliveries.taken, others.taken) == ([], [1, 2])
    assert slow.outcome(ZERO, receipt) is Proof.COMMITTED
    assert slow.in_doubt() == []


def test_what_a_commit_left_after_its_proof_is_cleared_by_a_listing(spool):
    committer, _ = committer_of(spool)
    receipt = receipt_of(spool, 1)
    committer.commit(ZERO, [receipt])
    receipt_of(spool, 1)
    assert committer.in_doubt() == []
    assert not spool.has(receipt.handle)


def everything_in(store, folder="") -> list[str]:
    files = [f"{folder}/{name}" for name in store.names(folder)]
    below = [f"{folder}/{name}".lstrip("/") for name in store.folders(folder)]
    return files + [file for one in below for file in everything_in(store, one)]


def test_a_dropped_pipeline_leaves_nothing_of_its_own_and_all_of_others(spool):
    committer, deliveries = committer_of(spool)
    committer.commit(ZERO, [receipt_of(spool, 1, 2)])
    deliveries.on_the_way = lambda: 1 / 0
    undelivered = replace(receipt_of(spool, 3), handle=ME.handle(ONE, partition=0, attempt=2))
    write(spool, undelivered.handle, batch(3))
    with pytest.raises(ZeroDivisionError):
        committer.commit(ONE, [undelivered])
    SpoolLedger(spool.store, OTHER).settle(ZERO, frozenset(), {})
    shown = committer.drop(is_dry_run=True)
    assert shown.removed == [f"1 entry of the ledger in {spool.store.location}"]
    assert committer.newest() != []
    assert committer.drop(is_dry_run=False) == shown
    (left,) = everything_in(spool.store)
    assert OTHER.uid in left
    assert committer.drop(is_dry_run=False).removed == []
