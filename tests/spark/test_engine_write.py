"""
Jobs of Spark's own writer: what they leave is prepared like the rows of tasks, and judged the same.
"""

from __future__ import annotations

import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable
from pyspark.errors import StreamingQueryException
from pyspark.sql import functions
from spark_stage import FILES_ARE_WRITTEN_BY, Killer, Source, ids, run_to_end, wait_for

from epochal.contract import EngineWrite
from epochal.coordinator.journal import read_state
from epochal.errors import Misconfigured, RowRejected, TaskFailed, TryAgain, Unsettled
from epochal.logs import checkpoint_log, open_log
from epochal.sinks.delta import Delta
from epochal.sinks.files import Files, layout, read_epochs
from epochal.sinks.memory import Memory
from epochal.spark import engine_write
from epochal.spark.driver_write import DriverWrites
from epochal.spark.jobs import COMPILED, session_settings
from epochal.spark.pipeline import Pipeline
from epochal.spark.row_hash import ObservedRows, fingerprint_of
from epochal.terms import (
    JOB_PARTITION,
    EpochNumber,
    Fingerprint,
    Generation,
    Identity,
    SinkName,
    Uid,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STEPS = ("claimed", "begun", "prepared", "rehearsed", "gated", "decided", "committed f", "settled")
IDENTITY = Identity(
    pipeline="plain", uid=Uid("abcdefgh2345"), sink=SinkName("f"), generation=Generation(0)
)
BY_TASKS = 1 << 30
"""As `max_file_bytes`: files are then written by tasks."""
COLUMNS = (
    "id",
    "cast(id % 7 as tinyint) small",
    "if(id % 5 = 0, null, cast(id as float)) single",
    "cast(id as double) / 7 double",
    "cast(id / 3 as decimal(9, 2)) price",
    "cast(id as decimal(38, 10)) wide",
    "concat('order ', id) `a title, with (signs)`",
    "cast(concat('b', id) as binary) bytes",
    "id % 2 = 0 paid",
    "timestamp_seconds(id - 4000000000) at",
    "timestamp_ntz'2026-01-31 12:00:00' local_at",
    "date_from_unix_date(cast(id % 20000 as int) - 300000) day",
    "if(id % 3 = 0, null, named_struct('x', nullif(id, 7), 'y', array(id, null))) pair",
    "map(concat('k', id), named_struct('z', id)) map",
)


def seen(folder: Path) -> list[int]:
    """What a reader sees that opens every file below the folder."""
    return sorted(
        row["id"]
        for path in folder.rglob("*.parquet")
        for row in pq.ParquetFile(path).read().to_pylist()
    )


def whole(folder: Path) -> list[int]:
    return sorted(read_epochs(folder).to_table()["id"].to_pylist())


def leftovers(pipeline: Pipeline) -> list[Any]:
    """What the committers list, and every file beside the manifests that no reader sees."""
    coordinator = pipeline._run.coordinator
    listed = []
    for sink in pipeline.sinks:
        listed += sink.committer(coordinator.identity(sink.name), pipeline.limits).in_doubt()
    return listed


@pytest.fixture(autouse=True)
def few_rows_are_written_by_jobs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DriverWrites, "expected", lambda *_: None)


def is_by_job(folder: Path) -> bool:
    """Whether all files in a folder are those of jobs of Spark's own writer."""
    handles = [layout.handle_in(path.name) for path in folder.rglob("*.parquet")]
    return {handle.partition for handle in handles} == {JOB_PARTITION}


def plain(rows: int, spark: SparkSession, parts: int = 3) -> DataFrame:
    return spark.range(rows, numPartitions=parts).selectExpr(*COLUMNS)


def observed_and_written(frame: DataFrame, folder: Path, *, is_hashed: bool = True) -> Fingerprint:
    observed = ObservedRows(frame, is_hashed=is_hashed)
    handle = IDENTITY.job_handle(EpochNumber(0), 1)
    asked = EngineWrite(handle=handle, format="parquet", folder=str(folder))
    engine_write.executed(observed.frame, engine_write._command(observed.frame, asked))
    return observed.fingerprint()


