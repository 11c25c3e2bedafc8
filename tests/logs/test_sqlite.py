"""What a log in a SQLite file owes beyond the shared promises."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

import pytest

from epochal.errors import CorruptRecord, Misconfigured, TryAgain
from epochal.logs.sqlite import SqliteLog


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "log.db"


def test_looking_creates_nothing(file: Path) -> None:
    log = SqliteLog(file)
    assert list(log.numbers()) == []
    log.delete([1])
    assert not file.exists()


def test_a_commit_is_durable_when_it_returns(file: Path) -> None:
    log = SqliteLog(file)
    log.put_if_absent(1, b"x")
    with log._open("rw") as connection:
        assert connection.execute("PRAGMA synchronous").fetchone() == (3,)
        assert connection.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_a_busy_file_means_try_again(file: Path) -> None:
    log = SqliteLog(file, busy_timeout_s=0.05)
    log.put_if_absent(1, b"x")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(TryAgain, match="locked"):
        log.put_if_absent(2, b"y")
    other.close()
    assert log.put_if_absent(2, b"y") is True


def test_a_log_serves_any_thread(file: Path) -> None:
    log = SqliteLog(file)
    log.put_if_absent(1, b"x")
    seen: list[object] = []
    thread = threading.Thread(target=lambda: seen.append(log.read(1)))
    thread.start()
    thread.join()
    assert seen == [b"x"]


def test_a_file_without_the_table_is_an_empty_log(file: Path) -> None:
    file.touch()
    assert list(SqliteLog(file).numbers()) == []
    SqliteLog(file).delete([1])
    assert SqliteLog(file).put_if_absent(1, b"x") is True


def test_a_file_that_is_no_database_is_refused(file: Path) -> None:
    file.write_bytes(b"something else entirely" * 100)
    for call in (SqliteLog(file).numbers, lambda: SqliteLog(file).put_if_absent(1, b"x")):
        with pytest.raises(Misconfigured, match="not a database"):
            call()


def test_a_damaged_database_stops_all_writing(file: Path) -> None:
    log = SqliteLog(file)
    for number in range(200):
        log.put_if_absent(number, b"x" * 100)
    content = bytearray(file.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    file.write_bytes(content)
    with pytest.raises(CorruptRecord):
        log.put_if_absent(200, b"x")


def test_a_missing_folder_is_told_with_a_way_out(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match="unable to open") as caught:
        SqliteLog(tmp_path / "missing" / "log.db").put_if_absent(1, b"x")
    assert caught.value.hint
