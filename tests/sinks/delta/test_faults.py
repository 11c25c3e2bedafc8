"""Other writers, compaction, VACUUM, late drivers, lost replies, lost files, a reset checkpoint."""

from __future__ import annotations

import threading
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from sinks.delta.conftest import ORDERS
from sinks.life import UID, Life

from epochal.coordinator import Coordinator
from epochal.errors import Misconfigured, OutcomeUnknown, PreparedLost, Refused, TryAgain
from epochal.logs import MemoryLog
from epochal.protocol.admission import Start
from epochal.sinks.delta import Delta
from epochal.sinks.delta.committer import DeltaCommitter
from epochal.sinks.delta.ledger import Ledger, Uids, ledger_id, letters_of, number_of
from epochal.terms import EpochNumber, Handle, Proof, Uid

OTHER = Uid("zzzz7777zzzz")


def table(lake) -> DeltaTable:
    return DeltaTable(str(lake.folder))


def test_a_driver_that_has_passed_the_check_is_stopped_by_the_commit_of_another(
    orders, some, monkeypatch
):
    zombie, heir = orders.life(), orders.life().fresh(generation=2)
    receipts = [zombie.prepare(some(1, 2), 0)]
    real = DeltaCommitter._write

    def overtaken(self, handle, epoch, named):
        monkeypatch.setattr(DeltaCommitter, "_write", real)
        heir.commit(0, receipts)
        # What makes a blind repeat visible: the epoch's files are no longer in the table.
        table(orders).optimize.compact()
        real(self, handle, epoch, named)

    monkeypatch.setattr(DeltaCommitter, "_write", overtaken)
    zombie.commit(0, receipts)
    assert orders.ids() == [1, 2]
    assert zombie.committer.outcome(EpochNumber(0), receipts[0]) is Proof.COMMITTED


def test_a_repeat_after_compaction_would_double_rows_if_the_ledger_were_not_asked(
    orders, some, monkeypatch
):
    life = orders.life()
    write_deltalake(str(orders.folder), some(9), mode="append")
    receipts = life.write(0, some(1, 2))
    table(orders).optimize.compact()
    life.commit(0, receipts)
    assert orders.ids() == [1, 2, 9]
    monkeypatch.setattr(Ledger, "is_done", lambda *_: False)
    life.commit(0, receipts)
    assert orders.ids() == [1, 1, 2, 2, 9]


def test_other_writers_and_compaction_beside_the_pipeline_lose_and_repeat_nothing(orders, some):
    life, stop, errors = orders.life(), threading.Event(), []

    def beside(work) -> threading.Thread:
        def run() -> None:
            number = 0
            while not stop.is_set():
                try:
                    work(number)
                    number += 1
                except Exception as error:  # noqa: BLE001
                    errors.append(error)
            written.append(number)

        thread = threading.Thread(target=run)
        thread.start()
        return thread

    written: list[int] = []
    writer = beside(lambda n: write_deltalake(str(orders.folder), some(1000 + n), mode="append"))
    optimizer = beside(lambda _: table(orders).optimize.compact())
    for epoch in range(12):
        life.write(epoch, some(epoch * 2), some(epoch * 2 + 1))
    stop.set()
    writer.join()
    optimizer.join()
    assert all(written), f"nobody worked beside the pipeline: {errors}"
    ids = orders.ids()
    assert [one for one in ids if one < 1000] == list(range(24))
    assert len(ids) == len(set(ids))
    assert orders.leftovers() == []


def test_a_merge_beside_another_writer_is_done_again_on_the_newer_version(
    orders, some, monkeypatch
):
    life = orders.life(mode="merge", keys=["id"])
    life.write(0, some(1, 2))
    receipts = [life.prepare(some(1, 3, name="new"), 1)]
    real = DeltaCommitter._write

    def overtaken(self, handle, epoch, named):
        monkeypatch.setattr(DeltaCommitter, "_write", real)
        write_deltalake(str(orders.folder), some(3, name="theirs"), mode="append")
        real(self, handle, epoch, named)

    monkeypatch.setattr(DeltaCommitter, "_write", overtaken)
    life.commit(1, receipts)
    assert orders.rows() == [(1, "new1"), (2, "n2"), (3, "new3")]


