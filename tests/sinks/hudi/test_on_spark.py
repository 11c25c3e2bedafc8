"""
Hudi tables on a real Spark with Hudi's bundle, which is there for Spark 3.5 alone: `make proof
ONLY=hudi` makes an environment with it and runs these tests.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sinks.hudi.hudi_stage import (
    OPTIONS,
    Life,
    completions,
    leftovers,
    make_table,
    numbers,
    visible,
)

import epochal as ep
from epochal.errors import PreparedLost, TryAgain
from epochal.sinks.hudi.client import HudiClient, WriteConflict
from epochal.spark.pipeline import Pipeline
from epochal.spark.row_hash import fingerprint_of
from epochal.terms import NO_ROWS, EpochNumber, Proof, Receipt, Uid

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::ResourceWarning")]
TEN = list(range(10))
E0, E1 = EpochNumber(0), EpochNumber(1)


def life(folder: Path, **given: Any) -> Life:
    options = {**OPTIONS, **given.pop("options", {})}
    return Life(sink=ep.Hudi(folder, name="hudi", options=options), **given)


@pytest.mark.parametrize("kind", ["cow", "mor"])
@pytest.mark.parametrize("partition", ["day", ""])
def test_rows_are_seen_by_nobody_before_the_commit_and_once_after_it(
    hudi_spark: SparkSession, folder: Path, kind: str, partition: str
) -> None:
    make_table(hudi_spark, folder, kind, partition=partition)
    driver = life(folder)
    rows = numbers(hudi_spark, 0, 10)
    receipt = driver.prepare(rows, 0)
    assert receipt.fingerprint == fingerprint_of(rows)
    assert visible(hudi_spark, folder) == []
    assert [one.handle for one in driver.committer.in_doubt()] == [receipt.handle]
    assert driver.committer.outcome(E0, receipt) is Proof.UNKNOWN
    driver.committer.rehearse(E0, [receipt])
    assert visible(hudi_spark, folder) == []
    driver.commit(0, [receipt])
    assert visible(hudi_spark, folder) == TEN
    driver.commit(0, [receipt])
    life(folder).commit(0, [receipt])
    assert visible(hudi_spark, folder) == TEN
    assert len(completions(folder)) == 1
    assert leftovers(hudi_spark, folder) == []
    assert driver.committer.outcome(E0, receipt) is Proof.COMMITTED
    assert [(mark.uid, mark.epoch) for mark in driver.committer.newest()] == [(driver.uid, 0)]
    read = hudi_spark.read.format("hudi").load(str(folder)).select(rows.columns)
    assert fingerprint_of(read) == receipt.fingerprint
    driver.close()


def test_another_client_commits_what_a_dead_one_prepared_though_others_committed_meanwhile(
    hudi_spark: SparkSession, folder: Path
) -> None:
    make_table(hudi_spark, folder)
    first, other = life(folder), life(folder, uid=Uid("zzzzzzzz2345"))
    first.write(numbers(hudi_spark, 0, 5), 0)
    receipt = first.prepare(numbers(hudi_spark, 5, 10), 1)
    first.close()
    other.write(numbers(hudi_spark, 10, 15), 0)
    successor = life(folder, generation=2, committed=0)
    successor.commit(1, [receipt])
    assert visible(hudi_spark, folder) == list(range(15))
    # Each commit carries what the one before it proves, whatever the order of their instants.
    third = successor.prepare(numbers(hudi_spark, 15, 20), 2)
    other.write(numbers(hudi_spark, 20, 25), 1)
    successor.commit(2, [third])
    assert {mark.epoch for mark in life(folder).committer.newest()} == {1, 2}
    assert visible(hudi_spark, folder) == list(range(25))
    assert leftovers(hudi_spark, folder) == []
    other.close()
    successor.close()


def test_an_abort_leaves_nothing(hudi_spark: SparkSession, folder: Path) -> None:
    make_table(hudi_spark, folder)
    driver = life(folder)
    driver.write(numbers(hudi_spark, 0, 10), 0)
    receipt = driver.prepare(numbers(hudi_spark, 10, 20), 1)
    listed = Receipt(handle=receipt.handle, fingerprint=NO_ROWS)
    successor = life(folder, generation=2)
    successor.committer.abort(E1, [listed])
    assert successor.committer.in_doubt() == []
    assert leftovers(hudi_spark, folder) == []
    assert successor.committer.outcome(E1, receipt) is Proof.ABORTED
    successor.committer.abort(E1, [listed])
    with pytest.raises(TryAgain, match="no decision"):
        driver.committer.rehearse(E1, [receipt])
    assert visible(hudi_spark, folder) == TEN
    driver.close()
    successor.close()


def test_what_is_committed_is_never_rolled_back(hudi_spark: SparkSession, folder: Path) -> None:
    make_table(hudi_spark, folder)
    driver = life(folder)
    receipt = driver.prepare(numbers(hudi_spark, 0, 10), 0)
    note = folder / ".hoodie" / "epochal" / "prepared" / str(receipt.handle)
    kept = note.read_bytes()
    driver.commit(0, [receipt])
    # As a driver leaves it that dies between the commit and the removal of its note.
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_bytes(kept)
    driver.committer.abort(E0, [Receipt(handle=receipt.handle, fingerprint=NO_ROWS)])
    note.parent.mkdir(parents=True, exist_ok=True)
    note.write_bytes(kept)
    assert driver.committer.in_doubt() == []
    assert visible(hudi_spark, folder) == TEN
    assert leftovers(hudi_spark, folder) == []
    driver.close()


def test_epochs_without_rows_are_proven_too(hudi_spark: SparkSession, folder: Path) -> None:
    make_table(hudi_spark, folder)
    driver = life(folder)
    receipt = driver.write(numbers(hudi_spark, 0, 0), 0)
    assert receipt.rows == 0
    driver.commit(1, [])
    driver.commit(1, [])
    assert [mark.epoch for mark in driver.committer.newest()] == [1]
    # One that another writer rolled back is made again.
    lost = driver.prepare(numbers(hudi_spark, 0, 0), 2)
    driver.committer._client.roll_back(lost.token["instant"])
    driver.commit(2, [lost])
    assert [mark.epoch for mark in driver.committer.newest()] == [2]
    assert visible(hudi_spark, folder) == []
    assert len(completions(folder)) == 3
    assert leftovers(hudi_spark, folder) == []
    driver.close()


def test_a_driver_that_slept_since_its_rehearsal_finds_the_epoch_done_inside_the_lock(
    hudi_spark: SparkSession, folder: Path
) -> None:
    make_table(hudi_spark, folder)
    asleep = life(folder)
    receipt = asleep.prepare(numbers(hudi_spark, 0, 10), 0)
    asleep.committer.rehearse(E0, [receipt])
    life(folder, generation=2).commit(0, [receipt])
    # It trusts its rehearsal, so that only the look inside the lock is left.
    asleep.commit(0, [receipt])
    assert len(completions(folder)) == 1
    assert visible(hudi_spark, folder) == TEN
    asleep.close()


def test_a_copy_of_the_log_is_refused_inside_the_lock(
    hudi_spark: SparkSession, folder: Path
) -> None:
    make_table(hudi_spark, folder)
    one, copy = life(folder), life(folder, claim="b" * 8)
    mine, theirs = (who.prepare(numbers(hudi_spark, 0, 10), 0) for who in (one, copy))
    one.committer.rehearse(E0, [mine])
    copy.commit(0, [theirs])
    with pytest.raises(ep.Refused, match="copy of this epoch log"):
        one.commit(0, [mine])
    assert visible(hudi_spark, folder) == TEN
    assert len(completions(folder)) == 1
    one.close()
    copy.close()


def foreign(spark: SparkSession, folder: Path, first: int, **options: str) -> None:
    """A writer of its own, with Hudi's defaults: no lock, and eager cleaning."""
    name = re.search(r"hoodie.table.name=(\S+)", (folder / ".hoodie/hoodie.properties").read_text())
    given = {
        "hoodie.table.name": name[1],
        "hoodie.datasource.write.operation": "insert",
        **options,
    }
    rows = numbers(spark, first, first + 5)
    rows.write.format("hudi").options(**given).mode("append").save(str(folder))


