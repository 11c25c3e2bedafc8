"""
Jobs of Hudi's own writer for Spark, without a commit: files of one sink and one epoch.

The parts of Hudi's bulk insert and of its upsert are called here one by one: the instant is moved
from requested to inflight, and a job writes files under it. Which of them count, their rows and
sizes are what the tasks that succeeded return.

    bulk insert   rows ── files of new file groups
    upsert        rows ── computed once ── one row per key ── index lookup ── new versions of the
                  file groups that have the keys (or log files beside them), and new file groups

An upsert reads its rows several times, and in stages that may run again. So they are computed once
before, which is also where they are counted and hashed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochal.errors import RowRejected, TaskFailed
from epochal.spark.jobs import computed_once
from epochal.spark.projection import quoted

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from epochal.contract import EngineWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    rows: int
    """How many rows were read."""
    metadata: str
    """What Hudi says of all files, in the JSON of its commits."""
    files: int
    bytes: int


def write_staged(rows: DataFrame, asked: EngineWrite) -> Staged:
    """Run the job, for the instant that `asked.table` is."""
    writer = _Writer(rows.sparkSession, asked)
    if not asked.keys:
        stats = writer.bulk_insert(rows)
        return writer.staged(sum(int(stat.getNumWrites()) for stat in stats), stats)
    with computed_once(rows) as (fixed, count):
        return writer.staged(count, writer.upsert(one_per_key(fixed, asked)))


def one_per_key(rows: DataFrame, asked: EngineWrite) -> DataFrame:
    """Of several rows of one key the highest; a job on it fails where two are."""
    from pyspark.sql import Window, functions  # noqa: PLC0415  importable without pyspark

    order = [functions.col(quoted(name)) for name in asked.order_by]
    falling = Window.partitionBy(*map(quoted, asked.keys)).orderBy(*(one.desc() for one in order))
    place, next_order = "__epochal_place", "__epochal_next"
    first = (
        rows.withColumn(place, functions.row_number().over(falling))
        .withColumn(next_order, functions.lead(functions.struct(*order)).over(falling))
        .where(functions.col(place) == 1)
    )
    key = asked.keys[0]
    error = functions.raise_error(functions.lit(_tied(asked).to_line()))
    is_tied = functions.col(next_order) == functions.struct(*order)
    kept = functions.when(is_tied, error.cast(rows.schema[key].dataType))
    return first.withColumn(key, kept.otherwise(functions.col(quoted(key)))).select(
        *map(quoted, rows.columns)
    )


def _tied(asked: EngineWrite) -> RowRejected:
    return RowRejected(
        f"two rows have the same {', '.join(asked.keys)} and the same {', '.join(asked.order_by)}",
        "an ordering column of the table that differs between them, or one row per key in the rows",
    )


class _Writer:
    """Hudi's writer for one instant of a table."""

    def __init__(self, spark: Any, asked: EngineWrite) -> None:
        self._hudi, self._jvm = spark._jvm.org.apache.hudi, spark._jvm
        self._instant, self._options = asked.table, dict(asked.options)
        self._config = self._hudi.DataSourceUtils.createHoodieConfig(
            self._options["hoodie.avro.schema"],
            asked.folder,
            self._options["hoodie.table.name"],
            self._options,
        )
        self._context = self._hudi.client.common.HoodieSparkEngineContext(spark.sparkContext._jsc)
        self._table = self._hudi.table.HoodieSparkTable.create(self._config, self._context)

    def bulk_insert(self, rows: DataFrame) -> list[Any]:
        self._table.validateInsertSchema()
        meta = self._table.getMetaClient()
        helper = self._hudi.HoodieDatasetBulkInsertHelper
        partitioner = self._hudi.execution.bulkinsert.NonSortPartitionerWithRows()
        ready = helper.prepareForBulkInsert(
            rows._jdf, self._config, meta.getTableConfig(), partitioner, self._instant
        )
        self._table.getActiveTimeline().transitionRequestedToInflight(
            meta.getCommitActionType(), self._instant
        )
        written = helper.bulkInsert(ready, self._instant, self._table, self._config, False, False)
        return self._stats(written)

    def upsert(self, rows: DataFrame) -> list[Any]:
        self._table.validateUpsertSchema()
        try:
            written = self._table.upsert(self._context, self._instant, self._records(rows))
            return self._stats(written.getWriteStatuses())
        finally:
            # Hudi persists rows and results, and would free them at its own commit.
            self._hudi.client.utils.SparkReleaseResources.releaseCachedData(
                self._context, self._config, self._config.getBasePath(), self._instant
            )

    def _records(self, rows: DataFrame) -> Any:
        maps = self._jvm.org.apache.spark.api.python.PythonUtils
        schema = self._hudi.common.schema.HoodieSchema.parse(self._options["hoodie.avro.schema"])
        arguments = getattr(self._hudi, "HoodieCreateRecordUtils$createHoodieRecordRddArgs")(
            rows._jdf,
            self._config,
            maps.toScalaMap(self._options),
            schema.getName(),
            schema.getNamespace().orElse(""),
            schema,
            schema,
            self._hudi.common.model.WriteOperationType.UPSERT,
            self._instant,
            False,
            False,
            False,
            self._table.getMetaClient().getTableConfig(),
        )
        records = self._hudi.HoodieCreateRecordUtils.createHoodieRecordRdd(arguments)
        return self._hudi.data.HoodieJavaRDD.of(records)

    def _stats(self, written: Any) -> list[Any]:
        """Of every file that counts."""
        found = []
        for status in self._hudi.data.HoodieJavaRDD.getJavaRDD(written).collect():
            if status.hasErrors():
                raise TaskFailed(
                    f"Hudi could not write some rows of partition {status.getPartitionPath()!r}",
                    "Hudi's log in the executor has the reason; the epoch is tried again",
                )
            found.append(status.getStat())
        return found

    def staged(self, rows: int, stats: Iterable[Any]) -> Staged:
        metadata = self._hudi.common.model.HoodieCommitMetadata()
        files = size = 0
        for stat in stats:
            metadata.addWriteStat(stat.getPartitionPath(), stat)
            files, size = files + 1, size + int(stat.getFileSizeInBytes())
        return Staged(rows=rows, metadata=metadata.toJsonString(), files=files, bytes=size)
