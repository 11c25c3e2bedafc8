"""Files on S3: what readers see, what proves it, what is left behind, and servers that fail."""

from __future__ import annotations

import io
import json
import os
import pickle
import threading
import time
import traceback
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.fs as pa_fs
import pyarrow.parquet as pq
import pytest
from botocore.exceptions import ClientError
from servers.s3 import ACCESS_KEY, SECRET
from servers.s3_faults import Answer, Faults, Late, Lost, Torn, faulty

import epochal as ep
from epochal.errors import (
    Fenced,
    InvariantBroken,
    Misconfigured,
    PreparedLost,
    TryAgain,
)
from epochal.sinks.files import Files, layout, read_epochs
from epochal.sinks.files.s3 import PART_BYTES
from epochal.terms import NO_ROWS, EpochNumber, Proof, Receipt

EXPIRY = """<LifecycleConfiguration><Rule><ID>old</ID><Filter><Prefix>{prefix}</Prefix></Filter>
<Status>Enabled</Status><Expiration><Days>{days}</Days></Expiration></Rule></LifecycleConfiguration>"""
LIFECYCLE = """<LifecycleConfiguration><Rule><ID>clean</ID><Filter>
<Prefix>{prefix}</Prefix></Filter><Status>{status}</Status><AbortIncompleteMultipartUpload><DaysAfterInitiation>{days}
</DaysAfterInitiation></AbortIncompleteMultipartUpload></Rule></LifecycleConfiguration>"""


@dataclass(frozen=True)
class Behind:
    """A folder of the bucket that is reached through a proxy with faults."""

    folder: Any
    faults: Faults
    url: str
    drive: Any

    def driver(self, *, reached=None, **options):
        options_given = {**self.folder.server.options(self.url), **(reached or {})}
        return self.drive(self.folder.sink(storage_options=options_given, **options))


@pytest.fixture
def behind(s3, folder, drive):
    with faulty(s3.port) as (url, faults):
        yield Behind(folder, faults, url, drive)


def seen(folder) -> list[int]:
    return sorted(row["n"] for row in folder.rows())


def whole(folder, **chosen) -> list[int]:
    rows = read_epochs(folder.url, storage_options=folder.server.options(), **chosen).to_table()
    return sorted(rows["n"].to_pylist()) if rows.num_columns else []


# What readers see


def test_an_upload_is_invisible_until_it_is_committed_and_nothing_is_copied(drive, numbers, folder):
    driver = drive(folder.sink())
    receipt = driver.prepare(numbers(1, 2), 0)
    assert folder.shown() == []
    ((key, upload),) = folder.uploads()
    (file,) = receipt.token["files"]
    assert (key, upload) == (f"{folder.name}/{file['path']}", file["upload"])
    driver.commit(0, [receipt])
    assert folder.shown() == [file["path"]]
    assert seen(folder) == whole(folder) == [1, 2]
    assert folder.leftovers() == []


def test_large_files_go_in_parts_while_memory_stays_bounded(drive, folder):
    driver = drive(folder.sink(compression="none", buffer_bytes_max=PART_BYTES))
    rows = pa.table({"n": range(100), "blob": [os.urandom(200_000) for _ in range(100)]})
    writer = driver.sink.writer(driver.task(rows, 0))
    most = 0
    for batch in rows.to_batches(max_chunksize=10):
        writer.write(batch)
        most = max(most, writer._attempt.held_bytes)
    receipt = writer.prepare()
    (file,) = receipt.token["files"]
    assert len(file["parts"]) == 3
    assert file["bytes"] > 2 * PART_BYTES
    assert most < PART_BYTES
    driver.commit(0, [receipt])
    table = pq.read_table(io.BytesIO(folder.content(file["path"])))
    assert table.equals(rows.cast(table.schema))


def test_many_partitions_hold_no_more_than_the_limit(drive, folder):
    sink = folder.sink(partition_by=["p"], format="jsonl", buffer_bytes_max=40_000)
    driver = drive(sink)
    rows = pa.table({"n": range(4000), "p": [n % 20 for n in range(4000)]})
    writer = sink.writer(driver.task(rows, 0))
    for batch in rows.to_batches(max_chunksize=200):
        writer.write(batch)
        assert writer._attempt.held_bytes <= 40_000
    driver.commit(0, [writer.prepare()])
    assert whole(folder) == list(range(4000))


