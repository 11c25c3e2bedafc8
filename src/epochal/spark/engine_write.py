"""
Jobs of Spark's own writer: files of one sink and one epoch, without rows leaving the JVM.

`DataFrameWriter` writes with Hadoop's FileOutputCommitter, algorithm 1: a task writes below
`_temporary/`, and only the commit of the job brings the files of one attempt per task, which the
driver's OutputCommitCoordinator has allowed, to the job's folder. So after a job that succeeded
these files, and no others, are in the folder. With algorithm 2 a task brings its files there by
itself, and one that then fails leaves them: it is never used.

    project ── refuse partition values that have no form ── observe (count and hash) ── write
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING

from epochal.contract import EngineWrite, EngineWritten
from epochal.kit.hive_partitions import WITHOUT_FORM, refused
from epochal.spark.projection import quoted
from epochal.spark.row_hash import ObservedRows
from epochal.terms import Ability

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

ABILITY = "rows are written by Spark itself"
_COMMITTER = {
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
_SETTINGS = {
    # INT96, the default, has no statistics, and many readers take it for nanoseconds.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # As every reader but an old Spark takes them.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
}
_COMMITTERS_NEEDED = {
    "spark.sql.sources.commitProtocolClass": (
        "org.apache.spark.sql.execution.datasources.SQLHadoopMapReduceCommitProtocol"
    ),
    "spark.sql.parquet.output.committer.class": "org.apache.parquet.hadoop.ParquetOutputCommitter",
    "spark.sql.sources.outputCommitterClass": "",
}
"""Settings by which a platform replaces the committer, with Spark's own choice."""
_PLAIN_TYPES = frozenset(
    {
        "BinaryType",
        "BooleanType",
        "ByteType",
        "DateType",
        "DecimalType",
        "DoubleType",
        "FloatType",
        "IntegerType",
        "LongType",
        "ShortType",
        "StringType",
        "TimestampNTZType",
        "TimestampType",
    }
)


def session_ability(spark: SparkSession) -> Ability:
    """Whether Spark's own writer can be used in this session, by its settings."""
    for setting, needed in _COMMITTERS_NEEDED.items():
        found = spark.conf.get(setting, None) or needed
        if found != needed:
            return Ability(name=ABILITY, granted=False, because=f"{setting} is {found}")
    return Ability(name=ABILITY, granted=True, because="no row is handed to Python")


def writer_ability(session: Ability, schema: StructType) -> Ability:
    """The same for rows with these columns."""
    refusal = type_refusal(schema) if session.granted else None
    return session if refusal is None else replace(session, granted=False, because=refusal)


def type_refusal(schema: StructType) -> str | None:
    """Why rows must go to tasks: types and names that Spark's writer takes otherwise, or not."""
    names = [field.name.lower() for field in schema.fields]
    if len(set(names)) < len(names):
        return "names of columns differ in upper and lower case only"
    found = next((field for field in schema.fields if not _is_plain(field.dataType)), None)
    return None if found is None else f"column {found.name} is {found.dataType.simpleString()}"


def _is_plain(kind: DataType) -> bool:
    from pyspark.sql import types  # noqa: PLC0415  importable without pyspark

    match kind:
        case types.StructType():
            return type_refusal(kind) is None
        case types.ArrayType():
            return _is_plain(kind.elementType)
        case types.MapType():
            return _is_plain(kind.keyType) and _is_plain(kind.valueType)
        case types.StringType():
            return kind.simpleString() == "string"
    return type(kind).__name__ in _PLAIN_TYPES


def write(
    frame: DataFrame, asked: EngineWrite, schema: pa.Schema, *, fingerprint: bool
) -> EngineWritten:
    """Run the job. Where it fails, tasks of it may still write for a while."""
    observed = ObservedRows(_refusing(frame, asked.partition_by), is_hashed=fingerprint)
    writer = observed.frame.write.format(asked.format).mode("errorifexists")
    writer = writer.options(**{**asked.options, **_COMMITTER})
    if asked.partition_by:
        writer = writer.partitionBy(*asked.partition_by)
    writer.save(asked.folder)
    return EngineWritten(handle=asked.handle, schema=schema, fingerprint=observed.fingerprint())


def _refusing(frame: DataFrame, partition_by: Sequence[str]) -> DataFrame:
    """
    The same rows. One with a partition value that Spark would write as null fails the job, by the
    error that a task raises: the driver finds it in the text of Spark's.
    """
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark
    from pyspark.sql.types import StringType  # noqa: PLC0415

    for name in partition_by:
        if not isinstance(frame.schema[name].dataType, StringType):
            continue
        value = column = functions.col(quoted(name))
        for text in WITHOUT_FORM:
            error = functions.raise_error(functions.lit(refused(name, text).to_line()))
            value = functions.when(column == text, error.cast("string")).otherwise(value)
        frame = frame.withColumn(name, value)
    return frame


@contextmanager
def writer_settings(spark: SparkSession) -> Iterator[None]:
    """
    Settings of a session, for as long as jobs of its writer run. The session of a streaming query
    is its own; that of a once-only load is its user's, and gets back what it had.
    """
    before = {name: spark.conf.get(name) for name in _SETTINGS}
    _set(spark, {name: value for name, value in _SETTINGS.items() if before[name] != value})
    try:
        yield
    finally:
        # A JVM that has exited must not hide the error by which that became known.
        with suppress(Exception):
            _set(spark, {name: value for name, value in before.items() if _SETTINGS[name] != value})


def _set(spark: SparkSession, settings: Mapping[str, str | None]) -> None:
    for name, value in settings.items():
        spark.conf.set(name, str(value))
