"""Tasks and drivers that are different users of the machine, and users who are neither."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from sinks.other_user import as_user

from epochal import Memory, Session
from epochal.errors import Misconfigured
from epochal.receiver.store import Database
from epochal.sinks.callback import Callback
from epochal.sinks.files import Files
from epochal.sinks.files.local import folder_beside
from epochal.terms import NO_ROWS, EpochNumber, Receipt

TASK, DRIVER, STRANGER, GROUP = 61001, 61002, 61003, 61009


@pytest.fixture
def lake() -> Iterator[Path]:
    """A folder that every user of the machine may write to."""
    assert os.geteuid() == 0, "these tests become other users, which only root may"
    folder = Path(tempfile.mkdtemp(prefix="epochal-users-"))
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def test_files_of_another_user_that_can_not_be_moved_are_refused_before_the_decision(
    drive, numbers, lake
):
    driver = drive(Files(str(lake / "out")))
    folder_beside(lake / "out").mkdir(mode=0o777)
    folder_beside(lake / "out").chmod(0o1777)
    receipt = as_user(TASK, TASK, "prepare", driver.sink, driver.task(numbers(1), 0), numbers(1))
    assert isinstance(receipt, Receipt)
    (lake / "out").mkdir(mode=0o777)
    (lake / "out").chmod(0o777)
    given = (driver.sink, driver.identity, "rehearse", EpochNumber(0), [receipt])
    # As it is; as any umask would make it; and as no look at the rights shows it.
    for mode in (0o700, 0o755, 0o1777):
        (folder_beside(lake / "out") / str(receipt.handle)).chmod(mode)
        refused = as_user(DRIVER, DRIVER, "ask", *given)
        assert isinstance(refused, Misconfigured), oct(mode)
        assert str(TASK) in refused.message
        assert str(DRIVER) in refused.message
        assert "group" in refused.hint
    (folder_beside(lake / "out") / str(receipt.handle)).chmod(0o777)
    assert as_user(DRIVER, DRIVER, "ask", *given) is None
    (lake / "out").chmod(0o755)
    assert isinstance(as_user(DRIVER, DRIVER, "ask", *given), Misconfigured)


def test_a_group_that_may_write_to_the_root_shares_what_is_prepared(drive, numbers, lake):
    root = lake / "out"
    root.mkdir()
    os.chown(root, DRIVER, GROUP)
    root.chmod(0o2775)
    driver = drive(Files(str(root), partition_by=["p"]))
    rows = numbers(1, 2).append_column("p", [["a", "b"]])
    ask = (driver.sink, driver.identity)
    assert as_user(DRIVER, GROUP, "ask", *ask, "check", rows.schema)
    receipt = as_user(TASK, GROUP, "prepare", driver.sink, driver.task(rows, 0), rows)
    assert isinstance(receipt, Receipt)
    for verb in ("rehearse", "commit"):
        answer = as_user(DRIVER, GROUP, "ask", *ask, verb, EpochNumber(0), [receipt])
        assert answer is None, answer
    assert sorted(path.parent.name for path in root.rglob("*.parquet")) == ["p=a", "p=b"]
    left = as_user(TASK, GROUP, "prepare", driver.sink, driver.task(rows, 1), rows)
    assert as_user(DRIVER, GROUP, "ask", *ask, "abort", EpochNumber(1), [left]) is None
    assert as_user(DRIVER, GROUP, "ask", *ask, "in_doubt") == []


def test_no_other_user_can_look_at_prepared_rows(drive, numbers, lake):
    driver = drive(Files(str(lake / "out")))
    driver.committer.check(numbers().schema)
    receipt = driver.prepare(numbers(1), 0)
    prepared = folder_beside(lake / "out") / str(receipt.handle)
    assert stat.S_IMODE(prepared.stat().st_mode) == 0o700
    driver.commit(0, [receipt])
    (shown,) = (lake / "out").glob("*.parquet")
    assert shown.stat().st_mode & stat.S_IROTH, "readers of decided rows are not shut out"


def test_what_another_user_left_is_reported_and_stops_no_start(drive, numbers, lake):
    driver = drive(Files(str(lake / "out")))
    folder_beside(lake / "out").mkdir()
    folder_beside(lake / "out").chmod(0o1777)
    left = as_user(TASK, TASK, "prepare", driver.sink, driver.task(numbers(1), 0), numbers(1))
    bare = Receipt(handle=left.handle, fingerprint=NO_ROWS)
    sink, identity = driver.sink, driver.identity
    assert as_user(DRIVER, DRIVER, "ask", sink, identity, "abort", EpochNumber(0), [bare]) is None
    listed = as_user(DRIVER, DRIVER, "ask", sink, identity, "in_doubt")
    assert [found.handle for found in listed] == [left.handle]


def test_spooled_rows_are_private_and_refused_before_the_decision_where_the_driver_is_another_user(
    drive, numbers, lake
):
    driver = drive(Callback(print, spool=str(lake / "spool")))
    task = (driver.sink, driver.task(numbers(1), 0), numbers(1))
    receipt = as_user(TASK, TASK, "prepare", *task)
    (spooled,) = (lake / "spool").rglob("*.arrow")
    assert stat.S_IMODE(spooled.stat().st_mode) == 0o600
    given = (driver.sink, driver.identity, "rehearse", EpochNumber(0), [receipt])
    for mode in (0o600, 0o644):
        spooled.chmod(mode)
        refused = as_user(DRIVER, DRIVER, "ask", *given)
        assert isinstance(refused, Misconfigured), oct(mode)
    assert str(TASK) in refused.message
    shutil.rmtree(lake / "spool")
    (lake / "spool").mkdir()
    os.chown(lake / "spool", DRIVER, GROUP)
    (lake / "spool").chmod(0o2770)
    receipt = as_user(TASK, GROUP, "prepare", *task)
    assert isinstance(receipt, Receipt)
    assert as_user(DRIVER, GROUP, "ask", *given[:-1], [receipt]) is None


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("log", ["chk/epochal/log", "sqlite:///{}/chk/log.db"])
def test_the_epoch_log_and_its_history_are_private_unless_a_group_shares_their_folder(
    tmp_path, monkeypatch, is_shared, log
):
    (tmp_path / "chk").mkdir()
    (tmp_path / "chk").chmod(0o2775 if is_shared else 0o755)
    monkeypatch.chdir(tmp_path)
    umask = os.umask(0o022)
    try:
        schema = pa.schema([("id", pa.int64())])
        place = log.format(tmp_path)
        with Session("p", sinks=[Memory()], schema=schema, log=place) as session:
            session.begin(0)
            session.commit()
    finally:
        os.umask(umask)
    files = [one for one in (tmp_path / "chk").rglob("*") if one.is_file()]
    assert len(files) >= 2
    modes = {stat.S_IMODE(one.stat().st_mode) for one in files}
    assert modes == {0o660 if is_shared else 0o600}
    if log.startswith("chk"):
        folder = stat.S_IMODE((tmp_path / log).stat().st_mode)
        assert folder == (0o2770 if is_shared else 0o700)


def test_what_a_receiver_keeps_is_private(tmp_path):
    umask = os.umask(0o022)
    try:
        store = Database(tmp_path / "data" / "received.db")
    finally:
        os.umask(umask)
    assert stat.S_IMODE((tmp_path / "data").stat().st_mode) == 0o700
    modes = {stat.S_IMODE(one.stat().st_mode) for one in (tmp_path / "data").iterdir()}
    store.close()
    assert modes == {0o600}
