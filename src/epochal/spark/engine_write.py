"""
Jobs of Spark's own writer: files of one sink and one epoch, without rows leaving the JVM.

`DataFrameWriter` writes with Hadoop's FileOutputCommitter, algorithm 1: a task writes below
`_temporary/`, and only the commit of the job brings the files of one attempt per task, which the
driver's OutputCommitCoordinator has allowed, to the job's folder. So after a job that succeeded
these files, and no others, are in the folder. With algorithm 2 a task brings its files there by
itself, and one that then fails leaves them: it is never used.

    project ── count, hash ── refuse partition values that have no form ── sort ── write
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from epochal.contract import EngineWrite, EngineWritten
from epochal.errors import InvariantBroken, RowRejected, TaskFailed
from epochal.kit.engine_files import refusing
from epochal.kit.hive_partitions import NULL
from epochal.spark.projection import quoted
from epochal.spark.row_hash import ObservedRows
from epochal.spark.versions import is_connect
from epochal.terms import Ability, quantity

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

ABILITY = "rows are written by Spark itself"
_COMMITTER = {
    "mapreduce.fileoutputcommitter.algorithm.version": "1",
    "mapreduce.fileoutputcommitter.marksuccessfuljobs": "false",
}
LOCAL_FILES = {
    # By default Hadoop writes a second file of checksums beside each, and runs chmod for both. An
    # instance of its own, as that of other users of this JVM is kept.
    "fs.file.impl": "org.apache.hadoop.fs.RawLocalFileSystem",
    "fs.file.impl.disable.cache": "true",
}
"""Settings of Hadoop, for jobs that write to a local disk."""
SETTINGS = {
    # INT96, the default, has no statistics, and many readers take it for nanoseconds.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # As every reader but an old Spark takes them.
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.avro.datetimeRebaseModeInWrite": "CORRECTED",
}
"""Of the session, while a job of Spark's own writer runs."""
_ABORTS = (
    r"(?s)Aborting (job [0-9a-f-]{36}|task)\b.*|Job: job_.* aborted.*"
    r"|Could not delete file:.*/_temporary/.*|Suppressing exception in catch: .TASK_WRITE_FAILED.*"
)
"""What the writer and its committer log of a job that is aborted."""
_ABORT_LOGGERS = (
    "org.apache.hadoop.mapreduce.lib.output.FileOutputCommitter",
    "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "org.apache.spark.util.Utils",
)
"""
Where they log it. A filter of the whole log would be asked for lines of every level, those that
nobody wants included: parquet has some for each page, and that took a tenth of a job.
"""
_COMMITTERS_NEEDED = {
    "spark.sql.sources.commitProtocolClass": (
        "org.apache.spark.sql.execution.datasources.SQLHadoopMapReduceCommitProtocol"
    ),
    "spark.sql.parquet.output.committer.class": "org.apache.parquet.hadoop.ParquetOutputCommitter",
    "spark.sql.sources.outputCommitterClass": "",
}
"""Settings by which a platform replaces the committer, with Spark's own choice."""
_WAY = "no row is handed to Python"
_WAYS = {
    "hudi": f"by Hudi's own writer: {_WAY}",
    "iceberg": f"by Iceberg's own writer: {_WAY}",
}
_CONNECT = "Spark Connect gives no access to it"
_HUDI_CLASS = "org.apache.hudi.HoodieDatasetBulkInsertHelper"
_ICEBERG_CLASS = "org.apache.iceberg.spark.SparkRewriteTableCatalog"
_LOG_VERSION = 1
_FILE_WRITER = "org.apache.spark.sql.execution.datasources.FileFormatWriter"
_WRITE_ARGUMENTS = 10
"""Of its `write`, without those that have a default."""
_V1_SOURCES = "spark.sql.sources.useV1SourceList"
"""The formats whose files Spark writes by the committer that is needed here."""
_PACKAGES = {"avro": "org.apache.spark:spark-avro_2.13"}
"""What brings formats that Spark does not have by itself."""
_TEXT_KEYS = ("json", "avro")
"""Formats whose maps have keys of text: of others Spark writes the inner form, or nothing."""
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


