"""Other writers, compaction, expiry, late drivers and lost answers, all on one table."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.schema import Schema
from pyiceberg.types import LongType, NestedField, StringType

from epochal.errors import OutcomeUnknown, PreparedLost, TryAgain
from epochal.sinks.iceberg import committer as committing
from epochal.sinks.iceberg import pyiceberg_private as private
from epochal.terms import EpochNumber, Proof, Receipt, Uid

E0, E1 = EpochNumber(0), EpochNumber(1)
send = private.send


class Killed(BaseException):
    """What a SIGKILL looks like from inside: nothing after it runs."""


def sweep(life: Any) -> None:
    for found in life.committer.in_doubt():
        receipt = Receipt(handle=found.handle, fingerprint=None)
        life.committer.abort(found.handle.epoch, [receipt])


def compact(table: Any, rows: pa.Table) -> None:
    """What rewrite_data_files does: the same rows in one other file, in one snapshot."""
    from pyiceberg.io.pyarrow import _dataframe_to_data_files

    old = [task.file for task in table.scan().plan_files()]
    with table.transaction() as change, change.update_snapshot().overwrite() as replace:
        for file in old:
            replace.delete_data_file(file)
        for file in _dataframe_to_data_files(table.metadata, rows, table.io):
            file.spec_id = 0
            replace.append_data_file(file)


def test_rows_are_there_once_beside_writers_a_compaction_and_an_expiry(
    warehouse, live, some, monkeypatch
):
    """Somebody else commits between our look at the table and our commit, every single time."""
    name = warehouse.create()
    theirs = live(warehouse.sink(name), uid=Uid("zzzzzzzz2345"))
    numbers = itertools.count(100)
    done = Counter[str]()

    def append() -> None:
        warehouse.load(name).append(some(next(numbers)))

    def another_pipeline() -> None:
        theirs.write(done["another_pipeline"], some(next(numbers)))

    def compaction() -> None:
        table = warehouse.load(name)
        compact(table, table.scan().to_arrow())

    def expiry() -> None:
        table = warehouse.load(name)
        heads = {ref.snapshot_id for ref in table.refs().values()}
        old = [one.snapshot_id for one in table.snapshots() if one.snapshot_id not in heads]
        table.maintenance.expire_snapshots().by_ids(old).commit()

    others = itertools.cycle([append, another_pipeline, compaction, expiry])

    def after_another(table: Any, change: Any) -> None:
        monkeypatch.setattr(private, "send", send)
        other = next(others)
        other()
        done[other.__name__] += 1
        send(table, change)

    life = live(warehouse.sink(name))
    for epoch in range(8):
        monkeypatch.setattr(private, "send", after_another)
        life.write(epoch, some(epoch), some(50 + epoch))
    assert done == {"append": 2, "another_pipeline": 2, "compaction": 2, "expiry": 2}
    assert warehouse.ids(name) == [*range(8), *range(50, 58), *range(100, 104)]
    assert not life.committer.in_doubt()


def test_writers_at_the_same_time_lose_and_double_nothing(warehouse, live, some):
    name = warehouse.create()
    lives = [live(warehouse.sink(name), uid=Uid(f"{letter * 8}2345")) for letter in "xyz"]

    def run(at: int) -> None:
        for epoch in range(4):
            receipt = lives[at].prepare(some(at * 100 + epoch), epoch)
            again(partial(lives[at].committer.commit, EpochNumber(epoch), [receipt]))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(run, range(3)))
    assert warehouse.ids(name) == [at * 100 + epoch for at in range(3) for epoch in range(4)]


def again(commit: Any) -> None:
    """What the coordinator does with a commit that must be retried."""
    for _ in range(20):
        try:
            return commit()
        except (TryAgain, OutcomeUnknown):
            time.sleep(0.05)
    return commit()


def test_a_driver_that_wakes_up_late_adds_nothing(warehouse, live, some, monkeypatch):
    name = warehouse.create()
    zombie = live(warehouse.sink(name))
    receipt = zombie.prepare(some(1, 2), 0)
    zombie.committer.rehearse(E0, [receipt])
    newer = live(zombie.sink, generation=2)

    def sleeping(table: Any, change: Any) -> None:
        monkeypatch.setattr(private, "send", send)
        newer.committer.commit(E0, [receipt])
        newer.write(1, some(3))
        send(table, change)

    monkeypatch.setattr(private, "send", sleeping)
    zombie.committer.commit(E0, [receipt])
    assert warehouse.ids(name) == [1, 2, 3]
    assert [mark.epoch for mark in newer.committer.newest()] == [1]


def test_an_empty_epoch_of_a_late_driver_sets_nothing_back(warehouse, live, some, monkeypatch):
    name = warehouse.create()
    zombie = live(warehouse.sink(name))
    zombie.write(0, some(1))
    zombie.committer.rehearse(E1, [])
    newer = live(zombie.sink, generation=2)

    def sleeping(table: Any, change: Any) -> None:
        monkeypatch.setattr(private, "send", send)
        newer.committer.commit(E1, [])
        newer.write(2)
        send(table, change)

    monkeypatch.setattr(private, "send", sleeping)
    zombie.committer.commit(E1, [])
    assert [mark.epoch for mark in newer.committer.newest()] == [2]
    newer.write(3, some(2))
    assert [mark.epoch for mark in newer.committer.newest()] == [3]
    assert warehouse.ids(name) == [1, 2]


def test_without_the_ledger_a_late_driver_would_double_rows(warehouse, live, some, monkeypatch):
    """The judge of the test above objects when the ledger is not asked."""
    name = warehouse.create()
    zombie = live(warehouse.sink(name))
    receipt = zombie.prepare(some(1, 2), 0)
    live(zombie.sink, generation=2).committer.commit(E0, [receipt])
    monkeypatch.setattr(committing.IcebergCommitter, "_is_committed", lambda *_: False)
    zombie.committer.commit(E0, [receipt])
    assert warehouse.ids(name) == [1, 1, 2, 2]


@pytest.mark.parametrize("is_done", [True, False], ids=["after", "before"])
def test_a_lost_answer_is_settled_by_proof(warehouse, live, some, monkeypatch, is_done):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    receipt = life.prepare(some(1), 0)
    life.committer.rehearse(E0, [receipt])

    def lost(table: Any, change: Any) -> None:
        monkeypatch.setattr(private, "send", send)
        if is_done:
            send(table, change)
        raise ConnectionResetError("no answer")

    monkeypatch.setattr(private, "send", lost)
    with pytest.raises(OutcomeUnknown):
        life.committer.commit(E0, [receipt])
    expected = Proof.COMMITTED if is_done else Proof.UNKNOWN
    assert life.committer.outcome(E0, receipt) is expected
    life.committer.commit(E0, [receipt])
    assert warehouse.ids(name) == [1]
    assert not warehouse.leftovers(name)


@pytest.mark.parametrize(
    ("mode", "is_done"),
    [("append", True), ("append", False), ("upsert", True), ("upsert", False)],
)
def test_a_driver_that_dies_in_the_commit_leaves_rows_once_and_nothing_else(  # noqa: PLR0917
    warehouse, live, some, monkeypatch, mode, is_done
):
    name = warehouse.create()
    options = {"mode": mode, "keys": "id"} if mode == "upsert" else {}
    life = live(warehouse.sink(name, **options))
    life.write(0, some(1, 2))
    receipt = life.prepare(some(3) if mode == "append" else some(2, 3, name="new"), 1)
    life.committer.rehearse(E1, [receipt])

    def dies(table: Any, change: Any) -> None:
        monkeypatch.setattr(private, "send", send)
        if is_done:
            send(table, change)
        raise Killed

    monkeypatch.setattr(private, "send", dies)
    with pytest.raises(Killed):
        life.committer.commit(E1, [receipt])
    later = live(life.sink, generation=2)
    later.committer.commit(E1, [receipt])
    sweep(later)
    assert warehouse.ids(name) == [1, 2, 3]
    assert not warehouse.leftovers(name)
    assert not later.committer.in_doubt()


def test_a_conflict_leaves_no_manifests(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    receipt = life.prepare(some(1), 0)
    life.committer.rehearse(E0, [receipt])
    warehouse.load(name).append(some(9))
    life.committer.commit(E0, [receipt])
    table = warehouse.load(name)
    used = {one.manifest_list for one in table.snapshots()}
    used |= {
        manifest.manifest_path for one in table.snapshots() for manifest in one.manifests(table.io)
    }
    folder = table.location() + "/metadata"
    from epochal.sinks.iceberg.table_files import TableFiles

    written = {where for where in TableFiles(table.io).below(folder) if where.endswith(".avro")}
    assert written == used
    assert warehouse.ids(name) == [1, 9]


@pytest.mark.parametrize("mode", ["append", "upsert"])
def test_a_commit_that_is_refused_because_of_its_own_first_request_keeps_its_files(
    warehouse, live, some, monkeypatch, mode
):
    """A client that repeats requests, as Glue's does, gets a conflict with its own first one."""
    name = warehouse.create()
    options = {"mode": mode, "keys": "id"} if mode == "upsert" else {}
    life = live(warehouse.sink(name, **options))
    life.write(0, some(1, 2))

    def twice(table: Any, change: Any) -> None:
        monkeypatch.setattr(private, "send", send)
        send(table, change)
        raise CommitFailedException("Requirement failed: branch main has changed")

    monkeypatch.setattr(private, "send", twice)
    life.write(1, some(3) if mode == "append" else some(2, 3))
    assert warehouse.ids(name) == [1, 2, 3]
    sweep(life)
    assert not warehouse.leftovers(name)
    assert not life.committer.in_doubt()


