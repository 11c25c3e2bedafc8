"""Shared by the tests of Hudi tables: a Spark with Hudi's bundle, a table, one life of a driver."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servers.maven import artifact

from epochal.contract import Begin
from epochal.protocol.receipts import receipt_in, receipt_out
from epochal.sinks.hudi import Hudi
from epochal.spark import engine_write
from epochal.spark.local_session import local_builder
from epochal.spark.projection import arrow_schema
from epochal.terms import EpochNumber, Generation, Identity, Limits, Receipt, Uid

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

RELEASE = "1.2.0"
BUNDLE = f"org.apache.hudi:hudi-spark3.5-bundle_2.12:{RELEASE}"
COLUMNS = "id BIGINT NOT NULL, day STRING, price DECIMAL(9,2), at TIMESTAMP, tags ARRAY<STRING>"
SELECT = (
    "id",
    "concat('d', id % 3) day",
    "cast(id / 4 as decimal(9,2)) price",
    "timestamp_micros(1700000000123456 + id) at",
    "array('a', cast(id as string)) tags",
)
OPTIONS = {
    "hoodie.write.lock.filesystem.expire": "1",
    # By default a hundred tasks or more each, however few rows there are.
    **{
        f"hoodie.{part}.parallelism": "2"
        for part in (
            *("upsert.shuffle", "simple.index", "global.simple.index", "bloom.index"),
            *("finalize.write", "rollback", "clean", "global.index.reconcile"),
        )
    },
}
UID = Uid("abcdefgh2345")


def bundle() -> Path:
    group, name, release = BUNDLE.split(":")
    return artifact(f"hudi-{RELEASE}", f"{group}:{name}:{release}")


def session(name: str = "hudi") -> SparkSession:
    spark = (
        local_builder(name, threads=2)
        .config("spark.jars", str(bundle()))
        .config("spark.serializer", "org.apache.spark.serializer.KryoSerializer")
        .config("spark.sql.extensions", "org.apache.spark.sql.hudi.HoodieSparkSessionExtension")
        .config(
            "spark.sql.catalog.spark_catalog", "org.apache.spark.sql.hudi.catalog.HoodieCatalog"
        )
        .getOrCreate()
    )
    spark.sparkContext.setLogLevel("OFF")
    return spark


def make_table(
    spark: SparkSession,
    folder: Path,
    kind: str = "cow",
    *,
    columns: str = COLUMNS,
    partition: str = "day",
    key: str = "id",
    order: str = "",
) -> str:
    """Its name in this session."""
    name = f"t{abs(hash(str(folder)))}"
    by = f"PARTITIONED BY ({partition})" if partition else ""
    keys = f"primaryKey = '{key}', " if key else ""
    keys += f"preCombineField = '{order}', " if order else ""
    spark.sql(
        f"CREATE TABLE {name} ({columns}) USING hudi {by} TBLPROPERTIES ({keys}type = '{kind}') "
        f"LOCATION '{folder}'"
    )
    return name


def numbers(spark: SparkSession, first: int, last: int) -> DataFrame:
    return spark.range(first, last, numPartitions=3).selectExpr(*SELECT)


def visible(spark: SparkSession, folder: Path) -> list[int]:
    """The ids that readers see: one that is there twice shows twice."""
    spark.catalog.clearCache()
    read = spark.read.format("hudi").load(str(folder))
    return sorted(row[0] for row in read.select("id").collect())


def completions(folder: Path) -> list[str]:
    """Files of completed commits: one per instant."""
    names = [path.name for path in (folder / ".hoodie" / "timeline").iterdir()]
    return sorted(name for name in names if re.fullmatch(r"\d+_\d+\.(delta)?commit", name))


def leftovers(spark: SparkSession, folder: Path) -> list[str]:
    """
    Notes, instants that are not complete, and data files that no reader sees, but for earlier
    versions of those that one does.
    """
    notes = [path.name for path in (folder / ".hoodie" / "epochal").rglob("*") if path.is_file()]
    timeline = (folder / ".hoodie" / "timeline").iterdir()
    names = [path.name for path in timeline if path.is_file() and not path.name.startswith(".")]
    done = {name.partition("_")[0] for name in names if "_" in name}
    pending = [name for name in names if "_" not in name and name.partition(".")[0] not in done]
    seen = set()
    if completions(folder):
        seen = {Path(one).name for one in spark.read.format("hudi").load(str(folder)).inputFiles()}
    groups = {name.partition("_")[0] for name in seen}
    files = [path.name for path in folder.rglob("*.parquet") if ".hoodie" not in path.parts]
    logs = [path.name for path in folder.rglob(".*.log.*") if ".hoodie" not in path.parts]
    stray = [
        name
        for name in [*files, *logs]
        if name not in seen and not (_group(name) in groups and _instant(name) in done)
    ]
    return sorted(notes + pending + stray)


def _group(file: str) -> str:
    return file.removeprefix(".").partition("_")[0]


def _instant(file: str) -> str:
    """`<group>_<token>_<instant>.parquet`, `.<group>_<instant>.log.<number>_<token>`."""
    found = re.search(r"_(\d{17})\.(parquet|log\.)", file)
    return found[1] if found else ""


@dataclass(kw_only=True)
class Life:
    """One driver with one sink, whose jobs are those of Hudi's writer."""

    sink: Hudi
    spark: Any = None
    generation: int = 1
    uid: Uid = UID
    claim: str = "a" * 8
    committed: int | None = None
    jobs: Iterator[int] = field(default_factory=itertools.count)
    _opened: list[Any] = field(default_factory=list)

    @property
    def identity(self) -> Identity:
        return Identity(
            pipeline="orders",
            uid=self.uid,
            sink=self.sink.name,
            generation=Generation(self.generation),
            claim=self.claim,  # type: ignore[arg-type]
            committed=self.committed,  # type: ignore[arg-type]
        )

    @property
    def committer(self) -> Any:
        if not self._opened:
            limits = Limits(retry_backoff_ms=(10, 50))
            self._opened.append(self.sink.committer(self.identity, limits))
        return self._opened[0]

    def prepare(self, rows: DataFrame, epoch: int) -> Receipt:
        schema = arrow_schema(self.sink, rows.schema)
        self.committer.check(schema)
        self.committer.begin(Begin(epoch=EpochNumber(epoch)))
        handle = self.identity.job_handle(EpochNumber(epoch), next(self.jobs))
        asked = self.committer.engine_write(handle, schema, "hudi")
        written = engine_write.write(rows, asked, schema, fingerprint=True)
        receipt: Receipt = self.committer.gather(written)
        # As the log carries it.
        return receipt_in(json.loads(json.dumps(receipt_out(receipt))))

    def commit(self, epoch: int, receipts: Sequence[Receipt]) -> None:
        self.committer.commit(EpochNumber(epoch), receipts)

    def write(self, rows: DataFrame, epoch: int) -> Receipt:
        receipt = self.prepare(rows, epoch)
        self.committer.rehearse(EpochNumber(epoch), [receipt])
        self.commit(epoch, [receipt])
        return receipt

    def close(self) -> None:
        for committer in self._opened:
            committer.close()
        self._opened.clear()