class SessionWriter:
    """Spark's own writer in one session: what it can write. Its settings are read once."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._has_format = cache(self._find_format)
        self._has_class = cache(self._find_class)
        self._location_refusal = cache(self._try_location)

    def ability(self, form: str, location: str, schema: StructType | None = None) -> Ability:
        """Whether it can write rows with these columns in this format to this place, and why."""
        if form == "hudi":
            refusal = self._hudi_refusal
        else:
            refusal = (
                self._release_refusal
                or self._committer_refusal
                or self._format_refusal(form)
                or self._location_refusal(location, is_listed=form != "iceberg")
            )
        if refusal is None and schema is not None:
            refusal = type_refusal(schema, form)
        because = _WAYS.get(form, _WAY) if refusal is None else refusal
        return Ability(name=ABILITY, granted=refusal is None, because=because)

    @property
    def is_within_reach(self) -> bool:
        return not is_connect(self._spark)

    @cached_property
    def _hudi_refusal(self) -> str | None:
        if not self.is_within_reach:
            return _CONNECT
        has_hudi = self._has_class(_HUDI_CLASS)
        return None if has_hudi else "Hudi's bundle is not on Spark's class path"

    @cached_property
    def _release_refusal(self) -> str | None:
        if not self.is_within_reach:
            return _CONNECT
        if self._spark.version.startswith("3."):
            return "Spark 3.5 runs a write at once, and can't be asked afterwards what it counted"
        return None

    @cached_property
    def _committer_refusal(self) -> str | None:
        for setting, needed in _COMMITTERS_NEEDED.items():
            found = self._spark.conf.get(setting, None) or needed
            if found != needed:
                return f"{setting} is {found}"
        return None

    def _format_refusal(self, form: str) -> str | None:
        # The part that writes without a commit.
        if form == "iceberg" and not self._has_class(_ICEBERG_CLASS):
            return "Iceberg's runtime, 1.12 or newer, is not on Spark's class path"
        sources = str(self._spark.conf.get(_V1_SOURCES))
        if form != "iceberg" and form not in sources.lower().split(","):
            return f"{_V1_SOURCES} is {sources}"
        if form not in _PACKAGES or self._has_format(form):
            return None
        package = f"{_PACKAGES[form]}:{self._spark.version}"
        return (
            f"Spark has {form} only with {package} on its class path (spark.jars.packages, "
            "--packages)"
        )

    def _find_class(self, name: str) -> bool:
        from py4j.protocol import Py4JJavaError  # noqa: PLC0415  importable without pyspark

        jvm: Any = self._spark._jvm
        try:
            loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
            jvm.java.lang.Class.forName(name, False, loader)
        except Py4JJavaError:
            return False
        return True

    def _find_format(self, form: str) -> bool:
        from pyspark.errors import PySparkException  # noqa: PLC0415  importable without pyspark

        jvm: Any = self._spark._jvm
        source = jvm.org.apache.spark.sql.execution.datasources.DataSource
        try:
            source.lookupDataSource(form, self._spark._jsparkSession.sessionState().conf())
        except PySparkException:
            return False
        return True

    def _try_location(self, location: str, *, is_listed: bool) -> str | None:
        """A store is reached by Spark's own settings: whether there are any that lead there."""
        if location.startswith("file:"):
            return None
        return (self._listing_refusal if is_listed else None) or self._reach_refusal(location)

    @cached_property
    def _listing_refusal(self) -> str | None:
        from py4j.protocol import Py4JError  # noqa: PLC0415  importable without pyspark

        try:
            _listing_parts(self._spark._jvm, _is_4_0(self._spark))
        except (Py4JError, TypeError, AttributeError) as error:
            return f"this Spark's writer of files is another: {str(error).partition(chr(10))[0]}"
        return None

    def _reach_refusal(self, location: str) -> str | None:
        from py4j.protocol import Py4JError  # noqa: PLC0415  importable without pyspark
        from pyspark.errors import PySparkException  # noqa: PLC0415

        spark: Any = self._spark
        try:
            path = spark._jvm.org.apache.hadoop.fs.Path(location)
            conf = spark._jsparkSession.sessionState().newHadoopConf()
            path.getFileSystem(conf).exists(path)
        except (Py4JError, PySparkException) as error:
            told = str(getattr(error, "java_exception", error)).partition("\n")[0]
            return f"Spark does not reach {location} by its own settings: {told}"
        return None