def test_whole_epochs_are_read_by_every_reader(drive, folder, s3):
    driver = drive(folder.sink(partition_by=["day"]))
    for epoch in range(3):
        days = [f"2026-01-0{n}" for n in (1, 2)]
        driver.write(pa.table({"n": [2 * epoch, 2 * epoch + 1], "day": days}), epoch)
    files = pa_fs.S3FileSystem(
        endpoint_override=s3.url.removeprefix("http://"),
        scheme="http",
        access_key=ACCESS_KEY,
        secret_key=SECRET,
        region="us-east-1",
        force_virtual_addressing=False,
    )
    shown = [f"lake/{folder.name}/{key}" for key in folder.shown()]
    tables = [pq.read_table(key, filesystem=files) for key in shown]
    assert sorted(pa.concat_tables(tables)["n"].to_pylist()) == list(range(6))
    for chosen, wanted in ((None, range(6)), (range(1, 3), range(2, 6)), ({1}, (2, 3))):
        assert whole(folder, epochs=chosen) == list(wanted)
    dataset = read_epochs(folder.url, storage_options=s3.options())
    with duckdb.connect() as connection:
        connection.register("epochs", dataset)
        found = connection.sql("select day, count(*), sum(n) from epochs group by day order by day")
        assert found.fetchall() == [("2026-01-01", 3, 6), ("2026-01-02", 3, 9)]


@pytest.mark.parametrize("form", ["jsonl", "csv"])
def test_text_formats_come_back_from_hidden_data_too(drive, folder, form):
    sink = folder.sink(format=form, partition_by=["p"], uploads="manifest", compression="gzip")
    driver = drive(sink)
    driver.write(pa.table({"n": [1, 2, 3], "p": ["a/b", None, "a/b"]}), 0)
    rows = read_epochs(folder.url, storage_options=folder.server.options()).to_table()
    assert sorted(zip(rows["n"].to_pylist(), rows["p"].to_pylist(), strict=True)) == [
        (1, "a/b"),
        (2, None),
        (3, "a/b"),
    ]
    assert folder.shown() == []


# Proofs


def test_an_object_of_somebody_else_at_the_key_is_not_taken_for_ours(drive, numbers, folder):
    driver = drive(folder.sink())
    receipt = driver.prepare(numbers(1), 0)
    (file,) = receipt.token["files"]
    driver.committer.abort(EpochNumber(0), [receipt])
    key = f"{folder.name}/{file['path']}"
    folder.server.client.put_object(Bucket="lake", Key=key, Body=b"x" * file["bytes"])
    with pytest.raises(PreparedLost) as caught:
        driver.commit(0, [receipt])
    assert caught.value.handles == (str(receipt.handle),)
    assert driver.committer.outcome(EpochNumber(0), receipt) is Proof.ABORTED


def test_objects_that_a_consumer_took_away_before_the_manifest_are_not_written_again(
    drive, numbers, folder, monkeypatch
):
    def die(*_):
        raise KeyboardInterrupt

    driver = drive(folder.sink())
    receipts = [driver.prepare(numbers(at), 0, partition=at) for at in range(2)]
    with monkeypatch.context() as patch:
        patch.setattr("epochal.sinks.files.ledger.Ledger.put", die)
        with pytest.raises(KeyboardInterrupt):
            driver.commit(0, receipts)
    taken, kept = folder.shown()
    folder.server.client.delete_object(Bucket="lake", Key=f"{folder.name}/{taken}")
    again = driver.another(generation=2)
    for receipt in receipts:
        assert again.committer.outcome(EpochNumber(0), receipt) is Proof.UNKNOWN
    late = drive(folder.sink(recovery_days=1))
    with monkeypatch.context() as patch:
        patch.setattr("epochal.sinks.files.ledger.time.time", lambda: time.monotonic() + 1e10)
        with pytest.raises(InvariantBroken, match="removed"):
            late.commit(0, receipts)
    again.commit(0, receipts)
    assert folder.shown() == [kept]
    assert [mark.epoch for mark in again.committer.newest()] == [0]
    assert folder.leftovers() == []