def recreated(warehouse: Any, name: str) -> None:
    """Under the same name, with the same columns under each other's numbers."""
    warehouse.catalog.drop_table(name)
    turned = Schema(NestedField(1, "name", StringType()), NestedField(2, "id", LongType()))
    warehouse.catalog.create_table(name, schema=turned)


def test_files_of_a_table_that_was_dropped_are_written_again_for_the_new_one(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    receipt = life.prepare(some(2), 0)
    recreated(warehouse, name)
    with pytest.raises(TryAgain, match="written for a table that was dropped"):
        life.rehearse(0, [receipt])
    life.committer.abort(E0, [receipt])
    life.write(0, some(2))
    assert warehouse.rows(name) == [{"name": "row 2", "id": 2}]
    assert not warehouse.leftovers(name)


def test_rows_for_a_table_dropped_after_the_decision_are_reported_as_lost(
    warehouse, live, some, monkeypatch
):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    receipt = life.prepare(some(1), 0)
    life.rehearse(0, [receipt])

    def overtaken(table: Any, change: Any) -> None:
        monkeypatch.setattr(private, "send", send)
        recreated(warehouse, name)
        send(table, change)

    monkeypatch.setattr(private, "send", overtaken)
    with pytest.raises(PreparedLost) as caught:
        life.commit(0, [receipt])
    assert caught.value.handles == (str(receipt.handle),)
    life.commit(0, [life.prepare(some(1), 0)])
    assert warehouse.rows(name) == [{"name": "row 1", "id": 1}]


def test_pyiceberg_is_the_release_whose_private_parts_are_used():
    import inspect

    import pyiceberg
    from pyiceberg.table import Table, Transaction
    from pyiceberg.table.update.snapshot import _FastAppendFiles, _OverwriteFiles

    assert pyiceberg.__version__.startswith(private.RELEASE)
    assert list(inspect.signature(Table._do_commit).parameters) == [
        "self",
        "updates",
        "requirements",
    ]
    for kind in (_FastAppendFiles, _OverwriteFiles):
        for part in ("_commit", "_existing_manifests", "_deleted_entries", "new_manifest_writer"):
            assert callable(getattr(kind, part))
    assert isinstance(Transaction.table_metadata, property)


def test_a_full_disk_is_reported_with_path_and_hint_and_may_be_tried_again(warehouse, live, some):
    name = warehouse.create()
    writer = live(warehouse.sink(name)).writer(some(1).schema, 0)
    data = Path(warehouse.load(name).location().removeprefix("file://")) / "data"
    folder = data / "epochal" / str(writer._task.handle)
    folder.mkdir(parents=True)
    (folder / "00000.parquet").symlink_to("/dev/full")
    writer.write(some(*range(1000)).to_batches()[0])
    with pytest.raises(TryAgain, match="No space left") as caught:
        writer.prepare()
    assert str(folder) in caught.value.message
    assert "free some space" in caught.value.hint
