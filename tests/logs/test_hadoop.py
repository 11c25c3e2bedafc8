"""What a log through Spark's file systems owes beyond the shared promises."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.logs import checkpoint_log, open_log
from epochal.logs.hadoop import HadoopLog
from epochal.logs.names import PROBE
from epochal.logs.objects import ObjectsLog

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def log(spark: SparkSession, tmp_path: Path) -> HadoopLog:
    return HadoopLog(spark, f"file://{tmp_path}/log")


def test_looking_creates_nothing(log: HadoopLog, tmp_path: Path) -> None:
    assert list(log.numbers()) == []
    assert log.read(1) is None
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_records_and_the_probe_is_left_behind(log: HadoopLog, tmp_path: Path) -> None:
    log.put_if_absent(1, b"x")
    log.put_if_absent(1, b"y")
    assert sorted(file.name for file in (tmp_path / "log").iterdir()) == [
        PROBE,
        "00000000000000000001.json",
    ]


def test_foreign_files_are_ignored_whatever_their_names(log: HadoopLog, tmp_path: Path) -> None:
    log.put_if_absent(1, b"x")
    for name in (
        "README",
        "2.json",
        "00000000000000000003.json, x",
        "x, 00000000000000000004.json",
    ):
        (tmp_path / "log" / name).write_text("not ours")
    assert list(log.numbers()) == [1]


def test_old_leftovers_of_killed_writers_are_removed_and_fresh_ones_kept(
    log: HadoopLog, tmp_path: Path
) -> None:
    old, fresh = tmp_path / "log" / ".2.aa.tmp", tmp_path / "log" / ".2.bb.tmp"
    old.parent.mkdir()
    for leftover in (old, fresh):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    log.put_if_absent(1, b"x")
    assert not old.exists()
    assert fresh.exists()


def test_a_rename_never_replaces_a_record(log: HadoopLog) -> None:
    log._scheme = "hdfs"  # its way of publishing; the files stay local
    assert log.put_if_absent(1, b"first") is True
    assert log.put_if_absent(1, b"second") is False
    assert log.read(1) == b"first"


def test_a_file_system_that_replaces_is_refused_before_the_first_record(
    log: HadoopLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(hidden: Any, visible: Any) -> bool:
        return bool(log._files.rename(hidden, visible))

    monkeypatch.setattr(log, "_publish", replace)
    with pytest.raises(Misconfigured, match="replaces a file"):
        log.put_if_absent(1, b"x")
    assert list(log.numbers()) == []


def _in_the_jvm(log: HadoopLog, failure: str) -> Any:
    """A call that fails there in one way."""
    lang = log._jvm.java.lang
    return {
        "nothing there": lambda *_: log._files.open(log._path("missing")),
        "bad argument": lambda *_: lang.Thread.sleep(-1),
        "anything else": lambda *_: lang.Class.forName("java.io.File").getMethod("no", None),
    }[failure]


@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        ("nothing there", TryAgain),
        ("bad argument", Misconfigured),
        ("anything else", OutcomeUnknown),
    ],
)
def test_a_publication_that_fails_is_sorted_by_what_may_have_happened(
    log: HadoopLog, monkeypatch: pytest.MonkeyPatch, failure: str, kind: type[EpochalError]
) -> None:
    log.put_if_absent(1, b"x")
    monkeypatch.setattr(log, "_publish", _in_the_jvm(log, failure))
    with pytest.raises(kind, match="cannot write to the epoch log"):
        log.put_if_absent(2, b"y")
    assert list(log.numbers()) == [1]


def test_a_namenode_that_nobody_knows_is_told(spark: SparkSession) -> None:
    with pytest.raises(Misconfigured, match="no-such-host"):
        open_log("hdfs://no-such-host.invalid/log", spark=spark)


def test_a_namenode_that_is_down_may_be_asked_again(spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set("ipc.client.connect.max.retries", "0")
    log = open_log("hdfs://localhost:9/log", spark=session)
    for verb in (log.numbers, lambda: log.read(1), lambda: log.put_if_absent(1, b"x")):
        with pytest.raises(TryAgain, match="Connection refused"):
            verb()


def test_a_scheme_that_spark_does_not_know_is_told(spark: SparkSession) -> None:
    for url in ("nosuch://place/log", "hadoop+nosuch://place/log"):
        with pytest.raises(Misconfigured, match='No FileSystem for scheme "nosuch"'):
            open_log(url, spark=spark)


def test_a_file_system_nobody_vouches_for_is_refused(spark: SparkSession) -> None:
    log = SimpleNamespace(_creates_once=False, _scheme="jfs", _is_vouched_for=False, place="jfs:/")
    with pytest.raises(Misconfigured) as caught:
        HadoopLog._refuse_what_could_fill_twice(log)  # type: ignore[arg-type]
    assert "hadoop+jfs" in caught.value.hint
    log._is_vouched_for = True
    HadoopLog._refuse_what_could_fill_twice(log)  # type: ignore[arg-type]
    log._scheme = "s3a"
    with pytest.raises(Misconfigured, match="only once"):
        HadoopLog._refuse_what_could_fill_twice(log)  # type: ignore[arg-type]
    log._creates_once = True
    HadoopLog._refuse_what_could_fill_twice(log)  # type: ignore[arg-type]


def test_a_file_in_the_place_of_the_folder_is_told(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Misconfigured):
        HadoopLog(spark, f"file://{tmp_path}/file/log").put_if_absent(1, b"x")


def test_a_session_without_a_jvm_is_told(tmp_path: Path) -> None:
    connect: Any = SimpleNamespace()
    with pytest.raises(Misconfigured, match="no JVM"):
        open_log("hdfs://namenode/log", spark=connect)
    assert isinstance(open_log("s3a://bucket/log", spark=connect), ObjectsLog)


def test_a_checkpoint_without_a_scheme_is_where_spark_sees_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    assert checkpoint_log(tmp_path / "chk", spark=spark).place == f"{tmp_path}/chk/epochal/log"
    session = spark.newSession()
    session.conf.set("fs.defaultFS", "hdfs://localhost:9")
    assert checkpoint_log("/chk", spark=session).place == "hdfs://localhost:9/chk/epochal/log"
    with pytest.raises(Misconfigured, match="is relative"):
        checkpoint_log("chk", spark=session)


def test_s3a_goes_through_hadoop_where_spark_holds_the_credentials(spark: SparkSession) -> None:
    assert isinstance(open_log("s3a://bucket/log", spark=spark), ObjectsLog)
    for key in ("fs.s3a.access.key", "fs.s3a.bucket.bucket.endpoint"):
        session = spark.newSession()
        session.conf.set(key, "something")
        with pytest.raises(Misconfigured, match="S3AFileSystem"):  # not on this Spark's class path
            open_log("s3a://bucket/log", spark=session)
