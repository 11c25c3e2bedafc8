"""What a store in a SQLite file promises beyond the shared promises."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from epochal.errors import CorruptRecord, EpochalError, Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.sqlite import SqliteStore


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def test_looking_creates_nothing(file: Path) -> None:
    store = SqliteStore(file)
    assert list(store.names()) == []
    store.delete(["k1"])
    assert not file.exists()


def test_a_commit_is_durable_when_it_returns(file: Path) -> None:
    store = SqliteStore(file)
    store.put_if_absent("k1", b"x")
    with store._open("rw") as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_busy_file_means_try_again(file: Path) -> None:
    store = SqliteStore(file, busy_timeout_s=0.05)
    store.put_if_absent("k1", b"x")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TryAgain, match="locked"):
        store.put_if_absent("k2", b"y")
    other.close()
    assert store.put_if_absent("k2", b"y") is True


def test_a_store_serves_any_thread(file: Path) -> None:
    store = SqliteStore(file)
    store.put_if_absent("k1", b"x")
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(store.read("k1")))
    thread.start()
    thread.join()
    assert seen == [b"x"]


def test_a_file_without_the_table_is_an_empty_store(file: Path) -> None:
    file.touch()
    assert list(SqliteStore(file).names()) == []
    SqliteStore(file).delete(["k1"])
    assert SqliteStore(file).put_if_absent("k1", b"x") is True


def test_a_file_that_is_no_database_is_refused(file: Path) -> None:
    file.write_bytes(b"something else entirely" * 100)
    for call in (SqliteStore(file).names, lambda: SqliteStore(file).put_if_absent("k1", b"x")):
        with pytest.raises(Misconfigured, match="not a database"):
            call()


def test_a_damaged_database_stops_all_writing(file: Path) -> None:
    store = SqliteStore(file)
    for number in range(200):
        store.put_if_absent(f"k{number}", b"x" * 100)
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    file.write_bytes(content)
    with pytest.raises(CorruptRecord):
        store.put_if_absent("k200", b"x")


def test_a_missing_folder_is_reported_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="unable to open") as caught:
        SqliteStore(tmp_path / "missing" / "log.db").put_if_absent("k1", b"x")
    assert caught.value.hint


def test_a_full_disk_leaves_nothing_and_the_outcome_known(small_disk: Path) -> None:
    store = SqliteStore(small_disk / "store.db")
    store.put("k0", b"x" * 600_000)
    for _ in range(3):
        with pytest.raises(TryAgain):
            store.put_if_absent("k1", b"y" * 600_000)
    assert (list(store.names()), store.read("k1")) == (["k0"], None)
    assert store.put_if_absent("k2", b"small") is True


def test_a_store_beside_another_has_a_file_and_a_lock_of_its_own(file: Path) -> None:
    store = SqliteStore(file, busy_timeout_s=0.05)
    store.put("k", b"x")
    store.beside("history").put("h", b"x")
    other = sqlite3.connect(f"{file}.history", isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    assert store.put_if_absent("k2", b"y") is True
    with pytest.raises(TryAgain, match="locked"):
        store.beside("history").put("h", b"y")
    other.close()


@pytest.mark.parametrize(("at", "kind"), [("INSERT", TryAgain), ("COMMIT", OutcomeUnknown)])
def test_only_a_commit_that_fails_leaves_the_outcome_unknown(
    file: Path, monkeypatch: pytest.MonkeyPatch, at: str, kind: type[EpochalError]
) -> None:
    store = SqliteStore(file)
    store.put("k0", b"x")
    opened = store._open

    class Failing:
        def __init__(self, connection: sqlite3.Connection) -> None:
            self._connection = connection

        def execute(self, statement: str, *values: object) -> sqlite3.Cursor:
            if statement.startswith(at):
                error = sqlite3.OperationalError("disk I/O error")
                error.sqlite_errorcode = sqlite3.SQLITE_IOERR
                raise error
            return self._connection.execute(statement, *values)

    @contextmanager
    def failing(mode: str) -> Iterator[Failing]:
        with opened(mode) as connection:
            yield Failing(connection)

    with monkeypatch.context() as patch:
        patch.setattr(store, "_open", failing)
        with pytest.raises(kind, match="disk I/O error"):
            store.put_if_absent("k1", b"y")
    assert store.put_if_absent("k1", b"y") is True
