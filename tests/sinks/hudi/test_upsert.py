"""Rows of a Hudi table replaced by their keys, on a real Spark with Hudi's bundle."""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import pytest
from sinks.hudi.hudi_stage import OPTIONS, Life, completions, leftovers, make_table

import epochal as ep
from epochal.errors import PreparedLost, TryAgain
from epochal.spark.row_hash import fingerprint_of
from epochal.terms import NO_ROWS, EpochNumber, Proof, Receipt, Uid

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.proof, pytest.mark.filterwarnings("ignore::ResourceWarning")]
COLUMNS = "id BIGINT, day STRING, version BIGINT, text STRING"
E0, E1 = EpochNumber(0), EpochNumber(1)
Row: TypeAlias = tuple[int, str, int, str]
Rows: TypeAlias = Iterable[Row]


def table(spark: SparkSession, folder: Path, kind: str = "cow", **given: Any) -> str:
    columns = given.pop("columns", COLUMNS)
    return make_table(spark, folder, kind, **{"columns": columns, "order": "version", **given})


def life(folder: Path, **given: Any) -> Life:
    options = {**OPTIONS, **given.pop("options", {})}
    return Life(sink=ep.Hudi(folder, name="hudi", mode="upsert", options=options), **given)


def frame(spark: SparkSession, rows: Rows) -> DataFrame:
    return spark.createDataFrame(list(rows), COLUMNS).repartition(3)


def versions(ids: Iterable[int], version: int, *, day: str | None = None) -> list[Row]:
    return [(n, day or f"d{n % 3}", version, f"{n} as of {version}") for n in ids]


def read(spark: SparkSession, folder: Path) -> list[Row]:
    spark.catalog.clearCache()
    found = spark.read.format("hudi").load(str(folder)).select("id", "day", "version", "text")
    return sorted(map(tuple, found.collect()))


class OneByOne:
    """The table as it would be if rows came one by one: the higher version of a key is kept."""

    def __init__(self, *, is_global: bool = False) -> None:
        self._rows: dict[Any, Row] = {}
        self._is_global = is_global

    def put(self, rows: Rows) -> None:
        for row in rows:
            key = row[0] if self._is_global else row[:2]
            if key not in self._rows or self._rows[key][2] <= row[2]:
                self._rows[key] = row

    @property
    def rows(self) -> list[Row]:
        return sorted(self._rows.values())


@pytest.mark.parametrize("kind", ["cow", "mor"])
@pytest.mark.parametrize("partition", ["day", ""])
def test_rows_are_replaced_by_the_commit_and_by_nothing_before_it(
    hudi_spark: SparkSession, folder: Path, kind: str, partition: str
) -> None:
    table(hudi_spark, folder, kind, partition=partition)
    driver = life(folder)
    driver.write(frame(hudi_spark, versions(range(10), 1)), 0)
    before = read(hudi_spark, folder)
    assert before == sorted(versions(range(10), 1))
    rows = frame(hudi_spark, versions(range(5, 15), 2))
    receipt = driver.prepare(rows, 1)
    assert receipt.fingerprint == fingerprint_of(rows)
    assert read(hudi_spark, folder) == before
    driver.committer.rehearse(E1, [receipt])
    driver.close()
    assert read(hudi_spark, folder) == before
    successor = life(folder, generation=2, committed=0)
    successor.commit(1, [receipt])
    successor.commit(1, [receipt])
    wanted = sorted(versions(range(5), 1) + versions(range(5, 15), 2))
    assert read(hudi_spark, folder) == wanted
    assert successor.committer.outcome(E1, receipt) is Proof.COMMITTED
    assert len(completions(folder)) == 2
    assert leftovers(hudi_spark, folder) == []
    successor.close()