def test_a_reply_that_was_lost_is_looked_for_and_not_written_again(orders, some, monkeypatch):
    life = orders.life()
    receipts = [life.prepare(some(1), 0)]
    real = DeltaCommitter._write

    def lost(self, *args):
        real(self, *args)
        raise TryAgain("the connection was reset")

    monkeypatch.setattr(DeltaCommitter, "_write", lost)
    life.commit(0, receipts)
    assert orders.ids() == [1]
    assert table(orders).version() == 1


def test_a_table_that_never_answers_leaves_the_outcome_unknown(orders, some, monkeypatch):
    life = orders.life()
    receipts = [life.prepare(some(1), 0)]

    def broken(*_):
        raise TryAgain("503 slow down")

    monkeypatch.setattr(DeltaCommitter, "_write", broken)
    with pytest.raises(OutcomeUnknown, match="503 slow down"):
        life.commit(0, receipts)
    assert life.committer.outcome(EpochNumber(0), receipts[0]) is Proof.UNKNOWN


def test_files_that_vacuum_took_are_reported_as_lost_and_not_committed(orders, some):
    life = orders.life()
    kept, lost = life.prepare(some(1), 0, 0), life.prepare(some(2), 0, 1)
    path = lost.token["files"][0]["path"]
    (orders.folder / path).unlink()
    with pytest.raises(TryAgain, match="no decision was made"):
        life.rehearse(0, [kept, lost])
    with pytest.raises(PreparedLost) as caught:
        life.commit(0, [kept, lost])
    assert caught.value.handles == (str(lost.handle),)
    assert orders.ids() == []
    life.commit(0, [kept, life.prepare(some(2), 0, 1)])
    assert orders.ids() == [1, 2]


def partitioned_anew(orders, some) -> None:
    write_deltalake(
        str(orders.folder),
        some(5),
        mode="overwrite",
        schema_mode="overwrite",
        partition_by=["name"],
    )


def test_rows_for_a_table_that_was_partitioned_anew_are_written_again(orders, some):
    life = orders.life()
    life.write(0, some(1))
    partitioned_anew(orders, some)
    receipts = [life.prepare(some(2), 1)]
    with pytest.raises(TryAgain, match="of other partitions than the table has now"):
        life.rehearse(1, receipts)
    life.committer.abort(EpochNumber(1), receipts)
    life.write(1, some(2))
    assert orders.rows() == [(2, "n2"), (5, "n5")]
    assert orders.leftovers() == []


def test_rows_for_a_table_partitioned_anew_after_the_decision_are_reported_as_lost(orders, some):
    life = orders.life()
    life.write(0, some(1))
    receipts = [life.prepare(some(2), 1)]
    life.rehearse(1, receipts)
    partitioned_anew(orders, some)
    with pytest.raises(PreparedLost) as caught:
        life.commit(1, receipts)
    assert caught.value.handles == (str(receipts[0].handle),)
    life.commit(1, [life.prepare(some(2), 1)])
    assert orders.rows() == [(2, "n2"), (5, "n5")]


def test_columns_that_were_widened_while_rows_were_written_are_written_again(lake):
    narrow = pa.schema([("n", pa.int32())])
    lake.made(narrow)
    life = lake.life()
    life.write(0, pa.table({"n": [1]}, schema=narrow))
    receipts = [life.prepare(pa.table({"n": [2]}, schema=narrow), 1)]
    wide = pa.table({"n": pa.array([5], pa.int64())})
    write_deltalake(str(lake.folder), wide, mode="overwrite", schema_mode="overwrite")
    with pytest.raises(TryAgain, match="of other columns than the table has now"):
        life.rehearse(1, receipts)
    life.committer.abort(EpochNumber(1), receipts)
    life.write(1, pa.table({"n": [2]}, schema=narrow))
    assert lake.rows() == [(2,), (5,)]
    assert lake.leftovers() == []