def type_refusal(schema: StructType, form: str = "parquet") -> str | None:
    """Why rows must go to tasks: types and names that Spark's writer takes otherwise, or not."""
    names = [field.name.lower() for field in schema.fields]
    if len(set(names)) < len(names):
        return "names of columns differ in upper and lower case only"
    found = next((field for field in schema.fields if not _is_plain(field.dataType, form)), None)
    return None if found is None else f"column {found.name} is {found.dataType.simpleString()}"


def _is_plain(kind: DataType, form: str) -> bool:
    from pyspark.sql import types  # noqa: PLC0415  importable without pyspark

    match kind:
        case types.StructType():
            return type_refusal(kind, form) is None
        case types.ArrayType():
            return _is_plain(kind.elementType, form)
        case types.MapType():
            if form in _TEXT_KEYS and not isinstance(kind.keyType, types.StringType):
                return False
            return _is_plain(kind.keyType, form) and _is_plain(kind.valueType, form)
        case types.StringType():
            return kind.simpleString() == "string"
    return type(kind).__name__ in _PLAIN_TYPES


def write(
    frame: DataFrame, asked: EngineWrite, schema: pa.Schema, *, fingerprint: bool
) -> EngineWritten:
    """Run the job. Where it fails, tasks of it may still write for a while."""
    _hide_aborts(frame.sparkSession._jvm)
    observed = ObservedRows(frame, is_hashed=fingerprint)
    shaped = _shaped(_refusing(observed.frame, asked), asked)
    if asked.format == "hudi":
        # Here, as few pipelines use it.
        from epochal.spark import hudi_write  # noqa: PLC0415

        by_hudi = hudi_write.write_staged(shaped, asked)
        counted = observed.fingerprint()
        _require_same(by_hudi.rows, counted.rows, "Hudi's writer")
        return EngineWritten(
            handle=asked.handle,
            schema=schema,
            fingerprint=counted,
            files=by_hudi.files,
            bytes=by_hudi.bytes,
            reports=[by_hudi.metadata],
        )
    if asked.format == "iceberg":
        # Here, as few pipelines use it.
        from epochal.spark.iceberg_write import write_staged  # noqa: PLC0415

        staged = write_staged(shaped, asked)
        counted = observed.fingerprint()
        _require_same(staged.rows, counted.rows, "Iceberg's writer")
        return EngineWritten(
            handle=asked.handle,
            schema=schema,
            fingerprint=counted,
            files=len(staged.reports),
            bytes=staged.bytes,
            reports=staged.reports,
        )
    if asked.is_listed:
        reports, rows = _listed(shaped, asked)
        counted = observed.fingerprint()
        _require_same(rows, counted.rows, "Spark's writer")
        return EngineWritten(
            handle=asked.handle, schema=schema, fingerprint=counted, reports=reports
        )
    files, size, rows = _statistics(executed(shaped, _command(shaped, asked)))
    counted = observed.fingerprint()
    _require_same(rows, counted.rows, "Spark's writer")
    return EngineWritten(
        handle=asked.handle, schema=schema, fingerprint=counted, files=files, bytes=size
    )


def _require_same(counted: int, given: int, writer: str) -> None:
    if counted != given:
        raise TaskFailed(
            f"{writer} has counted {quantity(counted, 'row')}, and was given {given}",
            "the epoch is tried again at the next start",
        )


def _shaped(frame: DataFrame, asked: EngineWrite) -> DataFrame:
    """
    The columns that are asked for, in the order within a task that is asked for. Above what counts
    and hashes rows, as they came: no exchange is between it and the writer.
    """
    if asked.select:
        frame = _selected(frame, asked)
    return frame.sortWithinPartitions(*map(_sort_key, asked.sort_by)) if asked.sort_by else frame


