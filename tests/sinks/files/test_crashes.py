"""The driver or a task dies at its first call to the disk, at its second, at its third …"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from epochal.contract import EngineWritten
from epochal.coordinator.retry import IDLE
from epochal.errors import PreparedLost
from epochal.sinks.files import Files, read_epochs
from epochal.sinks.files.local import folder_beside as beside
from epochal.sinks.files.spark_log import SparkLog
from epochal.terms import NO_ROWS, EpochNumber, Fingerprint, Receipt

CALLS = ("open", "mkdir", "rename", "link", "unlink", "rmdir", "fsync")
CRASHES_MAX = 400


class Killed(BaseException):
    """As by SIGKILL: nothing in the process runs on, so no `except Exception` sees it."""


@contextmanager
def killed_at(number: int, *, after_effect: bool) -> Iterator[Callable[[], bool]]:
    """Die at the `number`th call to the disk, before or after its effect, and stay dead."""
    lock = threading.Lock()
    count = 0
    true = {name: getattr(os, name) for name in CALLS}
    # Threads that drivers of other tests left behind when they died; idle ones get new jobs.
    others = {*threading.enumerate()} - {threading.current_thread()}
    strangers = {one for one in others if one.name != IDLE}

    def dying(name: str) -> Callable[..., object]:
        def call(*args, **options):
            nonlocal count
            if threading.current_thread() in strangers:
                return true[name](*args, **options)
            with lock:
                count += 1
                mine = count
            if mine < number:
                return true[name](*args, **options)
            if mine == number and after_effect:
                made = true[name](*args, **options)
                if name == "open":
                    os.close(made)
            raise Killed

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in CALLS:
            patch.setattr(os, name, dying(name))
        yield lambda: count >= number


def crashes(verb: Callable[[int], object], *, after_effect: bool) -> Iterator[int]:
    """Run `verb` with a crash at each of its calls in turn; the last round has none."""
    for number in range(1, CRASHES_MAX):
        with killed_at(number, after_effect=after_effect) as died, suppress(Killed):
            verb(number)
        yield number
        if not died():
            return
    raise AssertionError(f"{CRASHES_MAX} calls are not enough")


def listed(root) -> list[int]:
    """What a plain reader of the folder sees."""
    table = ds.dataset(root, format="parquet", partitioning="hive").to_table()
    return sorted(table["n"].to_pylist()) if table.num_columns else []


def whole(root) -> list[int]:
    if not root.is_dir():  # who dies early has made no folder
        return []
    table = read_epochs(str(root)).to_table()
    return sorted(table["n"].to_pylist()) if table.num_columns else []


def in_spark_log(root) -> list[str]:
    log = SparkLog(root)
    return sorted(line.split('"')[3].rpartition("/")[2] for line in log._live(log.last()))


@pytest.mark.parametrize("after_effect", [False, True])
@pytest.mark.parametrize(("values", "with_log"), [(3, False), (5, False), (3, True)])
def test_a_commit_that_dies_at_any_call_is_finished_by_its_repeat(
    drive, tmp_path, values, with_log, after_effect
):
    rows = pa.table({"n": list(range(24)), "p": [n % values for n in range(24)]})
    prepared = {}

    def place(number: int) -> str:
        return str(tmp_path / f"{after_effect}-{number}")

    def verb(number: int) -> None:
        driver, receipts = prepared[number]
        driver.commit(1, receipts)

    def made(number: int):
        driver = drive(Files(place(number), partition_by=["p"], spark_metadata=with_log))
        driver.committer.check(rows.schema)
        driver.write(rows.slice(0, 4), 0)
        parts = (rows.slice(4, 10), rows.slice(14, 10))
        return driver, [driver.prepare(part, 1, partition=at) for at, part in enumerate(parts)]

    prepared[1] = made(1)
    for number in crashes(verb, after_effect=after_effect):
        driver, receipts = prepared[number]
        root = tmp_path / f"{after_effect}-{number}"
        assert whole(root) in ([0, 1, 2, 3], list(range(24)))
        driver.another(generation=2).commit(1, receipts)
        assert whole(root) == listed(root) == list(range(24))
        assert driver.committer.in_doubt() == []
        assert list(beside(root).glob("epochal-*")) == []
        if with_log:
            assert in_spark_log(root) == sorted(path.name for path in root.rglob("*.parquet"))
        prepared[number + 1] = made(number + 1)


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_task_that_dies_at_any_call_leaves_nothing_visible_and_is_cleared(
    drive, tmp_path, after_effect
):
    rows = pa.table({"n": list(range(8)), "p": [n % 2 for n in range(8)]})

    def driver_at(number: int):
        sink = Files(str(tmp_path / str(number)), partition_by=["p"], buffer_bytes_max=1)
        return drive(sink)

    for number in crashes(
        lambda number: driver_at(number).prepare(rows, 0), after_effect=after_effect
    ):
        driver = driver_at(number)
        assert whole(tmp_path / str(number)) == []
        again = driver.prepare(rows, 0, attempt=1)
        driver.commit(0, [again])
        for found in driver.committer.in_doubt():
            bare = Receipt(handle=found.handle, fingerprint=NO_ROWS)
            driver.committer.abort(EpochNumber(0), [bare])
        assert driver.committer.in_doubt() == []
        assert whole(tmp_path / str(number)) == listed(tmp_path / str(number)) == list(range(8))


def as_by_spark(driver, rows: pa.Table, number: int) -> EngineWritten:
    """As a job of Spark's own writer: two files with checksums, one of them without rows."""
    handle = driver.identity.job_handle(EpochNumber(0), number)
    asked = driver.committer.engine_write(handle, rows.schema, "parquet")
    folder = Path(asked.folder.removeprefix("file://"))
    written: list[Path] = []
    for value, part in enumerate((rows, rows.slice(0, 0))):
        name = f"part-0000{value}-6ad0-c000.snappy.parquet"
        (folder / f"p={value}").mkdir(parents=True)
        written.append(folder / f"p={value}" / name)
        pq.write_table(part.drop_columns("p"), written[-1])
        (folder / f"p={value}" / f".{name}.crc").write_bytes(b"crc")
    return EngineWritten(
        handle=handle,
        schema=rows.schema,
        fingerprint=Fingerprint(rows.num_rows, 7),
        files=len(written),
        bytes=sum(path.stat().st_size for path in written),
    )


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_driver_that_dies_at_any_call_while_it_gathers_a_job_leaves_nothing_visible(
    drive, tmp_path, after_effect
):
    rows = pa.table({"n": list(range(8)), "p": [0] * 8})

    def driver_at(number: int):
        return drive(Files(str(tmp_path / str(number)), partition_by=["p"]))

    written = {1: as_by_spark(driver_at(1), rows, 1)}
    for number in crashes(
        lambda number: driver_at(number).committer.gather(written[number]),
        after_effect=after_effect,
    ):
        driver = driver_at(number)
        assert whole(tmp_path / str(number)) == []
        receipt = driver.committer.gather(as_by_spark(driver, rows, 100))
        assert receipt.fingerprint == Fingerprint(8, 7)
        driver.commit(0, [receipt])
        for found in driver.committer.in_doubt():
            bare = Receipt(handle=found.handle, fingerprint=NO_ROWS)
            driver.committer.abort(EpochNumber(0), [bare])
        assert driver.committer.in_doubt() == []
        assert whole(tmp_path / str(number)) == listed(tmp_path / str(number)) == list(range(8))
        assert [*(tmp_path / f"{number}.epochal").glob("epochal-*")] == []
        written[number + 1] = as_by_spark(driver_at(number + 1), rows, 1)


