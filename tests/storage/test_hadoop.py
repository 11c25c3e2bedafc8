"""What a store through Spark's file systems promises beyond the shared promises."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.logs import checkpoint_log
from epochal.storage import open_store
from epochal.storage.hadoop import PROBE, HadoopStore
from epochal.storage.leases import SlotLease, lease_at
from epochal.storage.objects import ObjectStore

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture
def store(spark: SparkSession, tmp_path: Path) -> HadoopStore:
    return HadoopStore(spark, f"file://{tmp_path}/log")


def test_looking_creates_nothing(store: HadoopStore, tmp_path: Path) -> None:
    assert list(store.names()) == []
    assert store.read("k1") is None
    assert list(tmp_path.iterdir()) == []


def test_nothing_but_records_and_the_probe_is_left_behind(
    store: HadoopStore, tmp_path: Path
) -> None:
    store.put_if_absent("k1", b"x")
    store.put_if_absent("k1", b"y")
    assert sorted(file.name for file in (tmp_path / "log").iterdir()) == [
        PROBE,
        "k1",
    ]


def test_names_are_listed_whole_whatever_is_in_them(store: HadoopStore, tmp_path: Path) -> None:
    """They come from the JVM in one text, between commas."""
    names = ["README", "k1", "k3, x", "x, k4", "[brackets]", "x, file:"]
    store.put_if_absent("k1", b"x")
    for name in names:
        (tmp_path / "log" / name).write_text("not ours")
    (tmp_path / "log" / "folder").mkdir()
    assert list(store.names()) == sorted(names)
    assert list(store.folders()) == ["folder"]


def test_a_lease_is_held_by_one_and_given_on_once_it_stands_still(
    spark: SparkSession, store: HadoopStore, tmp_path: Path
) -> None:
    now_s = 0.0
    assert isinstance(lease_at(store), SlotLease)
    # Each as another process has it.
    first, second, third = (
        SlotLease(
            HadoopStore(spark, f"file://{tmp_path}/log").beside("lease"),
            ttl_s=9.0,
            monotonic=lambda: now_s,
        )
        for _ in range(3)
    )
    assert first.acquire("first") is True
    for _ in range(6):
        assert (second.acquire("second"), third.acquire("third")) == (False, False)
        now_s += 5.0
        assert first.renew() is True
    assert second.acquire("second") is False
    now_s += 9.1
    assert second.acquire("second") is True
    assert third.acquire("third") is False
    assert (first.renew(), second.renew()) == (False, True)
    second.release()
    assert third.acquire("third") is True
    lease = tmp_path / "log" / "lease"
    assert len([file for file in lease.iterdir() if file.suffix == ".json"]) <= 4


def test_old_leftovers_of_killed_writers_are_removed_and_fresh_ones_kept(
    store: HadoopStore, tmp_path: Path
) -> None:
    old, fresh = tmp_path / "log" / ".2.aa.tmp", tmp_path / "log" / ".2.bb.tmp"
    old.parent.mkdir()
    for leftover in (old, fresh):
        leftover.write_bytes(b"half")
    os.utime(old, (0, 0))
    store.put_if_absent("folder/k1", b"x")
    assert not old.exists()
    assert fresh.exists()


def test_a_rename_never_replaces_a_record(store: HadoopStore) -> None:
    store._scheme = "hdfs"  # its way of publishing; the files stay local
    assert store.put_if_absent("k1", b"first") is True
    assert store.put_if_absent("k1", b"second") is False
    assert store.read("k1") == b"first"


def test_a_file_system_that_replaces_is_refused_before_the_first_record(
    store: HadoopStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace(hidden: Any, visible: Any) -> bool:
        return bool(store._files.rename(hidden, visible))

    monkeypatch.setattr(store, "_publish", replace)
    with pytest.raises(Misconfigured, match="replaces a file"):
        store.put_if_absent("k1", b"x")
    assert list(store.names()) == []


class Files:
    """Spark's file system, with some of its verbs replaced."""

    def __init__(self, real: Any, **verbs: Any) -> None:
        self._real = real
        vars(self).update(verbs)

    def __getattr__(self, verb: str) -> Any:
        return getattr(self._real, verb)