def test_rows_that_an_eager_writer_rolled_back_are_known_to_be_lost_and_written_again(
    hudi_spark: SparkSession, folder: Path
) -> None:
    make_table(hudi_spark, folder)
    driver = life(folder)
    driver.write(numbers(hudi_spark, 0, 5), 0)
    receipt = driver.prepare(numbers(hudi_spark, 5, 10), 1)
    driver.committer.rehearse(E1, [receipt])
    foreign(hudi_spark, folder, 100)
    with pytest.raises(PreparedLost) as lost:
        driver.commit(1, [receipt])
    assert lost.value.handles == (str(receipt.handle),)
    assert driver.committer.outcome(E1, receipt) is Proof.ABORTED
    again = driver.prepare(numbers(hudi_spark, 5, 10), 1)
    driver.commit(1, [again])
    assert visible(hudi_spark, folder) == [*TEN, *range(100, 105)]
    # What the sweep finds of the lost attempt is cleared, and nothing else.
    listed = [one.handle for one in driver.committer.in_doubt()]
    assert listed == [receipt.handle]
    driver.committer.abort(E1, [Receipt(handle=receipt.handle, fingerprint=NO_ROWS)])
    assert driver.committer.in_doubt() == []
    assert visible(hudi_spark, folder) == [*TEN, *range(100, 105)]
    driver.close()