def test_a_column_that_was_dropped_meanwhile_is_added_again_where_that_is_wanted(orders, some):
    wide = some(1).append_column("extra", pa.array([1.5]))
    life = orders.life(evolve="add_columns")
    life.write(0, wide)
    write_deltalake(str(orders.folder), some(5), mode="overwrite", schema_mode="overwrite")
    receipts = [life.prepare(wide, 1)]
    with pytest.raises(TryAgain, match="its columns were changed"):
        life.rehearse(1, receipts)
    life.committer.abort(EpochNumber(1), receipts)
    life.write(1, wide)
    assert orders.rows() == [(1, "n1", 1.5), (5, "n5", None)]


def test_vacuum_keeps_what_is_prepared_within_its_retention(orders, some):
    life = orders.life(mode="merge", keys="id", name="merges")
    other = orders.life(name="appends")
    prepared = [life.prepare(some(1), 0)]
    appended = [other.prepare(some(2), 0)]
    table(orders).vacuum(retention_hours=168, dry_run=False, full=True)
    life.commit(0, prepared)
    other.commit(0, appended)
    assert orders.ids() == [1, 2]
    assert orders.leftovers() == []


def test_a_killed_task_in_a_partitioned_table_leaves_nothing_once_swept(lake, some):
    lake.made(ORDERS, partition_by=["name"])
    life = lake.life()
    life.write(0, some(1))
    handle = life.identity.handle(EpochNumber(1), partition=0, attempt=77)
    folder = lake.folder / "name=n5"
    folder.mkdir()
    (folder / f"{handle}-00000.snappy.parquet").write_bytes(b"half a file")
    life.sink.table_files().markers.put(handle)
    (found,) = life.committer.in_doubt()
    assert found.handle == handle
    receipt = life.prepare(some(5), 1)
    life.committer.abort(
        EpochNumber(1), [receipt.__class__(handle=handle, fingerprint=receipt.fingerprint)]
    )
    life.commit(1, [receipt])
    assert lake.ids() == [1, 5]
    assert lake.leftovers() == []


def test_a_winner_whose_marker_was_left_is_not_removed_even_after_compaction(orders, some):
    life = orders.life()
    (receipt,) = life.write(0, some(1))
    write_deltalake(str(orders.folder), some(2), mode="append")
    for _ in range(2):
        life.sink.table_files().markers.put(receipt.handle)
        life.committer.abort(EpochNumber(0), [receipt])
        path = orders.folder / receipt.token["files"][0]["path"]
        assert path.exists(), "an abort removed a file of the table"
        table(orders).optimize.compact()
    assert orders.ids() == [1, 2]
    assert orders.leftovers() == [], "the marker of a winner stays for ever"


def test_a_path_that_is_not_ours_is_never_removed(orders, some):
    life = orders.life()
    (theirs,) = life.write(0, some(1))
    receipt = life.prepare(some(2), 1)
    receipt.token["files"][0]["path"] = theirs.token["files"][0]["path"]
    with pytest.raises(Exception, match="no writer of ours"):
        life.committer.abort(EpochNumber(1), [receipt])
    assert orders.ids() == [1]


def test_a_reset_checkpoint_is_refused_also_after_log_cleanup(orders, some):
    first = orders.life()
    for epoch in range(3):
        first.write(epoch, some(epoch))
    handle = table(orders)
    handle.create_checkpoint()
    for version in range(handle.version()):
        (orders.folder / "_delta_log" / f"{version:020d}.json").unlink()
    assert [(mark.uid, mark.epoch) for mark in first.committer.newest()] == [(UID, 2)]
    coordinator = Coordinator(log=MemoryLog(), sinks=[first.sink])
    start = Start(pipeline="orders", location="a new checkpoint", sinks={first.sink.name: {}})
    with pytest.raises(Refused, match="already holds pipeline 'orders' up to epoch 2"):
        coordinator.start(start, {first.sink.name: ORDERS})
    again = first.fresh(uid=OTHER, run="again")
    again.write(0, some(9))
    found = {(mark.uid, mark.epoch, mark.run) for mark in first.committer.newest()}
    assert found == {(UID, 2, None), (OTHER, 0, "again")}