def test_an_object_taken_away_after_the_answer_to_its_completion_was_lost_is_not_written_again(
    numbers, behind
):
    """The repeated request finds neither the upload nor the object."""
    driver, folder, faults = behind.driver(), behind.folder, behind.faults
    receipt = driver.prepare(numbers(1), 0)
    taken: list[str] = []
    lost: list[str] = []

    def choose(request):
        if request.verb == "complete":
            # As S3 answers; the server of these tests says once more that it is done.
            lost.append(request.path)
            return Answer(404, "NoSuchUpload") if lost[1:] else Lost()
        if request.verb == "head" and lost and not taken:
            taken.extend(folder.shown())
            folder.server.client.delete_object(Bucket="lake", Key=f"{folder.name}/{taken[0]}")
        return None

    driver.committer.rehearse(EpochNumber(0), [receipt])
    faults.fault = choose
    with pytest.raises(TryAgain, match="before its answer was lost"):
        driver.committer.commit(EpochNumber(0), [receipt])
    assert len(taken) == 1
    driver.committer.commit(EpochNumber(0), [receipt])
    assert folder.shown() == []
    assert driver.committer.outcome(EpochNumber(0), receipt) is Proof.COMMITTED
    assert folder.leftovers() == []


def test_a_task_half_complete_and_half_lost_is_left_to_a_person(drive, folder):
    driver = drive(folder.sink(partition_by=["p"]))
    receipt = driver.prepare(pa.table({"n": [1, 2], "p": ["a", "b"]}), 0)
    done, lost = receipt.token["files"]
    store = driver.committer._staging.store
    assert store.complete(done["path"], done["upload"], done["parts"])
    driver.committer.abort(EpochNumber(0), [receipt])
    assert len(folder.uploads()) == 1, "a handle that is being committed was aborted"
    store.abort_upload(lost["path"], lost["upload"])
    with pytest.raises(InvariantBroken, match="written again"):
        driver.commit(0, [receipt])


def test_a_late_task_is_never_completed_and_is_cleared(drive, numbers, folder):
    driver = drive(folder.sink())
    newer = driver.another(generation=2)
    newer.write(numbers(1), 0)
    driver.prepare(numbers(1), 0, attempt=7)
    (late,) = newer.committer.in_doubt()
    assert late.handle == driver.handle(0, attempt=7)
    newer.committer.abort(EpochNumber(0), [late.receipt])
    assert seen(folder) == [1]
    assert folder.leftovers() == []


def test_a_killed_task_is_listed_with_all_its_files_and_cleared_by_its_name_alone(drive, folder):
    driver = drive(folder.sink(partition_by=["p"], buffer_bytes_max=1, open_files_max=1))
    writer = driver.sink.writer(driver.task(rows := pa.table({"n": [1, 2], "p": [1, 2]}), 0))
    writer.write(rows.to_batches()[0])
    for stream in writer._attempt._streams.values():
        stream.close()
    writer._attempt._sender._pool.shutdown(wait=True)
    assert len(folder.uploads()) == 2
    (found,) = driver.committer.in_doubt()
    assert 0 <= found.age_s < 60
    bare = Receipt(handle=found.handle, fingerprint=NO_ROWS)
    driver.committer.abort(EpochNumber(0), [bare])
    assert folder.leftovers() == []


def test_an_upload_that_a_killed_task_left_behind_a_manifest_is_ended_with_its_attempt(
    drive, numbers, folder
):
    driver = drive(folder.sink(uploads="manifest"))
    receipt = driver.prepare(numbers(1), 0)
    store = driver.committer._staging.stores.ours
    store.begin_upload(f"{layout.data(receipt.handle)}/killed.parquet")
    assert len(folder.uploads()) == 1
    driver.committer.abort(EpochNumber(0), [receipt])
    assert folder.leftovers() == []


# Servers that fail


@pytest.mark.parametrize(
    ("verb", "fault"),
    [
        *((verb, Answer(503, "SlowDown")) for verb in ("create", "part", "put", "head")),
        *((verb, Lost()) for verb in ("create", "part", "put", "complete")),
        ("complete", Answer(500, "InternalError")),
        ("complete", Late(0.3)),
    ],
)
def test_a_fault_that_passes_is_not_noticed(numbers, behind, verb, fault):
    driver, folder, faults = behind.driver(), behind.folder, behind.faults
    faults.once(verb, fault)
    driver.write(numbers(1, 2), 0)
    assert faults.count(verb) >= (1 if isinstance(fault, Late) else 2)
    assert driver.committer.in_doubt() == []
    assert seen(folder) == whole(folder) == [1, 2]
    assert folder.leftovers() == [], "an upload that was begun twice is left behind"


