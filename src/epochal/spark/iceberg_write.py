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
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from epochal.spark.engine_write import LOCAL_FILES, activate, executed

if TYPE_CHECKING:
    from pyspark import SparkContext
    from pyspark.sql import DataFrame

    from epochal.contract import EngineWrite

_OPTIONS = {
    # Below an exchange of the writer's own, rows of a stage that runs again are counted again.
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
    reports: list[str]
    """
    What Iceberg says of each file, as JSON: those of the attempts that count, which the driver's
    part of Spark names when the job has succeeded.
    """

    rows: int
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Runtime:
    """Parts of Iceberg in one JVM: a class is found by one call for each part of its name."""

    metadata_parser: Any
    file_parser: Any
    locations: Any
    make_operations: Any
    make_table: Any
    make_settings: Any
    make_files: Any
    cache: Any
    """Of tables, by name."""
    staged: Any
    """What jobs have written, by table and name."""


def write_staged(rows: DataFrame, asked: EngineWrite) -> Staged:
    """Run the job."""
    spark = rows.sparkSession
    iceberg = _runtime(spark.sparkContext)
    metadata = iceberg.metadata_parser.fromJson(asked.table)
    locations = iceberg.locations.locationsFor(metadata.location(), metadata.properties())
    name = str(asked.handle)
    files = _files(spark.sparkContext, asked.folder)
    operations = iceberg.make_operations(metadata, files, locations)
    table = iceberg.make_table(operations, name)
    activate(spark)
    iceberg.cache.add(name, table)
    try:
        jvm: Any = spark._jvm
        writer: Any = rows.write.format("iceberg").options(**_OPTIONS).mode("append")
        executed(rows, writer._jwrite.saveCommand(jvm.scala.Option.apply(name)))
        # A job that had no rows stages nothing, and has no entry.
        is_staged = name in iceberg.staged.fetchSetIds(table)
        # As an array: py4j learns of the end of a set by an error, which takes 10 ms.
        found = iceberg.staged.fetchNewFiles(table, name).toArray() if is_staged else ()
        spec, parser = table.spec(), iceberg.file_parser
        reports = [str(parser.toJson(file, spec)) for file in found]
        files_read = [json.loads(report) for report in reports]
        return Staged(
            reports=reports,
            rows=sum(file["record-count"] for file in files_read),
            bytes=sum(file["file-size-in-bytes"] for file in files_read),
        )
    finally:
        iceberg.staged.clearRewrite(table, name)
        iceberg.cache.remove(name)


def _files(context: SparkContext, folder: str) -> Any:
    """Iceberg's way to Hadoop's file systems, as they are set now."""
    jvm_context: Any = context._jsc
    settings = _runtime(context).make_settings(jvm_context.hadoopConfiguration())
    # Not for a store: what s3a keeps on a disk before it sends it needs Hadoop's own class.
    for key, value in LOCAL_FILES.items() if folder.startswith("file:") else ():
        settings.set(key, value)
    for scheme in _S3_SCHEMES:
        settings.setIfUnset(f"fs.{scheme}.impl", _S3A)
    return _runtime(context).make_files(settings)


@lru_cache(maxsize=1)
def _runtime(context: SparkContext) -> _Runtime:
    jvm: Any = context._jvm
    iceberg = jvm.org.apache.iceberg
    return _Runtime(
        metadata_parser=iceberg.TableMetadataParser,
        file_parser=iceberg.ContentFileParser,
        locations=iceberg.LocationProviders,
        make_operations=iceberg.StaticTableOperations,
        make_table=iceberg.BaseTable,
        make_settings=jvm.org.apache.hadoop.conf.Configuration,
        make_files=iceberg.hadoop.HadoopFileIO,
        cache=_table_cache(context),
        staged=iceberg.spark.FileRewriteCoordinator.get(),
    )


def _table_cache(context: SparkContext) -> Any:
    """By reflection: py4j can't tell `SparkTableCache.get()` from `get(name)`."""
    jvm: Any = context._jvm
    gateway: Any = context._gateway
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    kind = jvm.java.lang.Class.forName("org.apache.iceberg.spark.SparkTableCache", True, loader)
    nothing = gateway.new_array(jvm.java.lang.Object, 0)
    none = gateway.new_array(jvm.java.lang.Class, 0)
    return kind.getMethod("get", none).invoke(None, nothing)