def _selected(frame: DataFrame, asked: EngineWrite) -> DataFrame:
    """By columns of the JVM that are built once: for each of them it takes several calls."""
    from epochal.spark.jvm_expressions import built_once  # noqa: PLC0415  needs pyspark

    classic: Any = frame
    schema = frame.schema
    kinds = {field.name: field.dataType for field in schema.fields}

    def columns() -> Any:
        found = (_numbered(sql, name, kinds.get(name), asked) for name, sql in asked.select.items())
        return classic._jcols(*found)

    key = (_selected, schema.json(), tuple(asked.select.items()), tuple(asked.field_ids.items()))
    selected = classic._jdf.select(built_once(frame, key, columns))
    return type(classic)(selected, frame.sparkSession)  # type: ignore[no-any-return]


def _sort_key(order: str) -> Column:
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    sql, direction, _, nulls = order.rsplit(" ", 3)
    column: Column = getattr(functions.expr(sql), f"{direction}_nulls_{nulls}".lower())()
    return column


def _numbered(sql: str, name: str, kind: DataType | None, asked: EngineWrite) -> Column:
    """A column with the number that it has in the files; fields of a struct have theirs."""
    from pyspark.sql import functions, types  # noqa: PLC0415  importable without pyspark

    def within(kind: DataType, path: str) -> DataType:
        if not isinstance(kind, types.StructType):
            return kind
        return types.StructType(
            [
                types.StructField(
                    field.name,
                    within(field.dataType, f"{path}.{field.name}"),
                    field.nullable,
                    _field_id(asked, f"{path}.{field.name}"),
                )
                for field in kind.fields
            ]
        )

    column = functions.expr(sql)
    if isinstance(kind, types.StructType) and asked.field_ids:
        column = column.cast(within(kind, name))
    return column.alias(name, metadata=_field_id(asked, name))


def _field_id(asked: EngineWrite, path: str) -> dict[str, int]:
    found = asked.field_ids.get(path)
    return {} if found is None else {"parquet.field.id": found}


def _command(frame: DataFrame, asked: EngineWrite) -> Any:
    """The logical plan of `DataFrameWriter.save`, which gives no access to what it has written."""
    options = {**asked.options, **_COMMITTER, **LOCAL_FILES}
    jvm: Any = frame.sparkSession._jvm
    if not _is_4_0(frame.sparkSession):
        writer: Any = frame.write.format(asked.format).mode("errorifexists")
        if asked.partition_by:
            writer = writer.partitionBy(*asked.partition_by)
        written = writer._jwrite.options(_scala_map(jvm, tuple(options.items())))
        return written.saveCommand(jvm.scala.Option.apply(asked.folder))
    none, python = jvm.scala.Option.empty(), jvm.org.apache.spark.api.python.PythonUtils
    source = jvm.org.apache.spark.sql.execution.datasources.DataSource.apply(
        frame.sparkSession._jsparkSession,
        asked.format,
        python.toSeq([]),
        none,
        python.toSeq(list(asked.partition_by)),
        none,
        python.toScalaMap({**options, "path": asked.folder}),
        none,
    )
    mode = jvm.org.apache.spark.sql.SaveMode.ErrorIfExists
    return source.planForWriting(mode, frame._jdf.logicalPlan())


def _is_4_0(spark: SparkSession) -> bool:
    return spark.version.startswith("4.0.")


@lru_cache(maxsize=64)
def _scala_map(jvm: Any, items: tuple[tuple[str, str], ...]) -> Any:
    """Kept, as each entry takes calls into the JVM."""
    return jvm.org.apache.spark.api.python.PythonUtils.toScalaMap(dict(items))


