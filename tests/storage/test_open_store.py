"""Which store a URL means."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from epochal import Callback, Delta, Files
from epochal.errors import Misconfigured
from epochal.logs import located
from epochal.spark.connect import spark_location
from epochal.storage import open_file_store, open_store
from epochal.storage.local import LocalStore
from epochal.storage.objects import ObjectStore
from epochal.storage.postgres import PostgresStore
from epochal.storage.sqlite import SqliteStore


@pytest.mark.parametrize(
    ("url", "kind", "location"),
    [
        ("/data/log", LocalStore, "/data/log"),
        (Path("/data/log"), LocalStore, "/data/log"),
        ("file:/data/log", LocalStore, "/data/log"),
        ("file:///data/a%20b?c#d", LocalStore, "/data/a%20b?c#d"),
        ("file://localhost/data/log", LocalStore, "/data/log"),
        ("sqlite:///data/log.db", SqliteStore, "sqlite:///data/log.db"),
        ("s3://bucket/log", ObjectStore, "s3://bucket/log"),
        ("s3a://bucket/log", ObjectStore, "s3a://bucket/log"),
        ("S3://bucket/log", ObjectStore, "S3://bucket/log"),
        ("gs://bucket/log", ObjectStore, "gs://bucket/log"),
        (
            "abfss://box@account.dfs.core.windows.net/log",
            ObjectStore,
            "abfss://box@account.dfs.core.windows.net/log",
        ),
        ("postgresql://me:pass@host/db#a%20b", PostgresStore, "postgresql://host/db#a b"),
        ("s3://me:pass@bucket/log?token=secret", ObjectStore, "s3://bucket/log"),
    ],
)
def test_the_scheme_decides(url: str | Path, kind: type, location: str) -> None:
    store = open_store(url)
    assert isinstance(store, kind)
    assert store.location == location


def test_a_relative_path_is_shown_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_store("chk/log").location == f"{tmp_path}/chk/log"
    assert open_store("sqlite:log.db").location == f"sqlite://{tmp_path}/log.db"


@pytest.mark.parametrize("url", ["hdfs://namenode/log", "ftp://me:pass@host/log", "hadoop+x://y/z"])
def test_what_only_spark_reaches_needs_a_session(url: str) -> None:
    with pytest.raises(Misconfigured, match="without a Spark session") as caught:
        open_store(url)
    assert "sqlite:///" in caught.value.hint
    assert "s3://" in caught.value.hint
    assert "pass" not in str(caught.value)


@pytest.mark.parametrize("url", ["hdfs://namenode/log", "hadoop+hdfs://namenode/log"])
def test_a_store_on_hdfs_is_refused_with_the_way_to_look_at_it(url: str) -> None:
    with pytest.raises(Misconfigured, match="only a driver reaches that file system") as caught:
        open_store(url)
    assert "`hdfs dfs -get hdfs://namenode/log log`" in caught.value.hint


@pytest.mark.parametrize("url", ["file://host/log", "sqlite://host/log.db"])
def test_a_local_store_on_another_machine_is_refused(url: str) -> None:
    with pytest.raises(Misconfigured, match="names a machine"):
        open_store(url)


def test_stores_are_opened_without_spark_and_without_drivers() -> None:
    code = (
        "import sys; from epochal.storage import open_store; open_store('/x').names(); "
        "sys.exit(bool({'pyspark', 'py4j', 'obstore', 'psycopg', 'pyarrow'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_large_files_go_to_folders_and_object_stores_only() -> None:
    assert isinstance(open_file_store("/data/spool"), LocalStore)
    assert isinstance(open_file_store("s3://bucket/spool"), ObjectStore)
    with pytest.raises(Misconfigured, match="neither a folder nor in an object store"):
        open_file_store("sqlite:///data/spool.db")


@pytest.mark.parametrize(("path", "meant"), [("~/out", "/home/x/out"), ("$DATA/out", "/data/out")])
@pytest.mark.parametrize(
    "named",
    [
        Files,
        Delta,
        located,
        open_store,
        lambda path: Callback(print, spool=path, name="call"),
        spark_location,
    ],
)
def test_what_only_shells_replace_is_refused_in_a_path(
    path: str, meant: str, named: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/x")
    monkeypatch.setenv("DATA", "/data")
    with pytest.raises(Misconfigured, match="which only shells replace") as caught:
        named(path)
    assert f"write {meant};" in caught.value.hint