def test_the_observed_sum_is_that_of_the_rows(spark: SparkSession, tmp_path: Path) -> None:
    frames = plain(1000, spark), plain(0, spark), plain(1, spark, 1)
    checkpointed = [frame.localCheckpoint() for frame in frames]
    for at, frame in enumerate((*frames, *checkpointed)):
        for is_hashed in (True, False):
            folder = tmp_path / f"{at} {is_hashed}"
            found = observed_and_written(frame, folder, is_hashed=is_hashed)
            expected = fingerprint_of(frame)
            assert found == (expected if is_hashed else Fingerprint(expected.rows))


def test_rows_are_observed_alike_without_compiled_code(spark: SparkSession, tmp_path: Path) -> None:
    frame = plain(1000, spark).localCheckpoint()
    expected = fingerprint_of(frame)
    wide = frame.selectExpr("*", *(f"id + {n} c{n}" for n in range(200))).localCheckpoint()
    with session_settings(spark, COMPILED):
        assert observed_and_written(wide, tmp_path / "wide") == fingerprint_of(wide)
    settings = {"spark.sql.codegen.wholeStage": "false"}
    with session_settings(spark, settings):
        assert observed_and_written(frame, tmp_path / "by stage") == expected
    with session_settings(spark, {**settings, "spark.sql.codegen.factoryMode": "NO_CODEGEN"}):
        assert observed_and_written(frame, tmp_path / "interpreted") == expected


def test_to_plan_a_job_observes_no_row(spark: SparkSession, tmp_path: Path) -> None:
    """Spark evaluates a filter of rows that are in the plan itself while it plans."""
    frame = spark.sql("SELECT * FROM VALUES (1, 'a'), (2, NULL) AS t (id, title)")
    observed = ObservedRows(frame, is_hashed=True)
    observed.frame._jdf.queryExecution().executedPlan()
    assert observed.fingerprint() == Fingerprint(0, 0)
    assert observed_and_written(frame, tmp_path / "out") == fingerprint_of(frame)