@pytest.mark.parametrize("verb", ["part", "complete", "uploads"])
def test_a_fault_that_stays_is_reported_and_the_repeat_finishes(numbers, behind, verb, monkeypatch):
    monkeypatch.setattr("epochal.sinks.files.s3._ATTEMPTS", 1)
    driver, folder, faults = behind.driver(reached={"region": "x"}), behind.folder, behind.faults
    faults.once(verb, Answer(503, "SlowDown"), times=3)
    with pytest.raises(TryAgain, match="SlowDown"):
        driver.write(numbers(1, 2), 0)
    faults.fault = lambda request: None
    assert seen(folder) == whole(folder) == []
    driver.commit(0, [again := driver.prepare(numbers(1, 2), 0, attempt=1)])
    driver.commit(0, [again])
    for found in driver.committer.in_doubt():
        driver.committer.abort(EpochNumber(0), [found.receipt])
    assert seen(folder) == whole(folder) == [1, 2]
    assert folder.leftovers() == []


@pytest.mark.parametrize("status", [200, 404, 500])
def test_an_answer_that_is_cut_short_says_nothing(numbers, behind, status):
    driver, faults = behind.driver(), behind.faults
    (receipt,) = driver.write(numbers(1), 0)
    faults.once("get", Torn(status), times=9)
    with pytest.raises(TryAgain):
        driver.committer.outcome(EpochNumber(0), receipt)
    faults.fault = lambda request: None
    assert driver.committer.outcome(EpochNumber(0), receipt) is Proof.COMMITTED


def test_the_judge_sees_a_commit_that_believes_the_server(numbers, behind, monkeypatch):
    driver, folder, faults = behind.driver(), behind.folder, behind.faults
    receipt = driver.prepare(numbers(1), 0)
    done = b"<CompleteMultipartUploadResult><ETag>x</ETag></CompleteMultipartUploadResult>"
    faults.once("complete", Answer(200, body=done))
    with pytest.raises(TryAgain, match="does not show"):
        driver.commit(0, [receipt])
    faults.once("complete", Answer(200, body=done))
    monkeypatch.setattr("epochal.sinks.files.s3.S3Store.is_object_of", lambda *_: True)
    driver.commit(0, [receipt])
    assert seen(folder) != [1]


def test_a_server_killed_while_a_task_writes_and_while_a_driver_commits(drive, s3, folder):
    driver = drive(folder.sink(partition_by=["p"], buffer_bytes_max=1, open_files_max=1))
    rows = pa.table({"n": list(range(40)), "p": [n % 20 for n in range(40)]})

    def die_and_come_back(after_s: float) -> threading.Thread:
        def kill() -> None:
            time.sleep(after_s)
            s3.kill()
            s3.start()

        thread = threading.Thread(target=kill)
        thread.start()
        return thread

    def insist(verb):
        while True:
            try:
                return verb()
            except TryAgain:
                time.sleep(0.05)

    thread, attempts = die_and_come_back(0.05), iter(range(100))
    receipt = insist(lambda: driver.prepare(rows, 0, attempt=next(attempts)))
    thread.join()
    thread = die_and_come_back(0.05)
    insist(lambda: driver.commit(0, [receipt]))
    thread.join()
    assert seen(folder) == whole(folder) == list(range(40))

    def sweep() -> None:
        for found in insist(driver.committer.in_doubt):
            driver.committer.abort(EpochNumber(0), [found.receipt])

    def left() -> list[object]:
        """
        All but uploads that the server lists and does not know: it keeps two records of each, and
        was killed between them.
        """
        known = [one for one in folder.uploads() if is_known(folder, *one)]
        return [*known, *(one for one in folder.leftovers() if isinstance(one, str))]

    # Again and again, as drivers do: requests of an attempt that gave up may still be on their way.
    deadline = time.monotonic() + 120
    sweep()
    while left() and time.monotonic() < deadline:
        time.sleep(0.2)
        sweep()
    assert left() == []