def _listed(frame: DataFrame, asked: EngineWrite) -> tuple[list[str], int]:
    """
    Write as Spark's file sink for streams does: tasks put files under unique names, and an entry
    of a log names those of the attempts that count. What the entry says of each file, and how many
    rows were written. The log is on the driver's disk: in a store, where the sink keeps its own, an
    entry takes some fifteen requests.
    """
    spark: Any = frame.sparkSession
    activate(spark)
    jvm, session = spark._jvm, spark._jsparkSession
    parts = _listing_parts(jvm, _is_4_0(spark))
    to_seq = jvm.org.apache.spark.api.python.PythonUtils.toSeq
    execution = frame._jdf.queryExecution()
    output = execution.analyzed().output()
    columns = [output.apply(place) for place in range(output.size())] if asked.partition_by else ()
    by_name = {column.name(): column for column in columns}
    options = _scala_map(jvm, tuple(asked.options.items()))
    settings = session.sessionState().newHadoopConfWithOptions(options)
    metrics = parts.make_metrics()
    tracker = parts.make_tracker(parts.make_serializable(settings), metrics)
    with TemporaryDirectory(prefix="epochal-") as folder:
        committer = parts.make_committer("0", asked.folder)
        log = parts.make_log(_LOG_VERSION, session, f"file:{folder}", parts.nothing)
        committer.setupManifestOptions(log, 0)
        parts.write(
            session,
            execution.executedPlan(),
            _file_format(spark, asked.format),
            committer,
            parts.make_output(asked.folder, _scala_map(jvm, ()), output),
            settings,
            to_seq([by_name[name] for name in asked.partition_by]),
            parts.nothing,
            to_seq([tracker]),
            options,
            *parts.defaults,
        )
        version, *reports = (Path(folder) / "0").read_text(encoding="utf-8").splitlines()
    if version != f"v{_LOG_VERSION}":
        raise InvariantBroken(f"a log of Spark's begins with {version!r}")
    return reports, int(metrics.apply("numOutputRows").value())


@dataclass(frozen=True, slots=True, kw_only=True)
class _ListingParts:
    """What Spark's file sink for streams is made of, in one JVM."""

    write: Any
    defaults: tuple[Any, ...]
    """What releases have added to its arguments."""
    make_output: Any
    make_committer: Any
    make_log: Any
    make_metrics: Any
    make_tracker: Any
    make_serializable: Any
    nothing: Any


@lru_cache(maxsize=1)
def _listing_parts(jvm: Any, is_4_0: bool) -> _ListingParts:
    """Kept: a class of the JVM is found by one call for each part of its name."""
    execution = jvm.org.apache.spark.sql.execution
    sources, streaming = execution.datasources, execution.streaming
    writer = sources.FileFormatWriter
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    methods = jvm.java.lang.Class.forName(_FILE_WRITER, True, loader).getMethods()
    arguments = max(one.getParameterCount() for one in methods if one.getName() == "write")
    numbers = range(_WRITE_ARGUMENTS + 1, arguments + 1)
    logs = streaming if is_4_0 else streaming.sinks
    return _ListingParts(
        write=writer.write,
        defaults=tuple(getattr(writer, f"write$default${number}")() for number in numbers),
        make_output=getattr(sources, "FileFormatWriter$OutputSpec"),
        make_committer=streaming.ManifestFileCommitProtocol,
        make_log=logs.FileStreamSinkLog,
        make_metrics=sources.BasicWriteJobStatsTracker.metrics,
        make_tracker=sources.BasicWriteJobStatsTracker,
        make_serializable=jvm.org.apache.spark.util.SerializableConfiguration,
        nothing=jvm.scala.Option.empty(),
    )


def activate(spark: Any) -> None:
    """
    Make the session that of this thread, where parts of Spark look for it: a thread of our own, as
    where several sinks are written at once, has none.
    """
    _sessions(spark._jvm).setActiveSession(spark._jsparkSession)


@lru_cache(maxsize=1)
def _sessions(jvm: Any) -> Any:
    """Kept: a class of the JVM is found by one call for each part of its name."""
    return jvm.org.apache.spark.sql.classic.SparkSession