@pytest.mark.parametrize("kind", ["cow", "mor"])
@pytest.mark.parametrize("index", ["SIMPLE", "GLOBAL_SIMPLE", "BLOOM"])
def test_the_table_is_as_if_rows_had_come_one_by_one(
    hudi_spark: SparkSession, folder: Path, kind: str, index: str
) -> None:
    """Several rows of a key in one epoch, older ones after newer ones, keys that change place."""
    table(hudi_spark, folder, kind)
    is_global = index.startswith("GLOBAL")
    driver = life(folder, options={"hoodie.index.type": index})
    wanted, chance = OneByOne(is_global=is_global), random.Random(f"{kind} {index}")
    numbers = chance.sample(range(1000), 240)
    for epoch in range(6):
        rows = []
        for _ in range(40):
            n, version = chance.randrange(25), numbers.pop()
            day = f"d{chance.randrange(3)}" if is_global else f"d{n % 3}"
            rows.append((n, day, version, f"{n} of epoch {epoch}"))
        driver.write(frame(hudi_spark, rows), epoch)
        wanted.put(rows)
        assert read(hudi_spark, folder) == wanted.rows
    assert hudi_spark.sparkContext._jsc.getPersistentRDDs().isEmpty()
    driver.close()


def test_an_abort_leaves_the_rows_as_they_were(hudi_spark: SparkSession, folder: Path) -> None:
    for kind in ("cow", "mor"):
        place = folder / kind
        table(hudi_spark, place, kind)
        driver = life(place)
        driver.write(frame(hudi_spark, versions(range(10), 1)), 0)
        receipt = driver.prepare(frame(hudi_spark, versions(range(20), 2)), 1)
        successor = life(place, generation=2)
        successor.committer.abort(E1, [Receipt(handle=receipt.handle, fingerprint=NO_ROWS)])
        assert read(hudi_spark, place) == sorted(versions(range(10), 1))
        assert successor.committer.outcome(E1, receipt) is Proof.ABORTED
        assert leftovers(hudi_spark, place) == []
        successor.write(frame(hudi_spark, versions(range(20), 3)), 1)
        assert read(hudi_spark, place) == sorted(versions(range(20), 3))
        driver.close()
        successor.close()


@pytest.mark.parametrize("kind", ["cow", "mor"])
def test_rows_that_others_wrote_to_the_same_partitions_meanwhile_are_not_doubled(
    hudi_spark: SparkSession, folder: Path, kind: str
) -> None:
    """Keys that are new to both: Hudi sees two new files there, and no conflict."""
    table(hudi_spark, folder, kind)
    driver, other = life(folder), life(folder, uid=Uid("zzzzzzzz2345"))
    receipt = driver.prepare(frame(hudi_spark, versions(range(10), 2)), 0)
    other.write(frame(hudi_spark, versions(range(5), 1)), 0)
    with pytest.raises(TryAgain, match="rows in its partitions were changed"):
        driver.committer.rehearse(E0, [receipt])
    with pytest.raises(PreparedLost, match="others have written to day=d0") as lost:
        driver.commit(0, [receipt])
    assert lost.value.handles == (str(receipt.handle),)
    assert driver.committer.outcome(E0, receipt) is Proof.ABORTED
    driver.write(frame(hudi_spark, versions(range(10), 2)), 0)
    assert read(hudi_spark, folder) == sorted(versions(range(10), 2))
    driver.close()
    other.close()


@pytest.mark.parametrize("kind", ["cow", "mor"])
def test_a_row_that_another_changed_meanwhile_is_not_lost(
    hudi_spark: SparkSession, folder: Path, kind: str
) -> None:
    table(hudi_spark, folder, kind)
    driver, other = life(folder), life(folder, uid=Uid("zzzzzzzz2345"))
    driver.write(frame(hudi_spark, versions(range(10), 1)), 0)
    receipt = driver.prepare(frame(hudi_spark, versions(range(5), 2)), 1)
    driver.close()
    other.write(frame(hudi_spark, versions(range(5, 10), 3)), 0)
    successor = life(folder, generation=2, committed=0)
    with pytest.raises(PreparedLost):
        successor.commit(1, [receipt])
    successor.write(frame(hudi_spark, versions(range(5), 2)), 1)
    wanted = sorted(versions(range(5), 2) + versions(range(5, 10), 3))
    assert read(hudi_spark, folder) == wanted
    successor.close()
    other.close()


