"""Files in a folder: what readers see, what proves it, what is left behind."""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset as ds
import pytest

from epochal.errors import (
    CorruptRecord,
    InvariantBroken,
    Misconfigured,
    PreparedLost,
    Refused,
    TryAgain,
)
from epochal.sinks.files import Files, layout, read_epochs
from epochal.sinks.files.ledger import Ledger
from epochal.sinks.files.local import folder_beside as beside
from epochal.terms import NO_ROWS, EpochNumber, Fingerprint, Mark, Proof, Receipt, Uid


@pytest.fixture
def root(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def visible(root) -> list[int]:
    """What a plain reader of the folder sees."""
    table = ds.dataset(root, format="parquet").to_table()
    return sorted(table["n"].to_pylist()) if table.num_columns else []


def whole(root) -> list[int]:
    table = read_epochs(str(root)).to_table()
    return sorted(table["n"].to_pylist()) if table.num_columns else []


def leftovers(root) -> list[str]:
    ours = beside(root)
    found = [*ours.glob("epochal-*"), *ours.glob("scratch/*"), *ours.rglob(".*.tmp")]
    return [path.name for path in found]


def test_rows_are_visible_only_after_commit(drive, numbers, root):
    driver = drive(Files(str(root)))
    driver.committer.check(numbers().schema)
    receipt = driver.prepare(numbers(1, 2), 0)
    assert visible(root) == whole(root) == []
    driver.commit(0, [receipt])
    assert visible(root) == whole(root) == [1, 2]
    assert leftovers(root) == []
    assert json.loads(json.dumps(receipt.token)) == receipt.token


def test_every_verb_may_be_repeated(drive, numbers, root):
    driver = drive(Files(str(root)))
    wanted, surplus = driver.prepare(numbers(1), 0), driver.prepare(numbers(1), 0, attempt=1)
    for _ in range(2):
        driver.committer.check(numbers().schema)
        driver.commit(0, [wanted])
        driver.committer.abort(EpochNumber(0), [surplus, wanted])
        driver.committer.prune(EpochNumber(0))
    assert visible(root) == whole(root) == [1]
    assert driver.committer.in_doubt() == []
    assert driver.committer.outcome(EpochNumber(0), wanted) is Proof.COMMITTED
    assert driver.committer.outcome(EpochNumber(0), surplus) is Proof.ABORTED
    assert leftovers(root) == []


def test_of_two_attempts_the_named_one_wins_and_the_other_stays_in_doubt(drive, numbers, root):
    driver = drive(Files(str(root)))
    first, second = driver.prepare(numbers(1), 0), driver.prepare(numbers(1), 0, attempt=1)
    driver.commit(0, [second])
    assert visible(root) == [1]
    assert [found.handle for found in driver.committer.in_doubt()] == [first.handle]
    assert driver.committer.outcome(EpochNumber(0), first) is Proof.UNKNOWN


def test_a_commit_needs_nothing_but_the_receipts(drive, numbers, root):
    driver = drive(Files(str(root)))
    receipt = driver.prepare(numbers(4, 5), 0)
    code = (
        "import pickle, sys\n"
        "sink, identity, receipts = pickle.load(sys.stdin.buffer)\n"
        "from epochal.contract import Limits\n"
        "sink.committer(identity, Limits()).commit(0, receipts)\n"
    )
    zombie = driver.another(generation=9).identity
    given = pickle.dumps((driver.sink, zombie, [receipt]))
    subprocess.run([sys.executable, "-c", code], input=given, check=True)
    assert whole(root) == [4, 5]
    driver.commit(0, [receipt])
    assert whole(root) == [4, 5]


def test_a_killed_writer_is_listed_and_cleared(drive, numbers, root):
    driver = drive(Files(str(root), buffer_bytes_max=1))
    code = (
        "import os, pickle, signal, sys\n"
        "sink, task, rows = pickle.load(sys.stdin.buffer)\n"
        "writer = sink.writer(task)\n"
        "for batch in rows.to_batches(): writer.write(batch)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    task = driver.task(numbers(1), 0)
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=pickle.dumps((driver.sink, task, numbers(1, 2))),
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    (found,) = driver.committer.in_doubt()
    assert found.handle == task.handle
    assert 0 <= found.age_s < 60
    assert visible(root) == []
    driver.committer.abort(EpochNumber(0), [Receipt(handle=found.handle, fingerprint=NO_ROWS)])
    assert driver.committer.in_doubt() == []
    assert leftovers(root) == []


def test_a_writer_that_gives_up_leaves_nothing(drive, numbers, root):
    driver = drive(Files(str(root), buffer_bytes_max=1))
    writer = driver.sink.writer(driver.task(numbers(), 0))
    writer.write(numbers(1).to_batches()[0])
    writer.abort()
    assert leftovers(root) == []


def test_an_attempt_without_rows_prepares_nothing_and_counts(drive, numbers, root):
    driver = drive(Files(str(root)))
    empty, full = driver.prepare(numbers(), 0), driver.prepare(numbers(1), 0, partition=1)
    assert empty.rows == 0
    assert full.fingerprint == Fingerprint(1)
    assert driver.committer.outcome(EpochNumber(0), empty) is Proof.UNKNOWN
    driver.commit(0, [empty, full])
    assert driver.committer.outcome(EpochNumber(0), empty) is Proof.COMMITTED
    assert whole(root) == [1]


def test_an_empty_epoch_is_proven_too(drive, root):
    driver = drive(Files(str(root)), run="again")
    driver.commit(7, [])
    driver.commit(7, [])
    assert driver.committer.newest() == [Mark(uid=driver.uid, epoch=EpochNumber(7), run="again")]
    assert read_epochs(str(root)).to_table().num_rows == 0


def test_lost_files_are_proven_lost_and_nothing_becomes_visible(drive, numbers, root):
    driver = drive(Files(str(root)))
    kept, lost = driver.prepare(numbers(1), 0), driver.prepare(numbers(2), 0, partition=1)
    driver.committer.abort(EpochNumber(0), [lost])
    assert driver.committer.outcome(EpochNumber(0), lost) is Proof.ABORTED
    with pytest.raises(PreparedLost) as caught:
        driver.commit(0, [kept, lost])
    assert caught.value.handles == (str(lost.handle),)
    assert visible(root) == []


class Killed(BaseException):
    """As by SIGKILL: no `except Exception` sees it."""


@pytest.fixture
def killed_before_the_manifest(monkeypatch):
    """Commit an epoch up to its manifest, and die."""

    def commit(driver, epoch, receipts):
        def die(*_):
            raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(Ledger, "put", die)
            with pytest.raises(Killed):
                driver.commit(epoch, receipts)

    return commit


@pytest.mark.parametrize("with_log", [False, True])
def test_files_that_a_consumer_took_away_before_the_manifest_are_not_written_again(
    drive, numbers, root, killed_before_the_manifest, with_log
):
    driver = drive(Files(str(root), spark_metadata=with_log))
    driver.committer.check(numbers().schema)
    receipts = [driver.prepare(numbers(at), 0, partition=at) for at in range(2)]
    killed_before_the_manifest(driver, 0, receipts)
    consumed = [path.unlink() for path in root.glob("*.parquet")][:1]
    assert len(consumed) == 1
    again = driver.another(generation=2)
    for receipt in receipts:
        assert again.committer.outcome(EpochNumber(0), receipt) is Proof.UNKNOWN
        again.committer.abort(EpochNumber(0), [receipt])
    again.commit(0, receipts)
    assert [mark.epoch for mark in again.committer.newest()] == [0]
    assert again.committer.in_doubt() == []
    assert leftovers(root) == []


def test_files_that_a_cleaner_took_with_their_folder_while_they_were_shown_are_left_to_a_person(
    drive, numbers, root, killed_before_the_manifest
):
    driver = drive(Files(str(root)))
    receipt = driver.prepare(numbers(1), 0)
    killed_before_the_manifest(driver, 0, [receipt])
    (shown,) = root.glob("*.parquet")
    shown.unlink()
    (beside(root) / str(receipt.handle)).rmdir()
    with pytest.raises(InvariantBroken) as caught:
        driver.commit(0, [receipt])
    (note,) = beside(root).rglob("*.showing")
    assert str(note) in caught.value.hint
    note.unlink()
    with pytest.raises(PreparedLost):
        driver.commit(0, [receipt])


def test_a_prepared_file_that_was_cut_is_lost_and_never_shown(drive, numbers, root):
    driver = drive(Files(str(root)))
    receipt = driver.prepare(numbers(1, 2), 0)
    (prepared,) = beside(root).glob("epochal-*/*.parquet")
    prepared.write_bytes(prepared.read_bytes()[:-1])
    with pytest.raises(PreparedLost) as caught:
        driver.another(generation=2).commit(0, [receipt])
    assert caught.value.handles == (str(receipt.handle),)
    assert visible(root) == []


def test_an_abort_ends_while_a_zombie_goes_on_writing(drive, root):
    driver = drive(Files(str(root), partition_by=["p"]))
    prepared = beside(root) / str(driver.handle(0))
    go_on = True

    def write() -> None:
        number = 0
        while go_on:
            folder = prepared / f"p={number % 50}"
            number += 1
            with suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                (folder / f"{number}").touch()

    zombie = threading.Thread(target=write)
    zombie.start()
    try:
        bare = Receipt(handle=driver.handle(0), fingerprint=NO_ROWS)
        for _ in range(50):
            driver.committer.abort(EpochNumber(0), [bare])
    finally:
        go_on = False
        zombie.join()
    driver.committer.abort(EpochNumber(0), [bare])
    assert driver.committer.in_doubt() == []
    assert leftovers(root) == []


@pytest.mark.parametrize("form", ["parquet", "jsonl", "csv"])
def test_a_full_disk_is_reported_with_path_and_hint_and_may_be_tried_again(
    drive, numbers, root, form
):
    sink = Files(str(root), format=form, compression="none")
    driver = drive(sink)
    name = layout.file_name(driver.handle(0), 0, f".{form}")
    full = beside(root) / str(driver.handle(0)) / name
    full.parent.mkdir(parents=True)
    full.symlink_to("/dev/full")
    with pytest.raises(TryAgain) as caught:
        driver.prepare(numbers(*range(100_000)), 0)
    assert str(full.parent) in caught.value.message
    assert "No space left" in caught.value.message
    assert "free some space" in caught.value.hint


def test_a_task_whose_files_are_half_moved_and_half_lost_is_left_to_a_person(drive, root):
    driver = drive(Files(str(root), partition_by=["p"]))
    receipt = driver.prepare(pa.table({"n": [1, 2], "p": ["a", "b"]}), 0)
    moved, gone = (file["path"] for file in receipt.token["files"])
    prepared = beside(root) / str(receipt.handle)
    (root / moved).parent.mkdir()
    (prepared / moved).rename(root / moved)
    (prepared / gone).rename(root / "kept elsewhere")
    # Not PreparedLost: written again, the rows of the moved file would be there twice.
    with pytest.raises(InvariantBroken) as caught:
        driver.commit(0, [receipt])
    assert str(root / moved) in caught.value.message
    assert str(root / gone) in caught.value.message
    (root / "kept elsewhere").rename(prepared / gone)
    driver.commit(0, [receipt])
    assert whole(root) == [1, 2]


def test_an_epoch_can_not_be_committed_with_other_winners(drive, numbers, root):
    driver = drive(Files(str(root)))
    driver.write(numbers(1), 0)
    with pytest.raises(Refused, match="a copy of this epoch log is at work"):
        driver.commit(0, [driver.prepare(numbers(1), 0, attempt=7)])
    assert visible(root) == [1]


def test_an_abort_leaves_alone_what_a_cut_commit_has_begun_to_move(drive, numbers, root):
    driver = drive(Files(str(root), max_file_bytes=1, buffer_bytes_max=1))
    receipt = driver.prepare(numbers(*range(2500)), 0)
    prepared = beside(root) / str(receipt.handle)
    first = receipt.token["files"][0]["path"]
    (prepared / first).rename(root / first)
    driver.committer.abort(EpochNumber(0), [receipt])
    assert driver.committer.outcome(EpochNumber(0), receipt) is Proof.UNKNOWN
    driver.commit(0, [receipt])
    assert whole(root) == list(range(2500))


def after_each(monkeypatch, name: str, act, *, of: str = "") -> None:
    """Have somebody else act after each call of `os` with this name, but for their own."""
    call, is_acting = getattr(os, name), False

    def called(path, *args, **named):
        nonlocal is_acting
        result = call(path, *args, **named)
        if not is_acting and of in str(path):
            is_acting = True
            act()
            is_acting = False
        return result

    monkeypatch.setattr(os, name, called)


def test_who_lists_what_is_prepared_at_any_moment_of_a_rehearsal_takes_nothing_away(
    drive, numbers, root, monkeypatch
):
    driver = drive(Files(str(root)))
    receipt = driver.prepare(numbers(1, 2), 0)
    operator = drive(Files(str(root))).committer
    with monkeypatch.context() as patch:
        after_each(patch, "rename", operator.in_doubt)
        driver.committer.rehearse(EpochNumber(0), [receipt])
    driver.commit(0, [receipt])
    assert visible(root) == [1, 2]
    assert leftovers(root) == []


def test_two_that_check_one_folder_at_one_moment_do_not_disturb_each_other(
    drive, numbers, root, monkeypatch
):
    one, other = drive(Files(str(root))).committer, drive(Files(str(root))).committer
    after_each(monkeypatch, "mkdir", lambda: other.check(None), of="probe")
    one.check(numbers(1).schema)
    assert list(root.iterdir()) == []


def test_only_what_is_this_pipelines_and_this_sinks_is_listed(drive, numbers, root):
    driver = drive(Files(str(root)))
    elsewhere = driver.another(uid=Uid("zzzzzzzz2222"))
    sibling = drive(Files(str(root), name="sibling"))
    for other in (elsewhere, sibling):
        other.prepare(numbers(1), 0)
    odd = beside(root) / f"epochal-{driver.uid}-from-the-future"
    odd.mkdir()
    (beside(root) / "somebody's").mkdir()
    (found,) = driver.committer.in_doubt()
    assert (found.name, found.handle) == (odd.name, None)


def test_two_sinks_of_one_pipeline_may_share_a_folder(drive, numbers, root):
    small, large = drive(Files(str(root), name="small")), drive(Files(str(root), name="large"))
    small.write(numbers(1), 0)
    large.write(numbers(100), 0)
    assert visible(root) == whole(root) == [1, 100]
    assert [mark.epoch for mark in small.committer.newest()] == [0]


def test_another_life_of_the_pipeline_is_seen_and_another_pipeline_is_not(drive, numbers, root):
    driver = drive(Files(str(root)))
    driver.write(numbers(1), 5)
    driver.another(uid=Uid("zzzzzzzz2222"), pipeline="else").write(numbers(2), 9)
    life = driver.another(uid=Uid("bbbbbbbb2222"))
    assert life.committer.newest() == [Mark(uid=driver.uid, epoch=EpochNumber(5))]


def test_the_folder_of_a_finished_commit_is_cleaned_by_the_next_listing(drive, numbers, root):
    driver = drive(Files(str(root), partition_by=["p"]))
    rows = numbers(1).append_column("p", pa.array(["x"]))
    (receipt,) = driver.write(rows, 0)
    (beside(root) / str(receipt.handle) / "p=x").mkdir(parents=True)
    assert driver.committer.in_doubt() == []
    assert leftovers(root) == []


def test_a_receipt_can_not_name_a_file_outside(drive, numbers, root):
    driver = drive(Files(str(root)))
    for path in ("../x", "/etc/x", "_hidden/x", "a/../../x", ""):
        token = {"files": [{"path": path, "rows": 1, "bytes": 1}]}
        receipt = Receipt(handle=driver.handle(0), fingerprint=NO_ROWS, token=token)
        for verb in (driver.committer.commit, driver.committer.abort):
            with pytest.raises(InvariantBroken, match="no writer of ours"):
                verb(EpochNumber(0), [receipt])


def test_files_roll_at_the_limit_and_no_row_is_lost(drive, numbers, root):
    driver = drive(Files(str(root), max_file_bytes=1, buffer_bytes_max=1))
    (receipt,) = driver.write(numbers(*range(3500)), 0)
    assert [file["rows"] for file in receipt.token["files"]] == [1000, 1000, 1000, 500]
    assert receipt.bytes == sum(file.stat().st_size for file in root.glob("*.parquet"))
    assert whole(root) == list(range(3500))


def test_many_partition_values_stay_within_open_files_and_bytes(drive, root):
    sink = Files(str(root), partition_by=["p"], open_files_max=3, buffer_bytes_max=20_000)
    driver = drive(sink)
    rows = pa.table({"n": list(range(5000)), "p": [n % 50 for n in range(5000)]})
    writer = sink.writer(driver.task(rows, 0))
    gathering, most_open, most_bytes = writer._rows, 0, 0
    for batch in rows.to_batches(max_chunksize=500):
        writer.write(batch)
        most_open = max(most_open, len(gathering._open))
        most_bytes = max(most_bytes, gathering._waiting_bytes + gathering._arrived.bytes)
    receipt = writer.prepare()
    assert 0 < most_open <= 3
    assert most_bytes <= 20_000
    driver.commit(0, [receipt])
    assert whole(root) == list(range(5000))


def test_a_corrupt_manifest_is_named(drive, numbers, root):
    driver = drive(Files(str(root)))
    driver.write(numbers(1), 0)
    (manifest,) = (beside(root) / "epochs").rglob("*.manifest")
    newer = manifest.read_bytes().replace(b'"version": 1', b'"version": 2')
    for content in (b'{"version": 1', b"[]", b'{"version": 1}', b"", newer):
        manifest.write_bytes(content)
        with pytest.raises(CorruptRecord, match=manifest.name):
            driver.committer.newest()


def test_the_newest_is_found_among_a_million_epochs_without_reading_them(drive, root):
    driver = drive(Files(str(root)))
    driver.commit(999_999, [])
    life = next((beside(root) / "epochs").iterdir())
    for bucket in range(999):
        (life / f"{bucket:017d}").mkdir()
    started = time.process_time()
    assert [mark.epoch for mark in driver.committer.newest()] == [999_999]
    assert time.process_time() - started < 0.5


def test_pruning_folds_manifests_and_forgets_none(drive, numbers, root):
    driver = drive(Files(str(root)))
    receipts = {epoch: driver.write(numbers(epoch), epoch) for epoch in (0, 1, 998, 1000, 2001)}
    driver.committer.prune(EpochNumber(2001))
    names = sorted(path.name for path in (beside(root) / "epochs").rglob("*.manifest*"))
    assert names == [f"{0:017d}.manifests", f"{1:017d}.manifests", f"{2001:020d}.manifest"]
    assert whole(root) == [0, 1, 998, 1000, 2001]
    for epoch, (receipt,) in receipts.items():
        driver.commit(epoch, [receipt])
        assert driver.committer.outcome(EpochNumber(epoch), receipt) is Proof.COMMITTED
    assert [mark.epoch for mark in driver.committer.newest()] == [2001]
    driver.committer.prune(EpochNumber(10_000))
    assert [mark.epoch for mark in driver.committer.newest()] == [2001]
    assert whole(root) == [0, 1, 998, 1000, 2001]


def test_check_refuses_what_can_not_work(drive, numbers, root, tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", "/proc/epochal"):
        with pytest.raises(Misconfigured, match="can't write to"):
            drive(Files(str(path))).committer.check(None)
    nested = pa.schema([("n", pa.int64()), ("deep", pa.list_(pa.int64()))])
    cases = [
        ({"format": "csv"}, nested, "'deep'"),
        ({"partition_by": ["deep"]}, nested, "'deep'"),
        ({"partition_by": ["other"]}, nested, "other"),
        ({"partition_by": ["n"]}, numbers().schema, "every column"),
        ({}, pa.schema([("v", pa.struct([("d", pa.duration("us"))]))]), "'v'"),
        ({"format": "jsonl"}, pa.schema([("v", pa.list_(pa.duration("us")))]), "'v'"),
        ({"format": "csv"}, pa.schema([("v", pa.binary())]), "'v'"),
        ({}, pa.schema([("v", pa.null())]), "'v'"),
        ({}, pa.schema([("v", pa.int64()), ("v", pa.int64())]), "more than once"),
        ({}, pa.schema([]), "no columns"),
    ]
    for options, schema, message in cases:
        with pytest.raises(Misconfigured, match=message):
            drive(Files(str(root), **options)).committer.check(schema)
    assert visible(root) == []


def test_files_that_the_driver_can_not_move_are_refused_before_the_decision(drive, numbers, root):
    driver = drive(Files(str(root)))
    receipt = driver.prepare(numbers(1), 0)
    driver.committer.rehearse(EpochNumber(0), [receipt])
    prepared = beside(root) / str(receipt.handle)
    path = prepared / receipt.token["files"][0]["path"]
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(Misconfigured, match="bytes"):
        driver.committer.rehearse(EpochNumber(0), [receipt])
    path.unlink()
    with pytest.raises(Misconfigured, match="does not see it"):
        driver.committer.rehearse(EpochNumber(0), [receipt])


def test_a_partition_on_another_file_system_is_refused_before_the_decision(drive, root, elsewhere):
    driver = drive(Files(str(root), partition_by=["p"]))
    receipt = driver.prepare(pa.table({"n": [1], "p": ["x"]}), 0)
    (root / "p=x").symlink_to(elsewhere)
    with pytest.raises(Misconfigured, match="mount of its own"):
        driver.committer.rehearse(EpochNumber(0), [receipt])


def test_a_link_to_another_file_system_is_refused(drive, root, elsewhere):
    beside(root).symlink_to(elsewhere)
    with pytest.raises(Misconfigured, match="another file system"):
        drive(Files(str(root))).committer.check(None)


def test_declarations_are_checked_when_they_are_made(root):
    for options in (
        {"format": "ork"},
        {"compression": "brotli9"},
        {"format": "csv", "compression": "snappy"},
        {"max_file_bytes": 0},
        {"open_files_max": 0},
        {"partition_by": "day"},
        {"partition_by": ["_day"]},
        {"partition_by": ["day", "day"]},
    ):
        with pytest.raises(Misconfigured):
            Files(str(root), **options)
    for url in (
        "s3://key:secret@bucket/x",
        "s3:///x",
        "s3://b/a//b",
        "hdfs://host/x",
        "file://host/x",
        "",
        "/",
        "/data/out.epochal/",
    ):
        with pytest.raises(Misconfigured):
            Files(url)
    assert Files("file:///a%20b/c").path == "/a b/c"
    assert Files("x/../y").path == str(Path("y").absolute())
    assert Files("/data/out").name == "files:/data/out"
    assert pickle.loads(pickle.dumps(Files("/data/out"))) == Files("/data/out")


def test_a_task_loads_neither_pandas_nor_arrows_datasets():
    code = (
        "import sys; import epochal.sinks.files\n"
        "print([name for name in ('pandas', 'pyarrow.dataset') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "[]"
