"""What a store in a local folder promises beyond the shared promises."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from epochal.errors import Misconfigured, OutcomeUnknown, TryAgain
from epochal.storage.local import LocalStore


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
    store = LocalStore(folder)
    assert list(store.names()) == []
    assert store.read("k1") is None
    assert not folder.parent.exists()


def test_content_is_durable_before_it_has_its_name_and_the_name_before_it_is_reported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(folder)
    store.put_if_absent("k0", b"x")
    calls = _calls(monkeypatch)
    store.put_if_absent("k1", b"x")
    assert calls == ["sync file", "link", "sync folder"]


def test_an_existing_key_is_reported_only_once_its_name_is_durable(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(folder)
    store.put_if_absent("k0", b"x")
    calls = _calls(monkeypatch)
    assert store.put_if_absent("k0", b"y") is False
    assert calls[-2:] == ["link", "sync folder"]


def test_every_new_folder_is_durable_in_the_one_above(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = _calls(monkeypatch)
    LocalStore(folder).put_if_absent("k0", b"x")
    assert calls[:3] == ["sync folder"] * 3


def test_nothing_but_keys_is_left_behind(folder: Path) -> None:
    store = LocalStore(folder)
    store.put_if_absent("k1", b"x")
    store.put_if_absent("k1", b"y")
    assert _names(folder) == ["k1"]


def test_hidden_files_and_folders_are_no_keys_and_left_alone(folder: Path) -> None:
    store = LocalStore(folder)
    store.put_if_absent("k1", b"x")
    (folder / ".DS_Store").write_text("not ours")
    (folder / "sub").mkdir()
    assert list(store.names()) == ["k1"]
    LocalStore(folder).put_if_absent("k2", b"y")
    assert {".DS_Store", "sub"} <= set(_names(folder))


def test_old_leftovers_of_killed_writers_are_removed_and_fresh_ones_kept(folder: Path) -> None:
    LocalStore(folder).put_if_absent("k1", b"x")
    old, fresh = folder / ".2.aa.tmp", folder / ".2.bb.tmp"
    for leftover in (old, fresh):
        leftover.write_bytes(b"half")
    two_hours_ago = time.time() - 7200
    os.utime(old, (two_hours_ago, two_hours_ago))
    LocalStore(folder).put_if_absent("k2", b"y")
    assert not old.exists()
    assert fresh.exists()


def test_what_a_killed_put_leaves_is_where_any_later_put_looks(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    for verb, call in (("put", "replace"), ("put_if_absent", "link")):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, killed)
            patch.setattr("epochal.storage.local._remove", lambda path: None)
            with pytest.raises(KeyboardInterrupt):
                getattr(LocalStore(folder), verb)("a folder/never used again", b"x")
    left = [path for path in folder.rglob("*") if path.is_file()]
    assert len(left) == 2
    for path in left:
        os.utime(path, (0, 0))
    LocalStore(folder).put("another/key", b"y")
    assert [path.name for path in folder.rglob("*") if path.is_file()] == ["key"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_full_disk_means_try_again_and_leaves_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = LocalStore(folder)
    store.put_if_absent("k0", b"x")
    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing(errno.ENOSPC))
        with pytest.raises(TryAgain, match="No space left on device") as caught:
            store.put_if_absent("k1", b"x")
    assert "space" in caught.value.hint
    assert _names(folder) == ["k0"]
    assert store.put_if_absent("k1", b"x") is True


def test_a_write_that_stops_half_way_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:3]))
    store = LocalStore(folder)
    store.put_if_absent("k1", b"0123456789")
    assert store.read("k1") == b"0123456789"


def test_a_name_that_may_not_last_is_an_unknown_outcome_until_it_is_asked_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(folder)
    store.put_if_absent("k0", b"x")
    with monkeypatch.context() as patch:
        patch.setattr("epochal.storage.local.sync", _failing(errno.EIO))
        with pytest.raises(OutcomeUnknown):
            store.put_if_absent("k1", b"mine")
    assert store.put_if_absent("k1", b"mine") is False
    assert store.read("k1") == b"mine"


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT])
def test_a_link_whose_answer_is_lost_is_an_unknown_outcome(
    folder: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    """As on a network's file system whose server dies once it has made the link."""
    store, link = LocalStore(folder), os.link

    def made(source: Path, target: Path) -> None:
        link(source, target)
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", made)
        with pytest.raises(OutcomeUnknown, match="may be written, or not"):
            store.put_if_absent("k", b"mine")
    assert not store.put_if_absent("k", b"another")
    assert store.read("k") == b"mine"


