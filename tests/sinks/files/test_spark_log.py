"""Spark's own log of the folder: plain Spark readers see whole epochs only."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from epochal.contract import Begin
from epochal.errors import CorruptRecord, Misconfigured
from epochal.logs import MemoryLog
from epochal.session import Session
from epochal.sinks.files import Files
from epochal.sinks.files.local import folder_beside
from epochal.spark.pipeline import Pipeline
from epochal.storage.local import LocalStore
from epochal.terms import EpochNumber


@pytest.fixture
def root(tmp_path):
    return tmp_path / "out with ü & 100%"


def seen(spark, root) -> list[int]:
    return sorted(row.n for row in spark.read.parquet(str(root)).select("n").collect())


def test_spark_sees_every_epoch_and_only_whole_ones_past_several_compactions(
    drive, numbers, spark, root
):
    driver = drive(Files(str(root), spark_metadata=True))
    driver.committer.check(numbers().schema)
    for epoch in range(34):
        parts = [numbers(2 * epoch), numbers(2 * epoch + 1)]
        receipts = [driver.prepare(part, epoch, partition=at) for at, part in enumerate(parts)]
        if epoch in (5, 9, 10, 29):
            before = seen(spark, root)
            name = receipts[0].token["files"][0]["path"]
            prepared = folder_beside(root) / str(receipts[0].handle)
            (prepared / name).rename(root / name)
            assert seen(spark, root) == before == list(range(2 * epoch))
        driver.commit(epoch, receipts)
        driver.commit(epoch, receipts)
        if epoch in (0, 8, 9, 10, 18, 19, 20, 29, 33):
            assert seen(spark, root) == list(range(2 * epoch + 2))
    kept = sorted(path.name for path in (root / "_spark_metadata").iterdir())
    entries = ["19.compact", *map(str, range(20, 29)), "29.compact", "30", "31", "32", "33"]
    assert kept == [*entries, "_epochal"]


def test_spark_sees_an_epoch_whose_driver_slept_while_its_number_was_used_and_deleted(
    drive, numbers, spark, root, monkeypatch
):
    """A slot that is deleted can be filled again: a put that succeeds there shows nothing."""
    sleeper = drive(Files(str(root), spark_metadata=True))
    other = sleeper.another(uid="zzzzzzzz2222", pipeline="other")
    for driver in (sleeper, other):
        driver.committer.check(numbers().schema)
    sleeper.write(numbers(0), 0)
    put = LocalStore.put_if_absent
    woken = []

    def put_after_a_sleep(store, key, content):
        if key == "1" and not woken:
            woken.append(key)
            for epoch in range(30):
                other.write(numbers(100 + epoch), epoch)
        return put(store, key, content)

    monkeypatch.setattr(LocalStore, "put_if_absent", put_after_a_sleep)
    sleeper.write(numbers(1), 1)
    assert woken
    sleeper.write(numbers(2), 2)
    assert seen(spark, root) == [0, 1, 2, *range(100, 130)]


def test_partitions_two_pipelines_and_empty_epochs_share_one_log(drive, spark, root):
    def rows(n: int) -> pa.Table:
        return pa.table({"n": [n], "p": ["a/b ü%"]})

    one = drive(Files(str(root), spark_metadata=True, partition_by=["p"]))
    other = one.another(uid="zzzzzzzz2222", pipeline="other")
    for driver in (one, other):
        driver.committer.check(rows(1).schema)
    for epoch in range(6):
        one.write(rows(epoch), epoch + 100)
        one.commit(epoch + 200, [])
        other.write(rows(epoch + 50), epoch)
    assert seen(spark, root) == [*range(6), *range(50, 56)]
    assert {row.p for row in spark.read.parquet(str(root)).collect()} == {"a/b ü%"}


def test_it_is_the_form_that_sparks_own_sink_writes(drive, numbers, spark, tmp_path):
    ours = tmp_path / "ours"
    driver = drive(Files(str(ours), spark_metadata=True))
    driver.committer.check(numbers().schema)
    driver.write(numbers(1), 0)
    source = tmp_path / "source"
    spark.range(100, 101).toDF("n").write.parquet(str(source))
    stream = spark.readStream.schema("n bigint").parquet(str(source))
    query = (
        stream.writeStream.format("parquet")
        .option("checkpointLocation", str(tmp_path / "chk"))
        .trigger(availableNow=True)
        .start(str(tmp_path / "sparks"))
    )
    query.awaitTermination(60)
    theirs = (tmp_path / "sparks" / "_spark_metadata" / "0").read_text().splitlines()
    mine = (ours / "_spark_metadata" / "0").read_text().splitlines()
    assert theirs[0] == mine[0]
    assert list(json.loads(theirs[1])) == list(json.loads(mine[1]))
    for line in (theirs[1], mine[1]):
        assert line.startswith('{"path":"file:///')


def test_a_folder_that_spark_wrote_is_refused(drive, numbers, spark, root):
    (root / "_spark_metadata").mkdir(parents=True)
    (root / "_spark_metadata" / "0").write_text("v1")
    with pytest.raises(Misconfigured, match="Spark's own file sink"):
        drive(Files(str(root), spark_metadata=True)).committer.check(None)
    with pytest.raises(Misconfigured, match="would not see these"):
        drive(Files(str(root))).committer.check(None)


def test_the_log_is_not_begun_over_files_that_it_would_hide(drive, numbers, root):
    drive(Files(str(root))).write(numbers(1), 0)
    with pytest.raises(Misconfigured, match="no longer see"):
        drive(Files(str(root), spark_metadata=True)).committer.check(None)


def test_a_folder_with_a_log_is_not_written_without_it(drive, numbers, root):
    drive(Files(str(root), spark_metadata=True)).committer.begin(Begin(epoch=EpochNumber(0)))
    with pytest.raises(Misconfigured, match="spark_metadata=True if this sink wrote it"):
        drive(Files(str(root))).committer.check(None)


def test_a_check_alone_shows_no_reader_a_log(drive, root):
    drive(Files(str(root), spark_metadata=True)).committer.check(None)
    assert not (root / "_spark_metadata").exists()
    drive(Files(str(root))).committer.check(None)


@pytest.mark.parametrize("has_log", [(False, True), (True, False)])
def test_two_sinks_of_one_folder_that_differ_in_the_log_are_refused_in_any_order(
    numbers, root, has_log
):
    sinks = [Files(str(root), name=str(one), spark_metadata=one) for one in has_log]
    assert len(Pipeline("both", sinks).check().abilities) == 2

    def write() -> None:
        with Session("both", sinks=sinks, log=MemoryLog(), schema=numbers().schema) as session:
            session.begin(0)
            session.write(numbers(1))
            session.commit()

    with pytest.raises(Misconfigured, match="would not see these"):
        write()
    assert not list(root.glob("*.parquet"))


def test_a_torn_entry_is_named(drive, numbers, root):
    driver = drive(Files(str(root), spark_metadata=True))
    driver.committer.check(None)
    for epoch in range(9):
        driver.write(numbers(epoch), epoch)
    (root / "_spark_metadata" / "4").write_text("")
    with pytest.raises(CorruptRecord, match="_spark_metadata/4"):
        driver.write(numbers(9), 9)