@pytest.mark.parametrize("after_effect", [False, True])
def test_folding_that_dies_at_any_call_loses_no_proof(drive, numbers, tmp_path, after_effect):
    def driver_at(number: int):
        return drive(Files(str(tmp_path / str(number))))

    def written(number: int):
        for epoch in range(3):
            driver_at(number).write(numbers(epoch), epoch)

    written(1)
    for number in crashes(
        lambda number: driver_at(number).committer.prune(EpochNumber(1000)),
        after_effect=after_effect,
    ):
        for _ in range(2):
            assert whole(tmp_path / str(number)) == [0, 1, 2]
            assert [mark.epoch for mark in driver_at(number).committer.newest()] == [2]
            driver_at(number).committer.prune(EpochNumber(1000))
        assert list(beside(tmp_path / str(number)).rglob("*.manifest")) == []
        written(number + 1)


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_rehearsal_that_dies_at_any_call_leaves_nothing_behind(drive, tmp_path, after_effect):
    rows = pa.table({"n": list(range(8))})
    receipts = {}

    def driver_at(number: int):
        return drive(Files(str(tmp_path / str(number))))

    receipts[1] = driver_at(1).prepare(rows, 0)
    for number in crashes(
        lambda number: driver_at(number).committer.rehearse(EpochNumber(0), [receipts[number]]),
        after_effect=after_effect,
    ):
        driver = driver_at(number)
        driver.committer.abort(EpochNumber(0), [receipts[number]])
        assert driver.committer.in_doubt() == []
        assert [*(tmp_path / f"{number}.epochal").rglob("epochal-*")] == []
        receipts[number + 1] = driver_at(number + 1).prepare(rows, 0)


