"""
Jobs of Hudi's own writer for Spark, without a commit: files of one sink and one epoch.

Hudi's bulk insert of rows, whose parts are called here one by one: the instant is moved from
requested to inflight, and a job writes the files of new file groups. Which of them count, their
rows and sizes are what the tasks that succeeded return.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochal.errors import TaskFailed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from epochal.contract import EngineWrite


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    plan: Any
    """The physical plan that ran."""
    metadata: str
    """What Hudi says of all files, in the JSON of its commits."""
    files: int
    bytes: int


def write_staged(rows: DataFrame, asked: EngineWrite) -> Staged:
    """Run the job, for the instant that `asked.table` is."""
    spark: Any = rows.sparkSession
    hudi, instant = spark._jvm.org.apache.hudi, asked.table
    options = dict(asked.options)
    config = hudi.DataSourceUtils.createHoodieConfig(
        options["hoodie.avro.schema"], asked.folder, options["hoodie.table.name"], options
    )
    context = hudi.client.common.HoodieSparkEngineContext(spark.sparkContext._jsc)
    table = hudi.table.HoodieSparkTable.create(config, context)
    table.validateInsertSchema()
    table_config = table.getMetaClient().getTableConfig()
    helper = hudi.HoodieDatasetBulkInsertHelper
    partitioner = hudi.execution.bulkinsert.NonSortPartitionerWithRows()
    ready = helper.prepareForBulkInsert(rows._jdf, config, table_config, partitioner, instant)
    action = table.getMetaClient().getCommitActionType()
    table.getActiveTimeline().transitionRequestedToInflight(action, instant)
    written = helper.bulkInsert(ready, instant, table, config, False, False)
    metadata = hudi.common.model.HoodieCommitMetadata()
    files = size = 0
    for status in hudi.data.HoodieJavaRDD.getJavaRDD(written).collect():
        if status.hasErrors():
            raise TaskFailed(
                f"Hudi could not write some rows of partition {status.getPartitionPath()!r}",
                "Hudi's log in the executor has the reason; the epoch is tried again",
            )
        stat = status.getStat()
        metadata.addWriteStat(stat.getPartitionPath(), stat)
        files, size = files + 1, size + int(stat.getFileSizeInBytes())
    return Staged(
        plan=rows._jdf.queryExecution().executedPlan(),
        metadata=metadata.toJsonString(),
        files=files,
        bytes=size,
    )