def test_a_column_is_computed_once_to_be_hashed_and_written(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Not so where the optimizer takes what hashes a row below the projection that computes it."""
    drawn = functions.udf(lambda _: str(uuid4()))  # which Spark believes to be deterministic
    frame = spark.range(10).select("id", drawn("id").alias("drawn"))
    with session_settings(spark, {"spark.sql.optimizer.avoidDoubleFilterEval": "false"}):
        found = observed_and_written(frame, tmp_path / "out")
    assert found == fingerprint_of(spark.read.parquet(str(tmp_path / "out")))


def test_rows_that_spark_writes_are_those_that_tasks_write(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The same sums, the same rows for Arrow and for Spark, and the session as it was before."""
    frame = plain(300, spark)
    setting = "spark.sql.parquet.outputTimestampType"
    spark.conf.set(setting, "INT96")
    found = {}
    try:
        for way, options in {"Spark": {}, "tasks": {"max_file_bytes": BY_TASKS}}.items():
            out, checkpoint = tmp_path / way / "out", tmp_path / way / "checkpoint"
            sink = Files(out, name="f", partition_by=["small"], compression="lz4", **options)
            Pipeline(way, [sink]).write(frame, run="once", checkpoint=checkpoint)
            state = read_state(open_log(f"{checkpoint}/epochal/runs/once/log"))
            assert state.sinks["f"]["writer"].startswith(way)
            again = read_epochs(out, spark=spark)
            assert fingerprint_of(again.select(frame.columns)) == state.totals["f"].fingerprint
            arrow = read_epochs(out).to_table().sort_by("id")
            found[way] = (state.totals["f"].fingerprint, arrow.select(frame.columns).to_pylist())
            assert is_by_job(out) == (way == "Spark")
            (column,) = {
                pq.ParquetFile(path).metadata.row_group(0).column(0).compression
                for path in out.rglob("*.parquet")
            }
            assert column == "LZ4"
        assert spark.conf.get(setting) == "INT96"
    finally:
        spark.conf.unset(setting)
    assert found["Spark"] == found["tasks"]
    assert found["Spark"][0].rows == 300


def test_a_load_that_ends_leaves_another_its_settings_and_the_last_one_restores_them(
    spark: SparkSession,
) -> None:
    """Two once-only loads at the same time, in one session."""
    setting = "spark.sql.parquet.outputTimestampType"
    spark.conf.set(setting, "INT96")
    try:
        with ExitStack() as second:
            with session_settings(spark, engine_write.SETTINGS):
                second.enter_context(session_settings(spark, engine_write.SETTINGS))
            assert spark.conf.get(setting) == "TIMESTAMP_MICROS"
        assert spark.conf.get(setting) == "INT96"
    finally:
        spark.conf.unset(setting)


@pytest.mark.compat
def test_a_driver_that_dies_at_any_step_leaves_every_row_of_a_job_visible_once(
    source: Source, checkpoint: Path, killer: Killer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    other = Memory(name="m", where="id % 3 = 0")
    pipeline = Pipeline("plain", [Files(out, name="f"), other], watch=killer.watch)
    deaths = [(step, None if step == "claimed" else at) for at, step in enumerate(STEPS)]
    source.add_numbers(epochs=len(deaths) + 1)
    for killer.at in deaths:
        assert killer.run(pipeline, source.stream, checkpoint), f"never reached {killer.at}"
        assert seen(out) == sorted({*seen(out)})
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert seen(out) == whole(out) == source.ids
    assert ids(other) == [n for n in source.ids if n % 3 == 0]
    assert leftovers(pipeline) == []
    assert is_by_job(out) == (FILES_ARE_WRITTEN_BY == "Spark")


def test_a_stateful_query_and_epochs_without_rows_are_written_by_jobs(
    source: Source, checkpoint: Path, killer: Killer, tmp_path: Path
) -> None:
    out, none = tmp_path / "out", tmp_path / "none"
    sinks = [Files(out, name="f"), Files(none, name="none", where="id < 0")]
    source.add(
        [{"id": n, "v": "a"} for n in (1, 2, 2, 3)], [{"id": n} for n in (2, 3)], [{"id": 4}]
    )
    df = source.stream.dropDuplicates(["id"])
    pipeline = Pipeline("state", sinks, watch=killer.watch)
    for killer.at in (("prepared", 0), ("decided", 1)):
        assert killer.run(pipeline, df, checkpoint)
    assert not killer.run(pipeline, df, checkpoint)
    assert seen(out) == whole(out) == [1, 2, 3, 4]
    assert seen(none) == []
    assert list(none.rglob("*.parquet")) == []
    assert leftovers(pipeline) == []


def test_a_dictionary_that_was_given_up_is_not_begun_again(
    spark: SparkSession, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The files are as they would be; Hadoop's checksums don't lie beside them."""
    source, out = tmp_path / "source", tmp_path / "out"
    frame = spark.range(60_000, numPartitions=2).selectExpr("id", "id % 100 few", "id || 'x' text")
    frame.write.parquet(str(source))
    asked: list[EngineWrite] = []
    write = engine_write.write

    def noting(frame: Any, wanted: EngineWrite, *rest: Any, **options: Any) -> Any:
        asked.append(wanted)
        written = write(frame, wanted, *rest, **options)
        assert list(Path(wanted.folder.removeprefix("file://")).rglob(".*.crc")) == []
        return written

    monkeypatch.setattr(engine_write, "write", noting)
    reader = spark.readStream.schema(frame.schema).option("maxFilesPerTrigger", 1)
    run_to_end(Pipeline("d", [Files(out, name="f")]), reader.parquet(str(source)), checkpoint)
    tried = [{key for key in one.options if "dictionary" in key} for one in asked]
    assert tried == [set(), {f"parquet.enable.dictionary#{name}" for name in ("id", "text")}]
    for path in out.glob("*.parquet"):
        group = pq.ParquetFile(path).metadata.row_group(0)
        columns = [group.column(at) for at in range(group.num_columns)]
        has_dictionary = {one.path_in_schema: one.has_dictionary_page for one in columns}
        assert has_dictionary == {"id": False, "few": True, "text": False}
    assert whole(out) == list(range(60_000))


def prepared_folder(out: Path) -> Path:
    """The one folder of a prepared job."""
    (found,) = [path for path in out.parent.rglob("epochal-*-e*") if path.is_dir()]
    return found


@pytest.mark.parametrize("way", ["engine", "tasks"])
def test_a_lost_job_is_written_again_and_lost_partitions_by_tasks(
    source: Source, checkpoint: Path, killer: Killer, tmp_path: Path, way: str
) -> None:
    """
    Prepared files are removed after the decision: all of a job, or those of one task of two. The
    sink that goes on has no `max_file_bytes`, so that a job would write, but one job can't replace
    one partition.
    """
    out = tmp_path / "out"
    source.add_numbers(epochs=1, rows=40)
    df = source.stream.repartition(2, "id")
    options = {} if way == "engine" else {"max_file_bytes": BY_TASKS}
    first = Pipeline("lossy", [Files(out, name="f", **options)], watch=killer.watch)
    killer.at = ("decided", 0)
    assert killer.run(first, df, checkpoint)
    folders = sorted(path for path in out.parent.rglob("epochal-*-e*") if path.is_dir())
    assert len(folders) == (1 if way == "engine" else 2)
    shutil.rmtree(folders[0])
    again = Pipeline("lossy", [Files(out, name="f")], watch=killer.watch)
    assert not killer.run(again, df, checkpoint)
    assert seen(out) == whole(out) == source.ids
    assert is_by_job(out) == (way == "engine")
    assert leftovers(again) == []


def test_a_job_of_which_files_are_visible_is_not_written_again(
    source: Source, checkpoint: Path, killer: Killer, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    source.add_numbers(epochs=1, rows=40)
    df = source.stream.repartition(2, "id")
    pipeline = Pipeline("half", [Files(out, name="f")], watch=killer.watch)
    killer.at = ("decided", 0)
    assert killer.run(pipeline, df, checkpoint)
    folder = prepared_folder(out)
    shown, lost = sorted(folder.glob("*.parquet"))
    out.mkdir(exist_ok=True)
    shown.rename(out / shown.name)
    kept = lost.read_bytes()
    lost.unlink()
    with pytest.raises(Unsettled, match=lost.name):
        run_to_end(pipeline, df, checkpoint)
    assert 0 < len(seen(out)) < 40
    folder.mkdir(exist_ok=True)
    lost.write_bytes(kept)
    run_to_end(pipeline, df, checkpoint)
    assert seen(out) == whole(out) == source.ids


@pytest.fixture
def after_the_job(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], None]], None]:
    """Does something to the folder of each job, between its end and `gather`."""

    def set_up(then: Callable[[Path], None]) -> None:
        def write(frame: Any, asked: Any, *rest: Any, **options: Any) -> Any:
            written = real(frame, asked, *rest, **options)
            then(Path(asked.folder.removeprefix("file://")))
            return written

        real = engine_write.write
        monkeypatch.setattr(engine_write, "write", write)

    return set_up


def test_a_file_that_is_lost_before_the_receipt_fails_the_epoch(
    source: Source, checkpoint: Path, tmp_path: Path, after_the_job: Any
) -> None:
    """As by an executor that was given up and wakes: it deletes what another has committed."""
    out = tmp_path / "out"
    source.add_numbers(epochs=1, rows=40)
    df = source.stream.repartition(2, "id")
    pipeline = Pipeline("woken", [Files(out, name="f")])

    def lose_one(folder: Path) -> None:
        min(folder.glob("*.parquet")).unlink()

    after_the_job(lose_one)
    with pytest.raises(StreamingQueryException):
        run_to_end(pipeline, df, checkpoint)
    assert isinstance(pipeline.error, TryAgain)
    assert "Spark has written 40 rows" in pipeline.error.message
    assert seen(out) == []
    assert leftovers(pipeline) == []

    def lose_all(folder: Path) -> None:
        shutil.rmtree(folder)
        folder.mkdir()

    after_the_job(lose_all)
    with pytest.raises(StreamingQueryException):
        run_to_end(pipeline, df, checkpoint)
    assert isinstance(pipeline.error, Misconfigured)
    assert "one and the same" in pipeline.error.hint


def test_what_tasks_write_after_the_end_of_their_job_is_never_seen_and_cleared(
    source: Source, checkpoint: Path, killer: Killer, tmp_path: Path, after_the_job: Any
) -> None:
    """Of a job that succeeded, and of one whose epoch is aborted: again at a later sweep."""
    out = tmp_path / "out"
    source.add_numbers(epochs=2)
    stray = Path("_temporary/0/_temporary/attempt_7/part-00000-late.snappy.parquet")
    folders: list[Path] = []

    def write_late(folder: Path) -> None:
        assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700, "others can look at its rows"
        folders.append(folder)
        late = folder / stray
        late.parent.mkdir(parents=True)
        (real,) = folder.glob("*.parquet")
        shutil.copy(real, late)

    after_the_job(write_late)
    pipeline = Pipeline("late", [Files(out, name="f")], watch=killer.watch)
    killer.at = ("prepared", 1)
    assert killer.run(pipeline, source.stream, checkpoint)
    assert seen(out) == list(range(10))
    assert folders[1].exists()
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert seen(out) == whole(out) == source.ids
    assert [folder for folder in folders if folder.exists()] == []
    for folder in folders:
        (folder / stray).parent.mkdir(parents=True)
        (folder / stray).write_bytes(b"later still")
    run_to_end(pipeline, source.stream, checkpoint)
    assert [folder for folder in folders if folder.exists()] == []
    assert seen(out) == whole(out) == source.ids


@pytest.fixture
def logged(spark: SparkSession) -> Iterator[Callable[[], str]]:
    """What the JVM's log has, from errors on."""
    jvm: Any = spark._jvm
    log4j = jvm.org.apache.logging.log4j
    settings = log4j.LogManager.getContext(False).getConfiguration()
    text = jvm.java.io.StringWriter()
    layout_of_lines = log4j.core.layout.PatternLayout.createDefaultLayout()
    appender = log4j.core.appender.WriterAppender.createAppender(
        layout_of_lines, None, text, "test", False, True
    )
    appender.start()
    settings.getRootLogger().addAppender(appender, log4j.Level.ERROR, None)
    yield text.toString
    settings.getRootLogger().removeAppender("test")


def test_a_stop_while_a_job_writes_leaves_nothing_and_logs_no_error(
    source: Source, checkpoint: Path, tmp_path: Path, logged: Callable[[], str]
) -> None:
    out, begun = tmp_path / "out", tmp_path / "begun"
    source.add_numbers(epochs=1, rows=40)

    def slowly(batches: Iterator[Any]) -> Iterator[Any]:
        import time

        for batch in batches:
            yield batch
            begun.touch()
            time.sleep(120)

    df = source.stream.repartition(2, "id").mapInArrow(slowly, source.schema)
    pipeline = Pipeline("stopped", [Files(out, name="f")])
    query = pipeline.start(df, checkpoint)
    wait_for(begun.exists)
    query.stop()
    pipeline.close()
    assert pipeline.error is None
    assert seen(out) == []
    run_to_end(pipeline, source.stream, checkpoint)
    assert seen(out) == whole(out) == source.ids
    assert leftovers(pipeline) == []
    assert "Aborting" not in logged()
    jvm: Any = source.spark._jvm
    settings = jvm.org.apache.logging.log4j.LogManager.getContext(False).getConfiguration()
    assert settings.getFilter() is None, "it would be asked for every line that is not logged"
    writer = settings.getLoggerConfig("org.apache.spark.sql.execution.datasources.FileFormatWriter")
    assert writer.getExplicitLevel() is not None, "a shell would print what it logs of every job"


# Delta


def delta_rows(table: Path) -> list[int]:
    return sorted(DeltaTable(table).to_pyarrow_table()["id"].to_pylist())


def test_a_delta_table_gets_the_same_statistics_from_files_of_spark(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Readers skip files by them: of equal rows they are equal, whatever wrote the file."""
    frame = spark.range(200, numPartitions=1).selectExpr(
        *COLUMNS[:-2],
        "cast(id * 1000 as decimal(18, 3)) long_price",
        "if(id = 150, double('NaN'), double(id)) with_nan",
        "if(id = 150, float('NaN'), null) nothing_but_nan",
        "if(id = 3, double('-Infinity'), double(id)) endless",
        "cast(null as string) nothing",
        "repeat(chr(int(65 + id % 26)), 40) long_text",
        "if(id = 7, repeat('x', 5000), if(id % 10 = 0, null, 'y')) very_long_text",
        "if(id < 0, '', chr(int(1000 + id))) letter",
    )
    found = {}
    for way, options in {"Spark": {}, "tasks": {"max_file_bytes": BY_TASKS}}.items():
        table, checkpoint = tmp_path / way / "table", tmp_path / way / "checkpoint"
        sink = Delta(table, name="d", create_table="if_missing", partition_by=["small"], **options)
        Pipeline(way, [sink]).write(frame, run="once", checkpoint=checkpoint)
        state = read_state(open_log(f"{checkpoint}/epochal/runs/once/log"))
        assert state.sinks["d"]["writer"].startswith(way)
        assert is_by_job(table) == (way == "Spark")
        adds = pa.table(DeltaTable(table).get_add_actions(flatten=True))
        columns = [name for name in adds.column_names if name.partition(".")[0] in _STATISTICS]
        by_partition = adds.sort_by("partition.small").select(sorted(columns))
        rows = DeltaTable(table).to_pyarrow_table().sort_by("id")
        found[way] = (
            state.totals["d"].fingerprint,
            by_partition.to_pylist(),
            str(rows.to_pylist()),
        )
        assert list((table / "_epochal").rglob("epochal-*")) == []
    for spark_says, tasks_say in zip(*found.values(), strict=True):
        assert spark_says == tasks_say
    assert "min.id" in found["Spark"][1][0]
    assert {row["max.with_nan"] for row in found["Spark"][1]} >= {None}


_STATISTICS = ("num_records", "null_count", "min", "max", "partition")


def test_a_delta_table_has_every_row_once_wherever_the_driver_dies_and_late_tasks_write(
    source: Source, checkpoint: Path, killer: Killer, tmp_path: Path, after_the_job: Any
) -> None:
    table, files = tmp_path / "table", tmp_path / "files"
    sinks = [Delta(table, name="f", create_table="if_missing"), Files(files, name="other")]
    folders: list[Path] = []

    def write_late(folder: Path) -> None:
        late = folder / "_temporary/0/_temporary/attempt_7/part-00000-late.snappy.parquet"
        late.parent.mkdir(parents=True)
        late.write_bytes(b"late")
        folders.append(late)

    after_the_job(write_late)
    pipeline = Pipeline("lake", sinks, watch=killer.watch)
    deaths = [(step, None if step == "claimed" else at) for at, step in enumerate(STEPS)]
    source.add_numbers(epochs=len(deaths) + 1)
    for killer.at in deaths:
        assert killer.run(pipeline, source.stream, checkpoint), f"never reached {killer.at}"
    assert not killer.run(pipeline, source.stream, checkpoint)
    assert delta_rows(table) == whole(files) == source.ids
    assert is_by_job(table)
    for late in folders:
        late.parent.mkdir(parents=True, exist_ok=True)
        late.write_bytes(b"later still")
    run_to_end(pipeline, source.stream, checkpoint)
    assert leftovers(pipeline) == []
    assert [late for late in folders if late.exists()] == []
    named = {Path(uri).name for uri in DeltaTable(table).file_uris()}
    assert {path.name for path in table.rglob("*.parquet")} == named
    assert delta_rows(table) == source.ids


def test_a_job_that_a_delta_table_lost_after_the_decision_is_written_again(
    source: Source, checkpoint: Path, killer: Killer, tmp_path: Path
) -> None:
    table = tmp_path / "table"
    source.add_numbers(epochs=2, rows=40)
    df = source.stream.repartition(2, "id")
    pipeline = Pipeline(
        "lossy", [Delta(table, name="d", create_table="if_missing")], watch=killer.watch
    )
    killer.at = ("decided", 1)
    assert killer.run(pipeline, df, checkpoint)
    committed = {Path(uri).name for uri in DeltaTable(table).file_uris()}
    prepared = [path for path in table.glob("*.parquet") if path.name not in committed]
    assert len(prepared) == 2
    prepared[0].unlink()
    assert not killer.run(pipeline, df, checkpoint)
    assert delta_rows(table) == source.ids
    assert leftovers(pipeline) == []


def test_check_says_what_writes_the_rows_and_why(source: Source, tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o2775)
    sinks = {
        "shared": (Files(shared), False, "shared by a group"),
        "plain": (Files(tmp_path / "plain"), True, "Python"),
        "csv": (Files(tmp_path / "csv", format="csv"), True, "Python"),
        "split": (Files(tmp_path / "split", max_file_bytes=BY_TASKS), False, "max_file_bytes"),
        "null": (Files(tmp_path / "null", select=["id", "ID as iD"]), False, "upper and lower"),
        "months": (
            Files(tmp_path / "months", select=["struct(variant_get(parse_json(v), '$') x) s"]),
            False,
            "variant",
        ),
    }
    report = Pipeline("checked", [sink for sink, _, _ in sinks.values()]).check(source.stream)
    for sink, is_by_engine, because in sinks.values():
        (ability,) = [
            one for one in report.abilities[sink.name] if one.name == engine_write.ABILITY
        ]
        assert ability.granted == is_by_engine, ability
        assert because in ability.because
    assert f"{engine_write.ABILITY}: " in str(report)


def test_a_store_that_spark_does_not_reach_by_its_own_settings_is_written_by_tasks(
    spark: SparkSession,
) -> None:
    ability = engine_write.SessionWriter(spark).ability("parquet", "s3a://lake/out.epochal")
    assert not ability.granted
    assert "Spark does not reach s3a://lake/out.epochal by its own settings" in ability.because


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        (
            "spark.sql.sources.commitProtocolClass",
            "org.apache.spark.internal.io.HadoopMapReduceCommitProtocol",
        ),
        ("spark.sql.sources.useV1SourceList", "csv,kafka"),
    ],
)
def test_where_a_platform_has_replaced_the_committer_tasks_write(
    source: Source, checkpoint: Path, tmp_path: Path, setting: str, value: str
) -> None:
    out = tmp_path / "out"
    source.add_numbers(epochs=1)
    source.spark.conf.set(setting, value)
    try:
        run_to_end(Pipeline("platform", [Files(out, name="f")]), source.stream, checkpoint)
    finally:
        source.spark.conf.unset(setting)
    assert seen(out) == source.ids
    assert not is_by_job(out)
    writer = read_state(checkpoint_log(checkpoint)).sinks["f"]["writer"]
    assert writer == f"tasks: {setting} is {value}"


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("", "has the value ''"),
        ("__HIVE_DEFAULT_PARTITION__", "has the value '__HIVE_DEFAULT_PARTITION__'"),
        ("a\0b", "has a value with the character NUL"),
        ("/" * 85, "has a value that makes a folder's name of more than 255 bytes"),
    ],
)
def test_a_partition_value_that_names_no_folder_is_refused(
    source: Source, checkpoint: Path, tmp_path: Path, value: str, why: str
) -> None:
    odd = ["ü/a b=%", "x" * 253, "/" * 84]
    source.add([{"id": 0, "v": None}, *({"id": n, "v": v} for n, v in enumerate(odd, start=1))])
    out = tmp_path / "o #%20?[u]t"
    pipeline = Pipeline("parts", [Files(out, name="f", partition_by=["v"])])
    run_to_end(pipeline, source.stream, checkpoint)
    assert is_by_job(out)
    rows = read_epochs(out).to_table().sort_by("id").to_pylist()
    assert [row["v"] for row in rows] == [None, *odd]
    source.add([{"id": 4, "v": "x"}, {"id": 5, "v": value}])
    with pytest.raises(StreamingQueryException):
        run_to_end(pipeline, source.stream, checkpoint)
    assert isinstance(pipeline.error, RowRejected), pipeline.error
    assert f"partition column 'v' {why}" in pipeline.error.message
    assert seen(out) == [0, 1, 2, 3]
    assert leftovers(pipeline) == []


def test_an_error_of_the_query_is_named_without_the_frames_of_the_writer(
    source: Source, checkpoint: Path, tmp_path: Path
) -> None:
    source.add_numbers(epochs=1)
    pipeline = Pipeline("broken", [Files(tmp_path / "out", name="f")])
    df = source.stream.select(functions.expr("cast(raise_error('no such country') AS int) AS id"))
    with pytest.raises(StreamingQueryException):
        run_to_end(pipeline, df, checkpoint)
    assert isinstance(pipeline.error, TaskFailed)
    assert "no such country" in pipeline.error.message
    assert "\n" not in pipeline.error.message
