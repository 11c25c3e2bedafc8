"""Which storage a place means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from epochal.errors import Misconfigured
from epochal.logs import checkpoint_log, open_log
from epochal.logs.files import FilesLog
from epochal.logs.objects import ObjectsLog
from epochal.logs.sqlite import SqliteLog


@pytest.mark.parametrize(
    ("place", "kind", "told"),
    [
        ("/data/log", FilesLog, "/data/log"),
        (Path("/data/log"), FilesLog, "/data/log"),
        ("file:/data/log", FilesLog, "/data/log"),
        ("file:///data/a%20b?c#d", FilesLog, "/data/a%20b?c#d"),
        ("file://localhost/data/log", FilesLog, "/data/log"),
        ("sqlite:///data/log.db", SqliteLog, "sqlite:///data/log.db"),
        ("s3://bucket/log", ObjectsLog, "s3://bucket/log"),
        ("s3a://bucket/log", ObjectsLog, "s3a://bucket/log"),
        ("S3://bucket/log", ObjectsLog, "S3://bucket/log"),
        ("gs://bucket/log", ObjectsLog, "gs://bucket/log"),
        (
            "abfss://box@account.dfs.core.windows.net/log",
            ObjectsLog,
            "abfss://box@account.dfs.core.windows.net/log",
        ),
        ("s3://me:pass@bucket/log?token=secret", ObjectsLog, "s3://bucket/log"),
    ],
)
def test_the_scheme_decides(place: str | Path, kind: type, told: str) -> None:
    log = open_log(place)
    assert isinstance(log, kind)
    assert log.place == told


def test_a_relative_path_is_told_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_log("chk/log").place == f"{tmp_path}/chk/log"
    assert open_log("sqlite:log.db").place == f"sqlite://{tmp_path}/log.db"


@pytest.mark.parametrize(
    "place", ["hdfs://namenode/log", "ftp://me:pass@host/log", "hadoop+x://y/z"]
)
def test_what_only_spark_reaches_needs_a_session(place: str) -> None:
    with pytest.raises(Misconfigured, match="without a Spark session") as caught:
        open_log(place)
    assert "sqlite:///" in caught.value.hint
    assert "s3://" in caught.value.hint
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize("place", ["hdfs://namenode/log", "hadoop+hdfs://namenode/log"])
def test_a_log_on_hdfs_is_told_with_the_way_to_look_at_it(place: str) -> None:
    with pytest.raises(Misconfigured, match="only a driver reaches that file system") as caught:
        open_log(place)
    assert "`hdfs dfs -get hdfs://namenode/log log`" in caught.value.hint


@pytest.mark.parametrize("place", ["file://host/log", "sqlite://host/log.db"])
def test_a_local_log_on_another_machine_is_refused(place: str) -> None:
    with pytest.raises(Misconfigured, match="names a machine"):
        open_log(place)


@pytest.mark.parametrize("checkpoint", ["/chk/orders", "/chk/orders/", "file:///chk/orders"])
def test_the_default_log_is_inside_the_checkpoint(checkpoint: str) -> None:
    assert checkpoint_log(checkpoint).place == "/chk/orders/epochal/log"


def test_logs_are_opened_without_spark() -> None:
    code = "import sys, epochal.logs; sys.exit('pyspark' in sys.modules or 'py4j' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
