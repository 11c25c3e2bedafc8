"""Append, upsert, overwrite of partitions, and what an epoch leaves in the table's history."""

from __future__ import annotations

import json
from uuid import UUID

import pyarrow as pa
import pytest
from pyiceberg.partitioning import PartitionField, PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import DataScan
from pyiceberg.transforms import IdentityTransform, TruncateTransform
from pyiceberg.types import LongType, NestedField, UUIDType

from epochal.contract import Begin
from epochal.errors import Misconfigured, PreparedLost, Refused, RowRejected, TryAgain
from epochal.sinks.iceberg import Iceberg
from epochal.terms import EpochNumber, Proof, Uid

E0, E1 = EpochNumber(0), EpochNumber(1)


def ledger(warehouse, name: str) -> dict[str, dict]:
    return {
        key: json.loads(value)
        for key, value in warehouse.load(name).properties.items()
        if key.startswith("epochal.")
    }


def test_an_epoch_of_many_tasks_is_one_snapshot_that_names_it(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.write(7, some(1, 2), some(3), some(4, 5))
    (summary,) = warehouse.history(name)
    assert summary["epochal.epoch"] == "7"
    assert summary["epochal.uid"] == life.uid
    assert summary["added-data-files"] == "3"
    assert summary["added-records"] == "5"
    assert warehouse.ids(name) == [1, 2, 3, 4, 5]


def test_an_empty_epoch_is_proven_without_a_snapshot(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.write(0, some(1))
    life.write(1)
    life.write(2, some())
    assert len(warehouse.history(name)) == 1
    assert [mark.epoch for mark in life.committer.newest()] == [2]


def test_the_ledger_does_not_grow(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    for epoch in range(5):
        life.write(epoch, some(epoch))
    assert [key.rsplit(".", 1)[-1] for key in sorted(ledger(warehouse, name))] == ["3", "4"]


def test_many_runs_leave_few_properties_and_each_is_still_proven(warehouse, live, some):
    name = warehouse.create()
    first = live(warehouse.sink(name))
    first.write(0, some(0))
    uids = [Uid(letter * 12) for letter in "abcdefghijklmnopqrstuvwxy"]
    runs = {uid: f"backfill-{at}" for at, uid in enumerate(uids)}
    receipts = {}
    for at, (uid, run) in enumerate(runs.items()):
        receipts[uid] = live(warehouse.sink(name), uid=uid, run=run).write(0, some(at + 1))
    assert len(ledger(warehouse, name)) <= 10
    marks = first.committer.newest()
    assert {mark.uid: mark.run for mark in marks} == {**runs, first.uid: None}
    loader = live(warehouse.sink(name), uid=uids[3], run=runs[uids[3]])
    loader.commit(0, receipts[uids[3]])
    assert loader.committer.outcome(E0, receipts[uids[3]][0]) is Proof.COMMITTED
    assert warehouse.ids(name) == list(range(26))
    loader.committer.drop(is_dry_run=False)
    assert uids[3] not in {mark.uid for mark in first.committer.newest()}
    assert len(first.committer.newest()) == 25
    first.write(1, some(200))
    assert [mark.epoch for mark in first.committer.newest() if mark.uid == first.uid] == [1]


def test_a_thousand_winners_fit_into_one_short_property(warehouse, live):
    from epochal.sinks.iceberg.ledger import Ledger

    identity = live(warehouse.sink(warehouse.create())).identity
    handles = [identity.handle(E0, partition=at, attempt=500 + at) for at in range(1000)]
    straggler = identity.handle(E0, partition=1000, attempt=7)
    written = Ledger(identity, {}).written(E0, [*handles, straggler], None)
    ((_, value),) = written.items()
    assert len(value) < 200
    entry = Ledger(identity, written).find(E0)
    assert entry is not None
    assert all(entry.names(handle) for handle in [*handles, straggler])
    assert not entry.names(identity.handle(E0, partition=3, attempt=1))


def test_the_proof_outlives_expired_snapshots_and_a_compaction(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    (receipt,) = life.write(0, some(1, 2))
    table = warehouse.load(name)
    table.overwrite(table.scan().to_arrow())
    table = warehouse.load(name)
    keep = table.current_snapshot().snapshot_id
    old = [one.snapshot_id for one in table.snapshots() if one.snapshot_id != keep]
    table.maintenance.expire_snapshots().by_ids(old).commit()
    again = life.fresh()
    again.committer.commit(E0, [receipt])
    assert again.committer.outcome(E0, receipt) is Proof.COMMITTED
    again.close()
    assert warehouse.ids(name) == [1, 2]


def test_upsert_replaces_rows_of_the_same_key_in_one_snapshot(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name, mode="upsert", keys="id"))
    life.write(0, some(1, 2, 3), some(10, 11))
    life.write(1, some(2, 4, name="new"))
    assert len(warehouse.history(name)) == 2
    assert {row["id"]: row["name"] for row in warehouse.rows(name)} == {
        1: "row 1",
        2: "new 2",
        3: "row 3",
        4: "new 4",
        10: "row 10",
        11: "row 11",
    }
    assert warehouse.history(name)[1]["deleted-data-files"] == "1", "a file was rewritten in vain"
    assert not warehouse.leftovers(name)
    assert not life.committer.in_doubt()


def test_of_several_rows_of_one_key_the_highest_wins(warehouse, live):
    name = warehouse.create()
    life = live(warehouse.sink(name, mode="upsert", keys=["id"], order_by="name"))
    first = pa.table({"id": [1, 1, 2], "name": ["b", "a", "x"]})
    life.write(0, first, pa.table({"id": [1, 3], "name": ["aa", None]}))
    assert sorted((row["id"], row["name"]) for row in warehouse.rows(name)) == [
        (1, "b"),
        (2, "x"),
        (3, None),
    ]
    life.committer.in_doubt()
    assert life.committer.outcome(E0, life.write(1, first)[0]) is not Proof.ABORTED


def test_uuids_are_keys_too(warehouse, live):
    schema = Schema(NestedField(1, "id", UUIDType()), NestedField(2, "n", LongType()))
    name = warehouse.create(schema)
    life = live(warehouse.sink(name, mode="upsert", keys="id", order_by="n"))
    one, two, three = (str(UUID(int=number)) for number in (1, 2**127, 3))
    life.write(0, pa.table({"id": [one, two], "n": [1, 2]}))
    life.write(1, pa.table({"id": [two, three, two], "n": [30, 3, 20]}))
    rows = {str(row["id"]): row["n"] for row in warehouse.rows(name)}
    assert rows == {one: 1, two: 30, three: 3}


def test_equality_deletes_of_others_stop_an_upsert_with_the_way_out(
    warehouse, live, some, monkeypatch
):
    name = warehouse.create()
    life = live(warehouse.sink(name, mode="upsert", keys="id"))
    life.write(0, some(1))

    def refused(*_):
        raise ValueError("PyIceberg does not yet support equality deletes: https://…")

    monkeypatch.setattr(DataScan, "plan_files", refused)
    with pytest.raises(Misconfigured, match="equality deletes") as stopped:
        life.write(1, some(1))
    assert "rewrite_data_files" in stopped.value.hint


def test_upsert_refuses_what_it_could_not_decide(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name, mode="upsert", keys="id"))
    with pytest.raises(RowRejected, match="several rows of one id"):
        life.write(0, some(1), some(1))
    with pytest.raises(RowRejected, match="1 row with a null in id"):
        life.write(0, pa.table({"id": pa.array([1, None], pa.int64()), "name": ["a", "b"]}))
    assert warehouse.rows(name) == []


def test_an_upsert_that_meets_another_writer_is_computed_anew(warehouse, live, some, monkeypatch):
    name = warehouse.create()
    life = live(warehouse.sink(name, mode="upsert", keys="id"))
    life.write(0, some(1))
    receipt = life.prepare(some(1, 2, name="new"), 1)
    life.committer.rehearse(E1, [receipt])
    warehouse.load(name).append(some(2, 5, name="theirs"))
    life.committer.commit(E1, [receipt])
    assert {row["id"]: row["name"] for row in warehouse.rows(name)} == {
        1: "new 1",
        2: "new 2",
        5: "theirs 5",
    }
    assert not warehouse.leftovers(name)


def by_name(width: int = 1) -> PartitionSpec:
    return PartitionSpec(PartitionField(2, 1000, TruncateTransform(width), "first"))


def test_partitions_of_an_epoch_replace_those_of_the_table(warehouse, live):
    name = warehouse.create(spec=by_name())
    life = live(warehouse.sink(name, mode="overwrite_partitions"))
    life.write(0, pa.table({"id": [1, 2, 3], "name": ["a", "b", "c"]}))
    life.write(
        1, pa.table({"id": [4, 5], "name": ["ax", "ay"]}), pa.table({"id": [6], "name": ["d"]})
    )
    assert warehouse.ids(name) == [2, 3, 4, 5, 6]
    life.write(2)
    assert warehouse.ids(name) == [2, 3, 4, 5, 6], "an empty epoch replaces nothing"


def test_a_table_without_partitions_is_replaced_whole(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name, mode="overwrite_partitions"))
    life.write(0, some(1, 2))
    life.write(1, some(3))
    assert warehouse.ids(name) == [3]


def test_files_of_an_older_partition_spec_are_committed_all_the_same(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    receipt = life.prepare(some(1, 2), 0)
    life.committer.rehearse(E0, [receipt])
    with warehouse.load(name).update_spec() as update:
        update.add_field("name", IdentityTransform(), "by_name")
    life.committer.commit(E0, [receipt])
    life.fresh().write(1, some(3))
    assert warehouse.ids(name) == [1, 2, 3]


def test_a_gate_reads_the_epoch_on_a_branch_that_is_gone_afterwards(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name, audit_branch="audit"))
    life.write(0, some(1))
    receipt = life.prepare(some(2, 3), 1)
    life.committer.rehearse(E1, [receipt])
    on_branch = warehouse.load(name).scan().use_ref("audit").to_arrow()
    assert sorted(on_branch.column("id").to_pylist()) == [1, 2, 3]
    assert warehouse.ids(name) == [1], "readers of main see an undecided epoch (I1)"
    life.committer.commit(E1, [receipt])
    assert warehouse.ids(name) == [1, 2, 3]
    assert set(warehouse.load(name).refs()) == {"main"}
    assert len(warehouse.history(name)) == 2


@pytest.mark.parametrize("ends", ["abort", "killed"])
def test_an_audited_epoch_that_is_refused_leaves_no_branch(warehouse, live, some, ends):
    name = warehouse.create()
    life = live(warehouse.sink(name, audit_branch="audit"))
    life.write(0, some(1))
    receipt = life.prepare(some(2), 1)
    life.committer.rehearse(E1, [receipt])
    if ends == "abort":
        life.committer.abort(E1, [receipt])
    else:
        later = live(life.sink, generation=2)
        later.committer.begin(Begin(epoch=E1))
        later.committer.abort(E1, [receipt])
    assert set(warehouse.load(name).refs()) == {"main"}
    assert warehouse.ids(name) == [1]
    assert not warehouse.leftovers(name)


def test_a_branch_of_somebody_else_is_not_taken_for_the_audit(warehouse, live, some):
    name = warehouse.create()
    table = warehouse.load(name)
    table.append(some(1))
    table.manage_snapshots().create_branch(table.current_snapshot().snapshot_id, "audit").commit()
    life = live(warehouse.sink(name, audit_branch="audit"))
    with pytest.raises(Misconfigured, match="branch audit is not one that this sink made"):
        life.committer.begin(Begin(epoch=E0))


def test_a_branch_is_written_and_main_stays(warehouse, live, some):
    name = warehouse.create()
    table = warehouse.load(name)
    table.append(some(1))
    sink = warehouse.sink(name, branch="nightly")
    with pytest.raises(Misconfigured, match="has no branch 'nightly'"):
        live(sink).committer.check(None)
    table.manage_snapshots().create_branch(table.current_snapshot().snapshot_id, "nightly").commit()
    live(sink).write(0, some(2))
    assert warehouse.ids(name) == [1]
    on_branch = warehouse.load(name).scan().use_ref("nightly").to_arrow()
    assert sorted(on_branch.column("id").to_pylist()) == [1, 2]


@pytest.mark.parametrize("option", ["branch", "audit_branch"])
def test_a_tag_is_not_taken_for_a_branch(warehouse, live, some, option):
    name = warehouse.create()
    live(warehouse.sink(name)).write(0, some(1))
    table = warehouse.load(name)
    table.manage_snapshots().create_tag(table.current_snapshot().snapshot_id, "release").commit()
    with pytest.raises(Misconfigured, match="'release' is a tag"):
        live(warehouse.sink(name, **{option: "release"})).start(some(2))


def test_own_old_snapshots_are_expired_and_others_stay(warehouse, live, some):
    name = warehouse.create()
    warehouse.load(name).append(some(100))
    life = live(warehouse.sink(name, snapshots_kept=2))
    for epoch in range(6):
        life.write(epoch, some(epoch))
    table = warehouse.load(name)
    kept = [one.summary.additional_properties.get("epochal.epoch") for one in table.snapshots()]
    assert kept == [None, "4", "5"]
    assert warehouse.ids(name) == [0, 1, 2, 3, 4, 5, 100]
    folder = table.location().removeprefix("file://")
    import pathlib

    lists = list(pathlib.Path(folder, "metadata").glob("snap-*.avro"))
    assert len(lists) == 3, "manifest lists of expired snapshots are left"


def test_rows_are_counted_from_the_files_that_readers_see(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    assert life.committer.recount().rows == 0
    life.write(0, some(1, 2), some(3))
    life.write(1, some(4))
    counted = life.committer.recount()
    assert (counted.rows, counted.epochs, counted.is_alone) == (4, {0: 3, 1: 1}, True)
    warehouse.load(name).append(some(9))
    counted = life.committer.recount()
    assert (counted.rows, counted.epochs, counted.is_alone) == (5, None, False)
    (lost, *_) = [task.file.file_path for task in warehouse.load(name).scan().plan_files()]
    warehouse.load(name).io.delete(lost)
    assert life.committer.recount().faults == [f"{lost} is in the table and not there"]


def test_a_table_whose_rows_are_replaced_is_not_counted(warehouse, live, some):
    life = live(warehouse.sink(warehouse.create(), mode="upsert", keys="id"))
    life.write(0, some(1, 2))
    life.write(1, some(1))
    counted = life.committer.recount()
    assert counted.rows is None
    assert "replaces rows" in counted.because


def test_a_dropped_pipeline_leaves_rows_and_no_property(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.write(0, some(1))
    (key,) = ledger(warehouse, name)
    assert life.committer.drop(is_dry_run=True).removed == [f"property {key} of lake.{name}"]
    assert list(ledger(warehouse, name)) == [key]
    life.committer.drop(is_dry_run=False)
    assert not ledger(warehouse, name)
    assert life.committer.drop(is_dry_run=False).removed == []
    assert warehouse.ids(name) == [1]


def test_a_driver_behind_a_newer_one_is_refused_before_it_decides(warehouse, live, some):
    name = warehouse.create()
    old = live(warehouse.sink(name))
    receipt = old.prepare(some(1), 0)
    live(old.sink, generation=2).write(0, some(1))
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        old.committer.rehearse(E0, [receipt])


def test_a_log_that_is_older_than_the_table_is_refused(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    life.write(0, some(1))
    receipt = life.prepare(some(1), 0)
    with pytest.raises(Refused, match="not under the handles that this log has for it"):
        life.committer.rehearse(E0, [receipt])


def test_files_that_somebody_removed_are_missed_before_and_after_the_decision(
    warehouse, live, some
):
    name = warehouse.create()
    life = live(warehouse.sink(name))
    receipt = life.prepare(some(1), 0)
    table = warehouse.load(name)
    table.io.delete(f"{receipt.token['folder']}/{receipt.token['files'][0]['name']}")
    with pytest.raises(TryAgain, match="no decision was made"):
        life.committer.rehearse(E0, [receipt])
    with pytest.raises(PreparedLost, match="files of 1 of 1 receipts"):
        life.committer.commit(E0, [receipt])


def test_an_attempt_that_is_aborted_while_it_writes_leaves_nothing(warehouse, live, some):
    name = warehouse.create()
    life = live(warehouse.sink(name, buffer_bytes_max=2))
    writer = life.writer(some(1).schema, 0)
    for batch in some(1, 2).to_batches():
        writer.write(batch)
    writer._wait()
    (found,) = life.committer.in_doubt()
    from epochal.terms import NO_ROWS, Receipt

    life.committer.abort(E0, [Receipt(handle=found.handle, fingerprint=NO_ROWS)])
    with pytest.raises(TryAgain, match="was aborted while it was still writing"):
        writer.prepare()
    writer.abort()
    assert not warehouse.leftovers(name)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "merge"}, "mode='merge'"),
        ({"mode": "upsert"}, "without keys"),
        ({"keys": "id"}, "looks at no key"),
        ({"audit_branch": "main"}, "where readers are"),
        ({"snapshots_kept": 0}, "snapshots_kept=0"),
        ({"properties": {"uri": 5}}, "is int"),
    ],
)
def test_options_that_mean_nothing_are_refused(options, message):
    with pytest.raises(Misconfigured, match=message):
        Iceberg("lake.shop.orders", **options)


def test_a_table_is_named_in_one_part_or_in_two():
    assert str(Iceberg("lake.shop.orders").address) == "lake.shop.orders"
    assert str(Iceberg("lake", "shop.orders").address) == "lake.shop.orders"
    assert Iceberg(catalog="lake", table="a.b.orders").name == "iceberg:lake.a.b.orders"
    with pytest.raises(Misconfigured, match="does not name a table"):
        Iceberg("lake.orders")


def test_a_table_that_does_not_exist_is_reported(warehouse, live):
    with pytest.raises(Misconfigured, match=r"shop\.nothing"):
        live(warehouse.sink("shop.nothing")).committer.check(None)