def test_an_abort_that_dies_at_any_call_is_finished_by_its_repeat(drive, tmp_path):
    rows = pa.table({"n": list(range(8)), "p": [n % 4 for n in range(8)]})
    receipts = {}

    def driver_at(number: int):
        return drive(Files(str(tmp_path / str(number)), partition_by=["p"]))

    receipts[1] = driver_at(1).prepare(rows, 0)
    for number in crashes(
        lambda number: driver_at(number).committer.abort(EpochNumber(0), [receipts[number]]),
        after_effect=False,
    ):
        driver_at(number).committer.abort(EpochNumber(0), [receipts[number]])
        assert driver_at(number).committer.in_doubt() == []
        with pytest.raises(PreparedLost):
            driver_at(number).commit(0, [receipts[number]])
        receipts[number + 1] = driver_at(number + 1).prepare(rows, 0)


def test_two_drivers_that_commit_one_decision_at_a_time_agree(drive, tmp_path):
    sink = Files(str(tmp_path / "out"), partition_by=["p"], spark_metadata=True)
    driver = drive(sink)
    driver.committer.check(None)
    for epoch in range(25):
        base = epoch * 12
        rows = pa.table({"n": [base + n for n in range(12)], "p": [n % 12 for n in range(12)]})
        receipts = [driver.prepare(rows, epoch)]
        drivers = [driver.another(generation=number) for number in (1, 2, 3)]
        with ThreadPoolExecutor(len(drivers)) as pool:
            done = [pool.submit(one.commit, epoch, receipts) for one in drivers]
        assert [one.exception() for one in done] == [None, None, None]
    assert whole(tmp_path / "out") == listed(tmp_path / "out") == list(range(300))
    names = sorted(path.name for path in (tmp_path / "out").rglob("*.parquet"))
    assert in_spark_log(tmp_path / "out") == names


def test_the_judge_sees_a_commit_that_forgets_a_file(drive, tmp_path, monkeypatch):
    rows = pa.table({"n": [1, 2], "p": [1, 2]})
    driver = drive(Files(str(tmp_path), partition_by=["p"]))
    receipt = driver.prepare(rows, 0)
    monkeypatch.setattr(
        "epochal.sinks.files.local.LocalStaging._move_one", lambda *move: "p=1" in str(move)
    )
    driver.commit(0, [receipt])
    assert listed(tmp_path) != [1, 2]
