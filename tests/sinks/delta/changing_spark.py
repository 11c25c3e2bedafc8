"""A program: Spark writes a pipeline's files into a table that delta-spark changes by chance."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import changing_lake
import pytest
from changing_lake import ChangingLake
from sinks.delta.beside_spark import session
from sinks.delta.delta_stage import leftovers, rows
from spark_stage import Killer, Source

from epochal.coordinator.journal import read_state
from epochal.logs import checkpoint_log
from epochal.sinks.delta import Delta
from epochal.spark.driver_write import DriverWrites

EPOCHS = 5


class Changes:
    """What others do to a table. Rows of `changing_lake.SCHEMA` always have a place in it."""

    def __init__(self, spark: Any, folder: Path, chance: Random) -> None:
        self._spark, self._folder, self._chance = spark, str(folder), chance
        self._numbers = count(1)

    def verbs(self) -> list[Callable[[], None]]:
        return [self.add, self.drop, self.retype, self.widen, self.split, self.join, self.optimize]

    def add(self) -> None:
        kind = self._chance.choice(["string", "int", "bigint"])
        self._sql(f"ALTER TABLE {{table}} ADD COLUMNS (added{next(self._numbers)} {kind})")

    def drop(self) -> None:
        for name in self._added():
            self._replace(self._rows().drop(name))

    def retype(self) -> None:
        for name in self._added():
            kind, rows = self._chance.choice(["string", "int", "bigint"]), self._rows()
            self._replace(rows.withColumn(name, rows[name].cast(kind)))

    def widen(self) -> None:
        rows = self._rows()
        self._replace(rows.withColumn("quantity", rows["quantity"].cast("bigint")))

    def split(self) -> None:
        self._replace(self._rows(), self._chance.choice(["area", "quantity"]))

    def join(self) -> None:
        self._replace(self._rows())

    def optimize(self) -> None:
        self._sql("OPTIMIZE {table}")

    def _added(self) -> list[str]:
        """One column that rows don't have, if there is one."""
        found = [name for name in self._rows().columns if name.startswith("added")]
        return [self._chance.choice(found)] if found else []

    def _rows(self) -> Any:
        return self._spark.read.format("delta").load(self._folder)

    def _replace(self, rows: Any, *partition_by: str) -> None:
        """Write the whole table anew."""
        writer = rows.write.format("delta").mode("overwrite").option("overwriteSchema", "true")
        writer.partitionBy(*partition_by).save(self._folder)

    def _sql(self, statement: str) -> None:
        self._spark.sql(statement.format(table=f"delta.`{self._folder}`")).collect()


def judge(found: list[dict[str, Any]], wanted: list[dict[str, Any]], done: list[str]) -> None:
    """Every row once, with its values."""
    by_id = sorted(({name: one[name] for name in wanted[0]} for one in found), key=_id)
    assert by_id == wanted, done


def _id(one: dict[str, Any]) -> int:
    return int(one["id"])


def changed(spark: Any, home: Path, seed: int, patch: pytest.MonkeyPatch) -> list[str]:
    table, chance = home / "table", Random(seed)
    (home / "source").mkdir(parents=True)
    spark.createDataFrame([], changing_lake.SCHEMA).write.format("delta").save(str(table))
    source, killer = Source(spark, home / "source", changing_lake.SCHEMA), Killer(patch)
    verbs = Changes(spark, table, chance).verbs()
    driver = ChangingLake(
        source, home / "checkpoint", killer, Delta(table, name="f"), verbs, chance
    )
    for written in driver.epochs(EPOCHS):
        read = spark.read.format("delta").load(str(table)).collect()
        judge([one.asDict() for one in read], written, driver.done)
        judge(rows(table), written, driver.done)
    killer.close()
    state = read_state(checkpoint_log(home / "checkpoint"))
    assert state is not None
    assert state.sinks["f"]["writer"] == "Spark"
    assert leftovers(table) == []
    return [*driver.done, f"{driver.deaths} deaths"]


def main(jars: str, home: str, *seeds: str) -> dict[str, list[str]]:
    spark = session(jars)
    spark.sparkContext.setLogLevel("OFF")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(DriverWrites, "expected", lambda *_: None)
        return {seed: changed(spark, Path(home) / seed, int(seed), patch) for seed in seeds}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(*sys.argv[1:])) + "\n")