def test_rows_of_other_partitions_and_compaction_are_no_conflict(
    hudi_spark: SparkSession, folder: Path
) -> None:
    name = table(hudi_spark, folder, "mor")
    driver, other = life(folder), life(folder, uid=Uid("zzzzzzzz2345"))
    driver.write(frame(hudi_spark, versions(range(10), 1, day="a")), 0)
    driver.write(frame(hudi_spark, versions(range(5), 2, day="a")), 1)
    receipt = driver.prepare(frame(hudi_spark, versions(range(3, 7), 3, day="a")), 2)
    other.write(frame(hudi_spark, versions(range(5), 1, day="b")), 0)
    driver.committer.rehearse(EpochNumber(2), [receipt])
    driver.close()
    successor = life(folder, generation=2, committed=1)
    successor.commit(2, [receipt])
    wanted = OneByOne()
    for rows in (range(10), 1, "a"), (range(5), 2, "a"), (range(3, 7), 3, "a"), (range(5), 1, "b"):
        wanted.put(versions(rows[0], rows[1], day=rows[2]))
    assert read(hudi_spark, folder) == wanted.rows
    hudi_spark.sql(f"CALL run_compaction(op => 'scheduleandexecute', table => '{name}')")
    assert read(hudi_spark, folder) == wanted.rows
    successor.close()
    other.close()


def test_rows_marked_as_deleted_remove_those_of_their_keys(
    hudi_spark: SparkSession, folder: Path
) -> None:
    for kind in ("cow", "mor"):
        place = folder / kind
        table(hudi_spark, place, kind, columns=f"{COLUMNS}, _hoodie_is_deleted BOOLEAN")
        driver = life(place)
        rows = frame(hudi_spark, versions(range(10), 2)).selectExpr(
            "*", "false AS _hoodie_is_deleted"
        )
        driver.write(rows, 0)
        removed = frame(hudi_spark, versions(range(5), 3)).selectExpr(
            "*", "true AS _hoodie_is_deleted"
        )
        receipt = driver.prepare(removed, 1)
        assert len(read(hudi_spark, place)) == 10
        driver.commit(1, [receipt])
        assert read(hudi_spark, place) == sorted(versions(range(5, 10), 2))
        driver.close()


def test_two_rows_of_one_key_and_order_fail_their_epoch(
    hudi_spark: SparkSession, folder: Path
) -> None:
    table(hudi_spark, folder)
    driver = life(folder)
    rows = [*versions(range(10), 1), (3, "d0", 1, "another")]
    with pytest.raises(Exception, match="two rows have the same id, day and the same version"):
        driver.prepare(frame(hudi_spark, rows), 0)
    (left,) = driver.committer.in_doubt()
    driver.committer.abort(E0, [Receipt(handle=left.handle, fingerprint=NO_ROWS)])
    driver.write(frame(hudi_spark, []), 0)
    assert read(hudi_spark, folder) == []
    driver.close()


@pytest.mark.parametrize(
    ("given", "fact"),
    [
        ({"key": ""}, "it has no key"),
        ({"order": ""}, "no order of rows with one key"),
    ],
)
def test_a_table_without_key_or_order_is_refused(
    hudi_spark: SparkSession, folder: Path, given: dict[str, str], fact: str
) -> None:
    table(hudi_spark, folder, **given)
    driver = life(folder)
    with pytest.raises(ep.Misconfigured, match=fact):
        driver.prepare(frame(hudi_spark, versions(range(3), 1)), 0)
    with pytest.raises(ep.Misconfigured, match="rows have none"):
        driver.prepare(frame(hudi_spark, versions(range(3), 1)).drop("id", "version"), 0)
    driver.close()
