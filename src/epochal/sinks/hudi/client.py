"""
Hudi's write client in the JVM of the running Spark: instants, their states, commits and rollbacks.

    start       an instant is requested on the timeline, with a heartbeat
    write       (`spark.hudi_write`) it is inflight, and Hudi's writer puts files under it
    complete    under Hudi's lock: `inside` looks at the timeline, then the instant is completed
    roll_back   its files are removed, then the instant

A pending instant whose heartbeat has stopped for some minutes is rolled back by the next writer
that cleans the table. This process takes the heartbeat up before it completes an instant of another
one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from epochal.errors import Misconfigured, TryAgain
from epochal.sinks.hudi.ledger import KEY
from epochal.storage.urls import first_line

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

JavaObject: TypeAlias = Any
"""An object that lives in Spark's JVM."""
FOR_PEOPLE = "the next start of the pipeline finishes what is decided, and clears the rest"
_BUNDLE = "org.apache.hudi:hudi-spark3.5-bundle_2.12:1.2.0"
_CLIENT_CLASS = "org.apache.hudi.client.BaseHoodieWriteClient"
_OLDEST_TABLE = 8
_WRITE = "hoodie.datasource.write."
_KRYO = "org.apache.spark.serializer.KryoSerializer"


class WriteConflict(TryAgain):
    """A commit of another writer, since this one began, that Hudi can't have beside it."""


class State(Enum):
    """What the timeline shows of an instant."""

    PENDING = "pending"
    COMPLETED = "completed"
    ROLLED_BACK_HALF = "its rollback has begun"
    ABSENT = "absent"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableKeys:
    """By what a table finds the row that another one replaces."""

    record: Sequence[str]
    partition: Sequence[str]
    order: Sequence[str]
    """Of two rows of one key, the higher by these columns is kept."""
    generator: str
    """Hudi's class that makes a key of a row."""
    merge_mode: str
    is_stored: bool
    """Each row in a file has its key beside it."""
    has_change_log: bool