def _file_format(spark: Any, form: str) -> Any:
    sources = spark._jvm.org.apache.spark.sql.execution.datasources.DataSource
    conf = spark._jsparkSession.sessionState().conf()
    found = sources.lookupDataSource(form, conf)
    if found.getSimpleName().endswith("DataSourceV2"):
        found = found.newInstance().fallbackFileFormat()
    return found.newInstance()


def executed(frame: DataFrame, command: Any) -> Any:
    """Run a command in the frame's session. The physical plan that ran, with its metrics."""
    spark: Any = frame.sparkSession
    run = spark._jsparkSession.sessionState().executePlan(command, _every_command(spark._jvm))
    return run.commandExecuted().commandPhysicalPlan()


@lru_cache(maxsize=1)
def _every_command(jvm: Any) -> Any:
    """Kept: a class of the JVM is found by one call for each part of its name."""
    modes = getattr(jvm.org.apache.spark.sql.execution, "CommandExecutionMode$")
    return getattr(modes, "MODULE$").ALL()


def _statistics(plan: Any) -> tuple[int, int, int]:
    """Files, bytes and rows, as the writer counts them for the attempts that count."""
    # With an exchange in it, a plan is adaptive, and the writer is within its last stage.
    if plan.nodeName() == "AdaptiveSparkPlan":
        plan = plan.executedPlan()
    if plan.nodeName().startswith("ResultQueryStage"):
        plan = plan.plan()
    metrics = plan.metrics()
    files, size, rows = (
        int(metrics.apply(name).value()) for name in ("numFiles", "numOutputBytes", "numOutputRows")
    )
    return files, size, rows


def _refusing(frame: DataFrame, asked: EngineWrite) -> DataFrame:
    """
    The same rows, but for nulls of partition columns of strings. A row that the target would not
    take, or with a value that names no folder, fails the job.
    """
    from pyspark.sql import functions  # noqa: PLC0415  importable without pyspark

    for name in asked.required:
        error = functions.raise_error(functions.lit(_is_null(name).to_line()))
        kept = functions.coalesce(quoted(name), error.cast(frame.schema[name].dataType))
        frame = frame.withColumn(name, kept)
    for name in () if asked.select else _texts(frame, asked.partition_by):
        text = functions.expr(refusing(name, quoted(name)))
        # The writer gets the name of a null's folder instead of the null: of a column without nulls
        # it takes no copy, and keeps the order.
        frame = frame.withColumn(name, functions.coalesce(text, functions.lit(NULL)))
    return frame


def _texts(frame: DataFrame, partition_by: Sequence[str]) -> list[str]:
    """The partition columns of strings."""
    from pyspark.sql.types import StringType  # noqa: PLC0415  importable without pyspark

    return [name for name in partition_by if isinstance(frame.schema[name].dataType, StringType)]


def _is_null(name: str) -> RowRejected:
    return RowRejected(
        f"column {name} is required, and a row has none",
        f'where="{name} IS NOT NULL" leaves it out',
    )


@lru_cache(maxsize=1)
def _hide_aborts(jvm: Any) -> None:
    """
    Keep what Spark's writer logs of a job that is aborted out of the log of this JVM. A stop of a
    query aborts the job that writes, which is no error; and of one that fails, the error itself is
    logged by the task and raised. Where the log is not Log4j's, nothing is done.
    """
    with suppress(Exception):
        core = jvm.org.apache.logging.log4j.core
        results = core.Filter.Result
        found = core.filter.RegexFilter.createFilter(
            _ABORTS, None, False, results.DENY, results.NEUTRAL
        )
        found.start()
        context = jvm.org.apache.logging.log4j.LogManager.getContext(False)
        settings = context.getConfiguration()
        warn = jvm.org.apache.logging.log4j.Level.WARN
        for name in _ABORT_LOGGERS:
            logger = settings.getLoggerConfig(name)
            if logger.getName() != name:  # that of a logger above it
                # Never below WARN: in a shell Spark lets all pass that has a logger of its own.
                level = logger.getLevel() if logger.getLevel().isMoreSpecificThan(warn) else warn
                logger = core.config.LoggerConfig(name, level, True)
                settings.addLogger(name, logger)
            logger.addFilter(found)
        context.updateLoggers()
