"""
Jobs of Iceberg's own writer for Spark, without a commit: files of one sink and one epoch.

Iceberg rewrites the files of a table by jobs that only stage what they wrote; their caller
commits it. Such a job is run here for rows that are new. It needs no catalog: the table, with
the folder of this job as its data location, lies in a cache of the JVM under the job's handle.

    SparkTableCache[handle] = table ── write to `handle` ── FileRewriteCoordinator[handle] = files
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from epochal.spark.engine_write import LOCAL_FILES, activate, executed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

    from epochal.contract import EngineWrite

_OPTIONS = {
    # An exchange of the writer's own, above the observation, would run again and count again.
    "distribution-mode": "none",
    # One file per partition value at a time, of sorted rows: memory stays within limits.
    "fanout-enabled": "false",
    # Spark declares nearly every column nullable; nulls were refused by their values.
    "check-nullability": "false",
}
_S3_SCHEMES = ("s3", "s3n")
"""What tables have in the place of `s3a`, the scheme of Hadoop's."""
_S3A = "org.apache.hadoop.fs.s3a.S3AFileSystem"


@dataclass(frozen=True, slots=True, kw_only=True)
class Staged:
    plan: Any
    """The physical plan that ran."""
    reports: list[str]
    """
    What Iceberg says of each file, as JSON: those of the attempts that count, which the driver's
    part of Spark names when the job has succeeded.
    """

    @property
    def bytes(self) -> int:
        return sum(json.loads(report)["file-size-in-bytes"] for report in self.reports)


def write_staged(rows: DataFrame, asked: EngineWrite) -> Staged:
    """Run the job."""
    spark = rows.sparkSession
    jvm: Any = spark._jvm
    iceberg = jvm.org.apache.iceberg
    metadata = iceberg.TableMetadataParser.fromJson(asked.table)
    settings = jvm.org.apache.hadoop.conf.Configuration(spark._jsc.hadoopConfiguration())
    for key, value in LOCAL_FILES.items():
        settings.set(key, value)
    for scheme in _S3_SCHEMES:
        settings.setIfUnset(f"fs.{scheme}.impl", _S3A)
    files = iceberg.hadoop.HadoopFileIO(settings)
    locations = iceberg.LocationProviders.locationsFor(metadata.location(), metadata.properties())
    name = str(asked.handle)
    table = iceberg.BaseTable(iceberg.StaticTableOperations(metadata, files, locations), name)
    cache = _table_cache(spark)
    staged = iceberg.spark.FileRewriteCoordinator.get()
    activate(spark)
    cache.add(name, table)
    try:
        writer: Any = rows.write.format("iceberg").options(**_OPTIONS).mode("append")
        plan = executed(rows, writer._jwrite.saveCommand(jvm.scala.Option.apply(name)))
        parser, spec = iceberg.ContentFileParser, table.spec()
        # A job that had no rows stages nothing, and has no entry.
        is_staged = name in staged.fetchSetIds(table)
        found = staged.fetchNewFiles(table, name) if is_staged else ()
        return Staged(plan=plan, reports=[str(parser.toJson(file, spec)) for file in found])
    finally:
        staged.clearRewrite(table, name)
        cache.remove(name)


def _table_cache(spark: Any) -> Any:
    """By reflection: py4j can't tell `SparkTableCache.get()` from `get(name)`."""
    jvm = spark._jvm
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    kind = jvm.java.lang.Class.forName("org.apache.iceberg.spark.SparkTableCache", True, loader)
    nothing = spark.sparkContext._gateway.new_array(jvm.java.lang.Object, 0)
    none = spark.sparkContext._gateway.new_array(jvm.java.lang.Class, 0)
    return kind.getMethod("get", none).invoke(None, nothing)