def test_a_disk_without_hard_links_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "link", _failing(errno.EPERM))
    with pytest.raises(Misconfigured, match="no hard links") as caught:
        LocalStore(folder).put_if_absent("k1", b"x")
    assert "sqlite" in caught.value.hint
    assert _names(folder) == []


def test_a_slow_disk_error_while_reading_means_try_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(folder)
    store.put_if_absent("k1", b"x")
    monkeypatch.setattr(Path, "read_bytes", _failing(errno.EIO))
    with pytest.raises(TryAgain, match="Input/output error"):
        store.read("k1")


def test_a_file_where_a_folder_must_be_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file", tmp_path / "file" / "log"):
        store = LocalStore(place)
        for call in (store.names, lambda store=store: store.put_if_absent("k1", b"x")):
            with pytest.raises(Misconfigured) as caught:
                call()
            assert str(place) in caught.value.message


def test_a_replaced_key_is_durable_before_the_old_content_is_gone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = LocalStore(folder)
    store.put("k0", b"x")
    calls = _calls(monkeypatch)
    store.put("k0", b"y")
    assert calls == ["sync file", "sync folder"]
    assert _names(folder) == ["k0"]


@pytest.mark.parametrize("call", ["write", "fsync"])
@pytest.mark.parametrize("verb", ["put", "put_if_absent", "create"])
def test_a_full_disk_never_leaves_the_outcome_unknown(
    folder: Path, monkeypatch: pytest.MonkeyPatch, call: str, verb: str
) -> None:
    store = LocalStore(folder)
    store.put("k0", b"old")

    def write() -> None:
        if verb == "create":
            output = store.create("k0")
            try:
                output.write(b"new")
                output.finish()
            except TryAgain:
                output.discard()
                raise
        else:
            getattr(store, verb)("k0" if verb == "put" else "k1", b"new")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, _failing(errno.ENOSPC))
        with pytest.raises(TryAgain, match="No space left on device"):
            write()
    assert (store.read("k0"), store.read("k1")) == (b"old", None)
    write()


def test_a_full_disk_of_its_own_is_reported_and_works_again_with_space(small_disk: Path) -> None:
    store = LocalStore(small_disk / "log")
    store.put("filler", b"x" * 600_000)
    for _ in range(3):
        with pytest.raises(TryAgain, match="No space left on device"):
            store.put_if_absent("k", b"y" * 600_000)
    assert (list(store.names()), store.read("k")) == (["filler"], None)
    store.delete(["filler"])
    assert store.put_if_absent("k", b"y" * 600_000) is True


def test_a_large_file_is_listed_while_it_is_written_and_appears_whole(folder: Path) -> None:
    store = LocalStore(folder)
    output = store.create("f/big")
    output.write(b"1" * 1000)
    output.write(memoryview(b"2" * 1000))
    assert list(store.names("f")) == ["big.part"]
    assert store.open("f/big") is None
    output.finish()
    assert list(store.names("f")) == ["big"]
    file = store.open("f/big")
    assert file is not None
    with file:
        assert file.read() == b"1" * 1000 + b"2" * 1000


def test_a_large_file_that_was_deleted_while_it_was_written_never_appears(folder: Path) -> None:
    store = LocalStore(folder)
    output = store.create("f/big")
    output.write(b"1")
    store.delete(["f/big.part"])
    with pytest.raises(TryAgain):
        output.finish()
    assert list(store.names("f")) == []


def test_a_large_file_that_is_given_up_leaves_nothing(folder: Path) -> None:
    store = LocalStore(folder)
    output = store.create("f/big")
    output.write(b"1")
    output.discard()
    assert (list(store.names("f")), list(store.folders())) == ([], [])


def test_a_folder_that_becomes_empty_goes_and_the_root_stays(folder: Path) -> None:
    store = LocalStore(folder)
    store.put("a/b/c", b"x")
    store.put("a/k", b"x")
    store.delete(["a/b/c"])
    assert _names(folder / "a") == ["k"]
    store.delete(["a/k"])
    assert _names(folder) == []