def test_checkpoints_of_the_log_are_written_when_they_are_due(lake, some):
    lake.made(ORDERS, configuration={"delta.checkpointInterval": "5"})
    life = lake.life()
    for epoch in range(11):
        life.write(epoch, some(epoch))
    written = {path.name[:20] for path in (lake.folder / "_delta_log").glob("*.checkpoint.parquet")}
    assert len(written) == 2
    assert lake.ids() == list(range(11))


def test_an_epoch_that_the_table_has_already_is_refused_before_the_decision(orders, some):
    old, new = orders.life(), orders.life().fresh(generation=5)
    receipt = new.write(3, some(1))
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        old.rehearse(3, [old.prepare(some(1), 3)])
    with pytest.raises(Refused, match="or the log was restored"):
        new.rehearse(3, receipt)


@pytest.mark.parametrize("run", [None, "", "a", "1234567", "2026-10-reprocess ü世界"])
def test_uids_and_runs_are_found_again_in_nothing_but_numbers(run):
    log: dict[str, int] = {}
    for number, uid in enumerate((UID, OTHER)):
        identity = _identity(uid, run)
        log |= Uids(identity).to_write(log.get, EpochNumber(number))
        log |= Uids(identity).to_write(log.get, EpochNumber(number + 10))
    marks = Uids(_identity(UID, None)).newest(log.get)
    assert [(mark.uid, mark.epoch, mark.run) for mark in marks] == [
        (UID, 10, run),
        (OTHER, 11, run),
    ]
    assert all(0 <= number < 2**63 for number in log.values())
    assert letters_of(number_of(OTHER), len(OTHER)) == OTHER
    assert Uids(_identity(UID, None, sink="another")).newest(log.get) == []
    assert ledger_id(UID, _identity(UID, None).tag) in log


def _identity(uid: Uid, run: str | None, sink: str = "delta"):
    from epochal.terms import Generation, Identity

    return Identity(pipeline="orders", uid=uid, sink=sink, generation=Generation(1), run=run)


def test_two_sinks_of_one_pipeline_in_one_table_do_not_take_each_other_for_themselves(orders, some):
    one, two = orders.life(name="one"), orders.life(name="two")
    (first,), (second,) = one.write(0, some(1)), two.write(0, some(2))
    assert one.committer.outcome(EpochNumber(0), first) is Proof.COMMITTED
    assert two.committer.outcome(EpochNumber(0), second) is Proof.COMMITTED
    assert orders.ids() == [1, 2]


def test_a_speculative_copy_that_lost_is_listed_and_cleared(orders, some):
    life = orders.life()
    loser, winner = life.prepare(some(1, 2), 0), life.prepare(some(1, 2), 0)
    life.rehearse(0, [winner])
    life.commit(0, [winner])
    (found,) = life.committer.in_doubt()
    assert found.handle == loser.handle
    assert isinstance(found.handle, Handle)
    life.committer.abort(EpochNumber(0), [loser])
    assert orders.ids() == [1, 2]
    assert orders.leftovers() == []
    assert not Path(orders.folder / loser.token["files"][0]["path"]).exists()


def test_a_full_disk_is_reported_with_path_and_hint_and_may_be_tried_again(orders, some):
    writer = orders.life().writer(some(1).schema, 0)
    (orders.folder / f"{writer._task.handle}-00000.snappy.parquet").symlink_to("/dev/full")
    writer.write(some(*range(1000)).to_batches()[0])
    with pytest.raises(TryAgain, match="No space left") as caught:
        writer.prepare()
    assert str(orders.folder) in caught.value.message
    assert "free some space" in caught.value.hint


def test_a_table_that_can_not_be_made_is_reported_with_its_folder(tmp_path, some):
    (tmp_path / "file").touch()
    with pytest.raises(Misconfigured, match="create the table: ") as caught:
        Life(sink=Delta(tmp_path / "file" / "orders", create_table="if_missing")).write(0, some(1))
    assert "must be there and writable" in caught.value.hint