def test_a_key_that_comes_while_its_empty_folder_is_removed_stays(
    store: HadoopStore, tmp_path: Path
) -> None:
    store.put("shared/mine", b"x")
    real, theirs = store._files, tmp_path / "log" / "shared" / "theirs"

    def list_before_the_key_comes(folder: Any) -> Any:
        found = real.listStatus(folder)
        theirs.write_bytes(b"kept")
        return found

    def delete_what_looked_empty(path: Any, _: bool) -> bool:
        return bool(real.delete(path, path.getName() == "shared"))

    store._files = Files(
        real, listStatus=list_before_the_key_comes, delete=delete_what_looked_empty
    )
    store.delete(["shared/mine"])
    assert theirs.read_bytes() == b"kept"


def test_a_folder_that_is_removed_before_its_file_is_created_is_created_again(
    store: HadoopStore, tmp_path: Path
) -> None:
    store.put_if_absent("k1", b"x")
    real, calls = store._files, []

    def create(path: Any, is_replaced: bool) -> Any:
        calls.append(path)
        if len(calls) == 1:
            _in_the_jvm(store, "nothing there")()
        return real.create(path, is_replaced)

    store._files = Files(real, create=create)
    store.put("shared/mine", b"x")
    assert (tmp_path / "log" / "shared" / "mine").read_bytes() == b"x"
    assert len(calls) == 2


def _in_the_jvm(store: HadoopStore, failure: str) -> Any:
    """A call that fails there in one way."""
    lang = store._jvm.java.lang
    return {
        "nothing there": lambda *_: store._files.open(store._path("missing")),
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
    store: HadoopStore, monkeypatch: pytest.MonkeyPatch, failure: str, kind: type[EpochalError]
) -> None:
    store.put_if_absent("k1", b"x")
    monkeypatch.setattr(store, "_publish", _in_the_jvm(store, failure))
    with pytest.raises(kind, match="cannot write"):
        store.put_if_absent("k2", b"y")
    assert list(store.names()) == ["k1"]


def test_an_unknown_namenode_is_reported(spark: SparkSession) -> None:
    with pytest.raises(Misconfigured, match="no-such-host"):
        open_store("hdfs://no-such-host.invalid/log", spark=spark)


def test_a_namenode_that_is_down_may_be_asked_again(spark: SparkSession) -> None:
    session = spark.newSession()
    session.conf.set("ipc.client.connect.max.retries", "0")
    store = open_store("hdfs://localhost:9/log", spark=session)
    for verb in (store.names, lambda: store.read("k1"), lambda: store.put_if_absent("k1", b"x")):
        with pytest.raises(TryAgain, match="Connection refused"):
            verb()


def test_a_scheme_that_spark_does_not_know_is_reported(spark: SparkSession) -> None:
    for url in ("nosuch://place/log", "hadoop+nosuch://place/log"):
        with pytest.raises(Misconfigured, match='No FileSystem for scheme "nosuch"'):
            open_store(url, spark=spark)


def test_a_file_system_nobody_vouches_for_is_refused(spark: SparkSession) -> None:
    store = SimpleNamespace(
        _creates_once=False, _scheme="jfs", _is_vouched_for=False, location="jfs:/"
    )
    with pytest.raises(Misconfigured) as caught:
        HadoopStore._refuse_what_could_create_twice(store)  # type: ignore[arg-type]
    assert "hadoop+jfs" in caught.value.hint
    store._is_vouched_for = True
    HadoopStore._refuse_what_could_create_twice(store)  # type: ignore[arg-type]
    store._scheme = "s3a"
    with pytest.raises(Misconfigured, match="only once"):
        HadoopStore._refuse_what_could_create_twice(store)  # type: ignore[arg-type]
    store._creates_once = True
    HadoopStore._refuse_what_could_create_twice(store)  # type: ignore[arg-type]


def test_a_file_in_the_place_of_the_folder_is_reported(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(Misconfigured):
        HadoopStore(spark, f"file://{tmp_path}/file/log").put_if_absent("k1", b"x")


def test_a_session_without_a_jvm_is_reported(tmp_path: Path) -> None:
    connect: Any = SimpleNamespace()
    with pytest.raises(Misconfigured, match="no JVM"):
        open_store("hdfs://namenode/log", spark=connect)
    assert isinstance(open_store("s3a://bucket/log", spark=connect), ObjectStore)


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
    assert isinstance(open_store("s3a://bucket/log", spark=spark), ObjectStore)
    for key in ("fs.s3a.access.key", "fs.s3a.bucket.bucket.endpoint"):
        session = spark.newSession()
        session.conf.set(key, "something")
        with pytest.raises(Misconfigured, match="S3AFileSystem"):  # not on this Spark's class path
            open_store("s3a://bucket/log", spark=session)