def is_known(folder, key: str, upload: str) -> bool:
    """Whether a server has an upload that it lists, by what it says of a part that nobody sent."""
    parts = {"Parts": [{"ETag": '"0"', "PartNumber": 9999}]}
    with pytest.raises(ClientError) as caught:
        folder.server.client.complete_multipart_upload(
            Bucket="lake", Key=key, UploadId=upload, MultipartUpload=parts
        )
    return caught.value.response["Error"]["Code"] != "NoSuchUpload"


@pytest.mark.parametrize(
    ("answer", "hint"),
    [
        (Answer(403, "AccessDenied"), "grants()"),
        (Answer(404, "NoSuchBucket"), "must exist"),
        (Answer(400, "AuthorizationHeaderMalformed"), "region"),
    ],
)
def test_what_only_a_person_can_fix_is_reported_without_secrets(behind, answer, hint):
    driver = behind.driver()
    behind.faults.once("put", answer, times=10)
    with pytest.raises(Misconfigured) as caught:
        driver.committer.check(None)
    assert hint in caught.value.hint
    shown = "".join(traceback.format_exception(caught.value)) + repr(driver.sink)
    assert SECRET not in shown
    assert ACCESS_KEY not in shown


# What a bucket promises


def test_check_reports_what_the_bucket_can_do_and_leaves_nothing(drive, numbers, folder):
    abilities = {one.name: one for one in drive(folder.sink()).committer.check(numbers().schema)}
    kept = abilities["kept by the bucket's lifecycle rules"]
    assert not kept.granted
    assert "NotImplemented" in kept.because
    assert abilities["incomplete uploads"].granted
    assert folder.shown() == folder.ours() == folder.uploads() == []


@pytest.mark.parametrize(
    ("rule", "is_refused"),
    [
        (("", 1, "Enabled"), True),
        (("{folder}", 2, "Enabled"), True),
        (("{folder}/day=1", 1, "Enabled"), True),
        (("", 3, "Enabled"), False),
        (("", 1, "Disabled"), False),
        (("other/", 1, "Enabled"), False),
    ],
)
def test_a_rule_that_aborts_uploads_too_soon_is_refused(behind, rule, is_refused):
    prefix, days, status = rule
    rules = LIFECYCLE.format(
        prefix=prefix.format(folder=behind.folder.name), days=days, status=status
    )
    behind.faults.once("lifecycle", Answer(200, body=rules.replace("\n", "").encode()))
    check = behind.driver().committer.check
    if is_refused:
        with pytest.raises(Misconfigured, match="recoverable"):
            check(None)
    else:
        assert all(one.granted for one in check(None) if one.name.startswith("kept by"))


@pytest.mark.parametrize("uploads", ["multipart", "manifest"])
@pytest.mark.parametrize(
    ("prefix", "days", "judged"),
    [
        ("{folder}.epochal/", 1, "refused"),
        ("{folder}.epochal/data", 1, "refused"),
        ("", 30, "reported"),
        ("{folder}/", 1, "granted"),
    ],
)
def test_a_rule_that_expires_what_is_beside_the_rows_is_noticed(
    behind, uploads, prefix, days, judged
):
    rules = EXPIRY.format(prefix=prefix.format(folder=behind.folder.name), days=days)
    behind.faults.once("lifecycle", Answer(200, body=rules.replace("\n", "").encode()))
    check = behind.driver(uploads=uploads).committer.check
    if judged == "refused":
        with pytest.raises(Misconfigured, match="expires objects after 1 days"):
            check(None)
    else:
        (kept,) = [one for one in check(None) if one.name.startswith("kept by")]
        assert kept.granted == (judged == "granted")
        assert ("expires objects after 30 days" in kept.because) == (judged == "reported")


def test_a_bucket_without_rules_keeps_uploads(behind):
    behind.faults.once("lifecycle", Answer(404, "NoSuchLifecycleConfiguration"))
    (kept,) = [one for one in behind.driver().committer.check(None) if "kept" in one.name]
    assert kept.granted


def test_a_server_that_does_not_list_uploads_is_refused_with_a_way_out(behind):
    empty = b"<ListMultipartUploadsResult></ListMultipartUploadsResult>"
    behind.faults.fault = lambda one: Answer(200, body=empty) if one.verb == "uploads" else None
    with pytest.raises(Misconfigured) as caught:
        behind.driver().committer.check(None)
    assert 'uploads="manifest"' in caught.value.hint