def test_columns_that_others_add_meanwhile_stay_and_are_written_from_the_next_epoch_on(
    hudi_spark: SparkSession, folder: Path
) -> None:
    table = make_table(hudi_spark, folder)
    driver = life(folder)
    driver.write(numbers(hudi_spark, 0, 5), 0)
    receipt = driver.prepare(numbers(hudi_spark, 5, 8), 1)
    driver.committer.rehearse(E1, [receipt])
    welcome = {
        name: value
        for name, value in driver.sink.writer_options().items()
        if name.startswith(("hoodie.write.", "hoodie.clean."))
    }
    for name, value in welcome.items():
        hudi_spark.sql(f"SET {name}={value}")
    hudi_spark.sql(f"ALTER TABLE {table} ADD COLUMNS (more STRING)")
    for name in welcome:
        hudi_spark.sql(f"RESET {name}")
    successor = life(folder, generation=2)
    successor.commit(1, [receipt])
    successor.close()
    driver.write(numbers(hudi_spark, 8, 10).selectExpr("*", "'m' more"), 2)
    read = hudi_spark.read.format("hudi").load(str(folder)).select("id", "more").collect()
    assert sorted(map(tuple, read)) == [(n, None if n < 8 else "m") for n in TEN]
    driver.close()


def test_rows_that_hudi_will_never_complete_are_rolled_back_and_written_again(
    hudi_spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(hudi_spark, folder)
    driver = life(folder)
    receipt = driver.prepare(numbers(hudi_spark, 0, 10), 0)

    def refuse(*_: object) -> None:
        raise WriteConflict("ConflictException")

    with monkeypatch.context() as patched:
        patched.setattr(HudiClient, "complete", refuse)
        with pytest.raises(PreparedLost, match="was rolled back") as lost:
            driver.commit(0, [receipt])
    assert lost.value.handles == (str(receipt.handle),)
    assert driver.committer.outcome(E0, receipt) is Proof.ABORTED
    driver.write(numbers(hudi_spark, 0, 10), 0)
    assert visible(hudi_spark, folder) == TEN
    driver.close()


def test_an_epoch_is_proven_when_others_have_archived_its_commit(
    hudi_spark: SparkSession, folder: Path
) -> None:
    make_table(hudi_spark, folder)
    driver = life(folder)
    receipt = driver.write(numbers(hudi_spark, 0, 5), 0)
    for number in range(5):
        foreign(
            hudi_spark,
            folder,
            100 + 5 * number,
            **{
                "hoodie.keep.min.commits": "2",
                "hoodie.keep.max.commits": "3",
                "hoodie.clean.commits.retained": "1",
                "hoodie.metadata.compact.max.delta.commits": "1",
            },
        )
    active = {name.partition("_")[0] for name in completions(folder)}
    assert receipt.token["instant"] not in active, "the commit is not archived yet"
    successor = life(folder, generation=2)
    assert [mark.epoch for mark in successor.committer.newest()] == [0]
    assert successor.committer.outcome(E0, receipt) is Proof.COMMITTED
    successor.commit(0, [receipt])
    successor.write(numbers(hudi_spark, 5, 10), 1)
    assert visible(hudi_spark, folder) == [*TEN, *range(100, 125)]
    driver.close()
    successor.close()


def test_a_late_file_of_a_dead_task_is_seen_by_nobody(
    hudi_spark: SparkSession, folder: Path
) -> None:
    make_table(hudi_spark, folder)
    driver = life(folder)
    driver.write(numbers(hudi_spark, 0, 10), 0)
    file = next(path for path in folder.rglob("*.parquet") if ".hoodie" not in path.parts)
    fresh = re.sub(r"^[0-9a-f]{8}", "deadbeef", file.name)
    assert fresh != file.name
    shutil.copy(file, file.with_name(fresh))
    assert visible(hudi_spark, folder) == TEN
    driver.close()


def test_keys_are_made_up_where_the_table_has_none(hudi_spark: SparkSession, folder: Path) -> None:
    make_table(hudi_spark, folder, key="")
    driver = life(folder)
    driver.write(numbers(hudi_spark, 0, 10), 0)
    driver.write(numbers(hudi_spark, 0, 10), 1)
    assert visible(hudi_spark, folder) == sorted(TEN * 2)
    driver.close()


def test_the_session_and_the_table_are_judged_before_the_first_row(
    hudi_spark: SparkSession, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_table(hudi_spark, folder)

    def check(frame: Any, table: Path = folder) -> Any:
        return Pipeline("orders", [ep.Hudi(table, options=OPTIONS)]).check(frame)

    rows = numbers(hudi_spark, 0, 1)
    assert "by Hudi's own writer" in str(check(rows))
    assert "EAGER" in str(check(rows))
    for frame, fact in (
        (rows.selectExpr("*", "1 more"), "no column more"),
        (
            rows.selectExpr("cast(id as int) id", "day", "price", "at", "tags"),
            "column id is bigint",
        ),
        (rows.drop("id"), "column id is required"),
    ):
        with pytest.raises(ep.Misconfigured, match=fact):
            check(frame)
    with pytest.raises(ep.Misconfigured, match="no Hudi table"):
        check(rows, folder.parent / "nowhere")
    settings = {"spark.serializer": "java", "spark.speculation": "true"}
    for name, fact in (("spark.serializer", "Kryo"), ("spark.speculation", "speculation is true")):
        conf = hudi_spark.sparkContext.getConf()
        conf.set(name, settings[name])
        monkeypatch.setattr(hudi_spark.sparkContext, "getConf", lambda conf=conf: conf)
        with pytest.raises(ep.Misconfigured, match=fact):
            check(rows)
        monkeypatch.undo()


def test_a_row_without_a_required_value_fails_its_epoch(
    hudi_spark: SparkSession, folder: Path
) -> None:
    make_table(hudi_spark, folder)
    driver = life(folder)
    rows = numbers(hudi_spark, 0, 10).selectExpr("if(id = 3, null, id) id", "day", "price")
    with pytest.raises(Exception, match="column id is required, and a row has none"):
        driver.prepare(rows, 0)
    (left,) = driver.committer.in_doubt()
    driver.committer.abort(E0, [Receipt(handle=left.handle, fingerprint=NO_ROWS)])
    assert leftovers(hudi_spark, folder) == []
    driver.close()