def _read_keys(table: JavaObject) -> TableKeys:
    return TableKeys(
        record=list(table.getRecordKeyFields().orElse([])),
        partition=list(table.getPartitionFields().orElse([])),
        order=list(table.getOrderingFields()),
        generator=str(table.getKeyGeneratorClassName()).rpartition(".")[2],
        merge_mode=str(table.getRecordMergeMode()),
        is_stored=bool(table.populateMetaFields()),
        has_change_log=bool(table.isCDCEnabled()),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Before:
    """
    The timeline when rows began to be written: instants that completed since then are compared with
    them for conflicts. The process that commits may be another one than that which wrote.
    """

    completed: str | None
    """The last instant that was complete, by the time of its request."""
    pending: Sequence[str]


def running_spark() -> SparkSession | None:
    """The classic Spark session of this process; None where there is none."""
    try:
        from pyspark import SparkContext  # noqa: PLC0415  importable without pyspark
        from pyspark.sql import SparkSession  # noqa: PLC0415
    except ImportError:
        return None
    context: Any = SparkContext._active_spark_context
    if context is None or context._jsc is None:
        return None
    return SparkSession.builder.getOrCreate()


def require_spark() -> SparkSession:
    spark = running_spark()
    if spark is None:
        raise Misconfigured(
            "a Hudi table is read and committed by Hudi's client in Spark's JVM, and this process "
            "has no Spark session in classic mode: it can only list what is prepared",
            FOR_PEOPLE,
        )
    return spark


@contextmanager
def translate_errors(doing: str) -> Iterator[None]:
    """Raise one of our errors instead of what a call into the JVM raises."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, _jvm_errors()):
            raise
        text = _java_text(error)
        if "TableNotFoundException" in text:
            raise Misconfigured(
                f"{doing}: there is no Hudi table",
                "make it first, with its columns: CREATE TABLE … USING hudi",
            ) from error
        kind = WriteConflict if "ConflictException" in text else TryAgain
        raise kind(f"{doing}: {text}") from error


def _jvm_errors() -> tuple[type[Exception], ...]:
    """What a call into the JVM raises: Spark turns some of the gateway's errors into its own."""
    try:
        from py4j.protocol import Py4JError  # noqa: PLC0415  importable without pyspark
        from pyspark.errors import PySparkException  # noqa: PLC0415
    except ImportError:
        return ()
    return Py4JError, PySparkException


def _java_text(error: BaseException) -> str:
    """The Java exception and its innermost cause, a line each."""
    found = getattr(error, "java_exception", None)
    if found is None:
        return first_line(str(error))
    try:
        last = found
        while last.getCause() is not None:
            last = last.getCause()
        texts = dict.fromkeys(first_line(str(one.toString())) for one in (found, last))
        return ": ".join(texts)
    except Exception:  # noqa: BLE001  the JVM may have exited
        return first_line(str(error))


class _InsideLock:
    """A Java function of two arguments, which Hudi calls in the lock of a commit."""

    class Java:
        implements = ("java.util.function.BiConsumer",)

    def __init__(self, call: Callable[[JavaObject], None]) -> None:
        self._call = call
        self.error: BaseException | None = None
        """What it raised: through the JVM only its text comes back."""

    def accept(self, _: JavaObject, metadata: JavaObject) -> None:
        try:
            self._call(metadata)
        except BaseException as error:
            self.error = error
            raise


class HudiClient:
    """One Hudi table, as the JVM of one Spark application sees it."""

    def __init__(self, spark: SparkSession, table: str, options: Mapping[str, str]) -> None:
        self._spark = cast("Any", spark)
        self._jvm = self._spark._jvm
        self._hudi = self._jvm.org.apache.hudi
        self._table = table
        self._require_session()
        tables = self._hudi.storage.hadoop.HadoopStorageConfiguration
        self._conf = tables(self._spark.sparkContext._jsc.hadoopConfiguration())
        meta = self._meta()
        self.table_type = str(meta.getTableType().name())
        self.keys = _read_keys(meta.getTableConfig())
        self.schema, self._schema_text = self._read_schema(meta)
        self.options = {**options, **self._table_options(meta)}
        self._client: JavaObject = None

    def is_of(self, spark: SparkSession | None) -> bool:
        return spark is not None and spark.sparkContext is self._spark.sparkContext

    # Before the first row

    def _require_session(self) -> None:
        conf = self._spark.sparkContext.getConf()
        if not _has_class(self._jvm, _CLIENT_CLASS):
            raise Misconfigured(
                "Hudi is not on Spark's class path",
                f"spark.jars.packages={_BUNDLE} before the session is made; there is no bundle of "
                "Hudi 1.2 for Spark 4",
            )
        if conf.get("spark.serializer", "") != _KRYO:
            raise Misconfigured(
                "Hudi needs Spark's Kryo serializer", f"spark.serializer={_KRYO} before the start"
            )
        if conf.get("spark.speculation", "false").lower() == "true":
            raise Misconfigured(
                "spark.speculation is true: of two copies of a task, Hudi may count the files of "
                "the one that is killed",
                "spark.speculation=false",
            )

    def _meta(self) -> JavaObject:
        """The table and its timeline, as they are now."""
        builder = self._hudi.common.table.HoodieTableMetaClient.builder()
        return builder.setConf(self._conf).setBasePath(self._table).build()

    def _read_schema(self, meta: JavaObject) -> tuple[StructType, str]:
        from pyspark.sql.types import StructType  # noqa: PLC0415  importable without pyspark

        resolver = self._hudi.common.table.TableSchemaResolver(meta)
        schema = resolver.getTableSchema(False)
        conversions = self._hudi.HoodieSchemaConversionUtils
        columns = conversions.convertHoodieSchemaToStructType(schema)
        return StructType.fromJson(json.loads(columns.json())), str(schema.toString())

    def has_these_columns(self) -> bool:
        """Whether the table still has the columns that were read at first."""
        return self._read_schema(self._meta())[0] == self.schema

    def _table_options(self, meta: JavaObject) -> dict[str, str]:
        table = meta.getTableConfig()
        version = int(table.getTableVersion().versionCode())
        if version < _OLDEST_TABLE:
            raise Misconfigured(
                f"the table at {self._table} has version {version}: its timeline does not say when "
                "an instant was completed",
                "upgrade it to Hudi's version 8 or newer, with no writer at work: "
                "CALL upgrade_table(…)",
            )
        fields = self._hudi.common.table.HoodieTableConfig.getPartitionFieldPropForKeyGenerator
        partition_fields = fields(table)
        found = {
            "hoodie.table.name": table.getTableName(),
            "hoodie.table.type": self.table_type,
            f"{_WRITE}table.type": self.table_type,
            "hoodie.write.table.version": str(version),
            "hoodie.avro.schema": self._schema_text,
            f"{_WRITE}keygenerator.class": table.getKeyGeneratorClassName(),
            f"{_WRITE}hive_style_partitioning": table.getHiveStylePartitioningEnable(),
            f"{_WRITE}partitionpath.urlencode": table.getUrlEncodePartitioning(),
            "hoodie.populate.meta.fields": str(self.keys.is_stored).lower(),
            f"{_WRITE}partitionpath.field": partition_fields.orElse("")
            if self.keys.partition
            else "",
        }
        if self.keys.record:
            found[f"{_WRITE}recordkey.field"] = ",".join(self.keys.record)
        if self.keys.order:
            found["hoodie.table.ordering.fields"] = ",".join(self.keys.order)
            found["hoodie.write.record.merge.mode"] = self.keys.merge_mode
            found["hoodie.write.record.merge.strategy.id"] = table.getRecordMergeStrategyId()
        return {name: str(value) for name, value in found.items() if value is not None}

    # Instants

    def new_instant(self) -> str:
        """A time on the timeline, which nothing is known by yet."""
        return str(self._writer.createNewInstantTime(True))

    def start(self, instant: str) -> None:
        """
        Request an instant under a time that was drawn before. Hudi's own `startCommit` draws the
        time itself: a process that is killed in it leaves an instant that names no owner.
        """
        meta = self._meta()
        option, string = self._hudi.common.util.Option, self._jvm.java.lang.String
        types = [option._java_lang_class, string._java_lang_class, meta.getClass()]
        method = _class(self._jvm, _CLIENT_CLASS).getDeclaredMethod(
            "startCommit", self._array(self._jvm.java.lang.Class, types)
        )
        method.setAccessible(True)
        values = [option.of(instant), meta.getCommitActionType(), meta]
        method.invoke(self._writer, self._array(self._jvm.java.lang.Object, values))

    def get_ready(self, instant: str) -> Before:
        """Make the table's metadata ready for rows of an instant."""
        table = self._writer.initTable(self._operation, self._hudi.common.util.Option.of(instant))
        self._writer.preWrite(instant, self._operation, table.getMetaClient())
        last = self._field("lastCompletedTxnAndMetadata").get(self._writer)
        pending = self._field("pendingInflightAndRequestedInstants").get(self._writer)
        return Before(
            completed=str(last.get().getLeft().requestedTime()) if last.isPresent() else None,
            pending=sorted(map(str, pending)),
        )

    def make_inflight(self, instant: str) -> None:
        """What the writer does with an instant before it writes."""
        meta = self._meta()
        meta.getActiveTimeline().transitionRequestedToInflight(meta.getCommitActionType(), instant)

    def state(self, instant: str) -> State:
        meta = self._meta()
        timeline = meta.getActiveTimeline()
        if timeline.getCommitsTimeline().filterCompletedInstants().containsInstant(instant):
            return State.COMPLETED
        services = self._writer.getTableServiceClient()
        if services.getPendingRollbackInfo(meta, instant, True).isPresent():
            return State.ROLLED_BACK_HALF
        is_pending = timeline.filterInflightsAndRequested().containsInstant(instant)
        return State.PENDING if is_pending else State.ABSENT

    def partitions_written_since(self, before: Before) -> set[str]:
        """
        Where commits after `before` have put rows, but for those that only moved them. All are in
        the active timeline: Hudi archives nothing beyond an instant that is pending, as ours is.
        """
        timeline = self._meta().getActiveTimeline().getCommitsTimeline().filterCompletedInstants()
        operations = self._hudi.common.model.WriteOperationType
        found: set[str] = set()
        for instant in timeline.getInstants():
            time = str(instant.requestedTime())
            if time not in before.pending and time <= (before.completed or ""):
                continue
            metadata = self._hudi.common.table.timeline.TimelineUtils.getCommitMetadata(
                instant, timeline
            )
            if not operations.isCompactionOrClustering(metadata.getOperationType()):
                found.update(map(str, metadata.getPartitionToWriteStats().keySet()))
        return found

    def complete(
        self,
        instant: str,
        metadata: str | None,
        before: Before,
        inside: Callable[[State], Mapping[str, str]],
    ) -> None:
        """
        Complete an instant with the files of its metadata. `inside` is called in Hudi's lock, with
        the state of the instant there; it returns extra metadata, or raises, and then nothing is
        completed.
        """
        from pyspark import java_gateway  # noqa: PLC0415  importable without pyspark

        gateway: Any = java_gateway
        gateway.ensure_callback_server_started(self._spark.sparkContext._gateway)
        writer = self._writer
        writer.getHeartbeatClient().start(instant)
        writer.setOperationType(self._operation)
        self._restore(before)
        option = self._hudi.common.util.Option

        def call(written: JavaObject) -> None:
            for name, value in inside(self.state(instant)).items():
                written.addMetadata(name, value)

        function = _InsideLock(call)
        try:
            writer.commitStats(
                instant,
                self._stats(metadata),
                option.empty(),
                self._meta().getCommitActionType(),
                self._jvm.java.util.HashMap(),
                option.of(function),
            )
        except BaseException:
            # A heartbeat that a failed commit has stopped is never started again by this client.
            self.close()
            if function.error is not None:
                raise function.error from None
            raise

    def _restore(self, before: Before) -> None:
        """The two fields in which the client keeps what it compares for conflicts."""
        option, pair = self._hudi.common.util.Option, self._hudi.common.util.collection.Pair
        last = option.empty()
        for one in self._meta().getActiveTimeline().filterCompletedInstants().getInstants():
            if one.requestedTime() == before.completed:
                last = option.of(pair.of(one, self._jvm.java.util.HashMap()))
        self._field("lastCompletedTxnAndMetadata").set(self._writer, last)
        pending = self._jvm.java.util.HashSet()
        for instant in before.pending:
            pending.add(instant)
        self._field("pendingInflightAndRequestedInstants").set(self._writer, pending)

    def _stats(self, metadata: str | None) -> JavaObject:
        if metadata is None:
            return self._jvm.java.util.ArrayList()
        kind = _class(self._jvm, "org.apache.hudi.common.model.HoodieCommitMetadata")
        read = self._hudi.common.model.HoodieCommitMetadata.fromJsonString
        return read(metadata, kind).getWriteStats()

    def roll_back(self, instant: str) -> None:
        """Remove a pending instant and its files. May be repeated."""
        if self.state(instant) in {State.PENDING, State.ROLLED_BACK_HALF}:
            self._writer.rollback(instant)
        left = self.state(instant)
        if left in {State.PENDING, State.ROLLED_BACK_HALF}:
            raise TryAgain(
                f"the rollback of instant {instant} of {self._table} is at work elsewhere",
                "or the process that began it was killed: Hudi waits until its heartbeat is old",
            )
        with suppress(Exception):  # of an instant that was started elsewhere there is none
            self._writer.getHeartbeatClient().stop(instant)

    # What is there

    def ledger_text(self) -> str | None:
        """The ledger in the newest commit that has one, by the time of its completion."""
        meta = self._meta()
        found = self._newest_ledger(meta.getActiveTimeline())
        if found is not None:
            return found
        archived = meta.getArchivedTimeline()
        archived.loadCompletedInstantDetailsInMemory()
        return self._newest_ledger(archived)

    def _newest_ledger(self, timeline: JavaObject) -> str | None:
        completed = timeline.getCommitsTimeline().filterCompletedInstants()
        instants = completed.getReverseOrderedInstantsByCompletionTime().iterator()
        while instants.hasNext():
            instant = instants.next()
            if instant.getAction() not in {"commit", "deltacommit"}:
                continue
            text = timeline.readCommitMetadata(instant).getMetadata(KEY)
            if text is not None:
                return str(text)
        return None

    def sizes(self, relatives: Sequence[str]) -> list[int | None]:
        """The size of each file of the table; None where there is none."""
        base = self._jvm.org.apache.hadoop.fs.Path(self._table)
        files = base.getFileSystem(self._spark.sparkContext._jsc.hadoopConfiguration())
        found: list[int | None] = []
        for relative in relatives:
            path = self._jvm.org.apache.hadoop.fs.Path(base, relative)
            found.append(int(files.getFileStatus(path).getLen()) if files.exists(path) else None)
        return found

    def rows(self) -> int:
        return int(self._spark.read.format("hudi").load(self._table).count())

    def close(self) -> None:
        """Stop heartbeats. What is pending stays so until Hudi takes it for dead."""
        client, self._client = self._client, None
        if client is not None:
            with suppress(Exception):  # of a JVM that has exited there is nothing to close
                client.close()

    # The JVM

    @property
    def _writer(self) -> JavaObject:
        if self._client is None:
            sources = self._hudi.DataSourceUtils
            self._client = sources.createHoodieClient(
                self._spark.sparkContext._jsc,
                self._schema_text,
                self._table,
                self.options["hoodie.table.name"],
                self.options,
            )
        return self._client

    @property
    def _operation(self) -> JavaObject:
        operation = self.options[f"{_WRITE}operation"]
        return self._hudi.common.model.WriteOperationType.fromValue(operation)

    def _field(self, name: str) -> JavaObject:
        field = _class(self._jvm, _CLIENT_CLASS).getDeclaredField(name)
        field.setAccessible(True)
        return field

    def _array(self, kind: JavaObject, values: Sequence[JavaObject]) -> JavaObject:
        array = self._spark.sparkContext._gateway.new_array(kind, len(values))
        for place, value in enumerate(values):
            array[place] = value
        return array


def _class(jvm: JavaObject, name: str) -> JavaObject:
    loader = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    return jvm.java.lang.Class.forName(name, True, loader)


def _has_class(jvm: JavaObject, name: str) -> bool:
    from py4j.protocol import Py4JError  # noqa: PLC0415  importable without pyspark

    try:
        _class(jvm, name)
    except Py4JError:
        return False
    return True
