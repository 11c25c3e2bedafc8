"""What a log in a local folder owes beyond the shared promises."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from epochal.errors import Misconfigured, OutcomeUnknown, TryAgain
from epochal.logs.files import FilesLog


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "chk" / "epochal" / "log"


def _failing(code: int) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise OSError(code, os.strerror(code))

    return fail


def _names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def _calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The order in which the disk is asked for things."""
    calls: list[str] = []
    fsync, link = os.fsync, os.link

    def traced_fsync(descriptor: int) -> None:
        is_folder = Path(f"/proc/self/fd/{descriptor}").is_dir()
        calls.append("sync folder" if is_folder else "sync file")
        fsync(descriptor)

    def traced_link(source: Path, target: Path) -> None:
        calls.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "link", traced_link)
    return calls


def test_opening_and_looking_create_nothing(folder: Path) -> None:
    log = FilesLog(folder)
    assert list(log.numbers()) == []
    assert log.read(1) is None
    assert not folder.parent.exists()


def test_a_record_is_durable_before_it_has_its_name_and_the_name_before_it_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FilesLog(folder)
    log.put_if_absent(0, b"x")
    calls = _calls(monkeypatch)
    log.put_if_absent(1, b"x")
    assert calls == ["sync file", "link", "sync folder"]


def test_a_taken_slot_is_reported_only_once_its_name_is_durable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FilesLog(folder)
    log.put_if_absent(0, b"x")
    calls = _calls(monkeypatch)
    assert log.put_if_absent(0, b"y") is False
    assert calls[-2:] == ["link", "sync folder"]


def test_every_new_folder_is_durable_in_the_one_above(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _calls(monkeypatch)
    FilesLog(folder).put_if_absent(0, b"x")
    assert calls[:3] == ["sync folder"] * 3


def test_nothing_but_records_is_left_behind(folder: Path) -> None:
    log = FilesLog(folder)
    log.put_if_absent(1, b"x")
    log.put_if_absent(1, b"y")
    assert _names(folder) == ["00000000000000000001.json"]


def test_foreign_files_are_ignored_and_left_alone(folder: Path) -> None:
    log = FilesLog(folder)
    log.put_if_absent(1, b"x")
    strangers = [
        "README",
        "2.json",
        "00000000000000000002.json.bak",
        ".DS_Store",
        "٣" * 20 + ".json",
    ]
    for name in strangers:
        (folder / name).write_text("not ours")
    (folder / "sub").mkdir()
    assert list(FilesLog(folder).numbers()) == [1]
    FilesLog(folder).put_if_absent(2, b"y")
    assert {*strangers, "sub"} <= set(_names(folder))


def test_old_leftovers_of_killed_writers_are_removed_and_fresh_ones_kept(folder: Path) -> None:
    FilesLog(folder).put_if_absent(1, b"x")
    old, fresh = folder / ".2.aa.tmp", folder / ".2.bb.tmp"
    for leftover in (old, fresh):
        leftover.write_bytes(b"half")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    FilesLog(folder).put_if_absent(2, b"y")
    assert not old.exists()
    assert fresh.exists()


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_means_try_again_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    log = FilesLog(folder)
    log.put_if_absent(0, b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing(errno.ENOSPC))
        with pytest.raises(TryAgain, match="No space left on device") as caught:
            log.put_if_absent(1, b"x")
    assert "space" in caught.value.hint
    assert _names(folder) == ["00000000000000000000.json"]
    assert log.put_if_absent(1, b"x") is True


def test_a_write_that_stops_half_way_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    log = FilesLog(folder)
    log.put_if_absent(1, b"0123456789")
    assert log.read(1) == b"0123456789"


def test_a_name_that_may_not_last_is_an_unknown_outcome_until_it_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FilesLog(folder)
    log.put_if_absent(0, b"x")
    with monkeypatch.context() as patch:
        patch.setattr("epochal.logs.files._sync_folder", _failing(errno.EIO))
        with pytest.raises(OutcomeUnknown):
            log.put_if_absent(1, b"mine")
    assert log.put_if_absent(1, b"mine") is False
    assert log.read(1) == b"mine"


def test_a_disk_without_hard_links_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _failing(errno.EPERM))
    with pytest.raises(Misconfigured, match="no hard links") as caught:
        FilesLog(folder).put_if_absent(1, b"x")
    assert "sqlite" in caught.value.hint
    assert _names(folder) == []


def test_a_slow_disk_error_while_reading_means_try_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = FilesLog(folder)
    log.put_if_absent(1, b"x")
    monkeypatch.setattr(Path, "read_bytes", _failing(errno.EIO))
    with pytest.raises(TryAgain, match="Input/output error"):
        log.read(1)


def test_a_file_in_the_place_of_a_folder_is_told_as_such(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "log"):
        log = FilesLog(place)
        for call in (log.numbers, lambda log=log: log.put_if_absent(1, b"x")):
            with pytest.raises(Misconfigured) as caught:
                call()
            assert str(place) in caught.value.message