@pytest.mark.parametrize(
    ("options", "headers"),
    [
        ({"encryption": "AES256"}, {"x-amz-server-side-encryption": "AES256"}),
        (
            {"encryption": "aws:kms", "kms_key_id": "a-key"},
            {
                "x-amz-server-side-encryption": "aws:kms",
                "x-amz-server-side-encryption-aws-kms-key-id": "a-key",
            },
        ),
    ],
)
def test_uploads_and_manifests_ask_for_encryption(numbers, behind, options, headers):
    driver = behind.driver(reached=options)
    # This server can't encrypt: what is asked of it is what counts.
    with pytest.raises(Misconfigured, match="NotImplemented"):
        driver.prepare(numbers(1), 0)
    asked = [one for one in behind.faults.seen if one.verb in ("create", "put")]
    assert asked
    for request in asked:
        assert headers.items() <= {k.lower(): v for k, v in request.headers.items()}.items()


def test_the_policy_names_what_is_asked_and_no_more():
    sink = Files(
        "s3://lake/out", storage_options={"encryption": "aws:kms", "kms_key_id": "arn:aws:kms:k"}
    )
    policy = json.loads(sink.grants())["Statement"]
    assert [one["Resource"] for one in policy] == [
        "arn:aws:s3:::lake",
        ["arn:aws:s3:::lake/out/*", "arn:aws:s3:::lake/out.epochal/*"],
        "arn:aws:s3:::lake/out.epochal/*",
        "arn:aws:kms:k",
    ]
    assert policy[2]["Action"] == "s3:DeleteObject"
    with pytest.raises(Misconfigured):
        Files("/data/out").grants()


def test_declarations_are_checked_when_they_are_made_and_hide_secrets():
    for url, options in (
        ("s3://lake/out", {"storage_options": {"endpoint": "x"}}),
        ("s3://lake/out", {"storage_options": "{"}),
        ("s3://lake/out", {"storage_options": {"kms_key_id": "x"}}),
        ("s3://lake/out", {"spark_metadata": True}),
        ("s3://lake/out", {"uploads": "copy"}),
        ("s3://lake/out", {"recovery_days": 0}),
        ("gs://lake/out", {"uploads": "multipart"}),
        ("/data/out", {"uploads": "manifest"}),
        ("/data/out", {"storage_options": {"region": "x"}}),
        ("s3://lake", {}),
        ("gs://lake/", {}),
        ("s3://lake/out.epochal", {}),
    ):
        with pytest.raises(Misconfigured):
            Files(url, **options)
    options = {"secret_access_key": SECRET, "region": "eu-1"}
    sink = Files("s3a://lake/out/", storage_options=json.dumps(options))
    assert sink.path == sink.target == "s3://lake/out"
    assert sink.name == "files:s3://lake/out"
    again = pickle.loads(pickle.dumps(sink))
    assert again == sink
    assert SECRET not in repr(again) + json.dumps(sink.describe())
    assert sink.describe()["uploads"] == "multipart"
    assert Files("gs://lake/out").describe()["uploads"] == "manifest"


def test_a_missing_driver_is_named_with_its_package(monkeypatch):
    monkeypatch.setattr("epochal.sinks.files.backend.find_spec", lambda name: None)
    with pytest.raises(Misconfigured) as caught:
        Files("s3://lake/out")
    assert "epochal[s3]" in caught.value.hint


# The whole way


def test_a_session_keeps_its_log_beside_its_files(folder, s3, numbers, monkeypatch):
    for name, value in {
        "AWS_ENDPOINT_URL": s3.url,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    log = f"{folder.url}-log".replace("ü", "u").replace(" ", "-")

    def session() -> ep.Session:
        sinks = [ep.Files(folder.url)]
        return ep.Session("orders", sinks=sinks, log=log, schema=numbers().schema)

    with session() as first:
        first.begin(0)
        first.write(numbers(1))
        first.commit()
        first.begin(1)
        first.write(numbers(2))
        # And never commits: as if it had died here.
        with session() as second:
            second.begin(1)
            second.write(numbers(3))
            second.commit()
        with pytest.raises(Fenced):
            first.commit()
    assert seen(folder) == [1, 3]
    assert len(folder.uploads()) == 1, "a fenced driver aborts nothing"
    session().close()
    assert seen(folder) == whole(folder) == [1, 3]
    assert folder.leftovers() == []
