"""Stores that only put whole objects, by the client that reaches Google and Azure.

Neither is available here: the same client talks to the S3 server, and all but the URL is the same.
"""

from __future__ import annotations

import io
import json
from contextlib import suppress
from urllib.parse import quote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from servers.s3 import ACCESS_KEY, SECRET
from sinks.files.conftest import Folder

from epochal.contract import EngineWritten
from epochal.errors import Misconfigured, PreparedLost, TryAgain
from epochal.sinks.files import read_epochs, whole_objects
from epochal.sinks.files.backend import Stores, WholeObjectBackend, object_stores
from epochal.sinks.files.ledger import ledgers
from epochal.sinks.files.reader import read_manifests
from epochal.sinks.files.s3 import S3Store
from epochal.sinks.files.target import storage_options
from epochal.terms import NO_ROWS, EpochNumber, Fingerprint, Mark, Proof, Receipt


class Killed(BaseException):
    """A driver dies at a call."""


class ByObstore(WholeObjectBackend):
    def stores(self) -> Stores:
        return object_stores(self.target.text, self.options)


@pytest.fixture
def sink(folder, s3):
    def made(secret: str = SECRET):
        reached = {
            "endpoint": s3.url,
            "region": "us-east-1",
            "access_key_id": ACCESS_KEY,
            "secret_access_key": secret,
        }
        declared = folder.sink(uploads="manifest", partition_by=["p"])
        backend = ByObstore(declared._target, storage_options("gs", reached))
        object.__setattr__(declared, "_backend", backend)
        return declared

    return made


def rows(*numbers: int) -> pa.Table:
    values = {"n": numbers, "p": [f"{n % 2} ü" for n in numbers]}
    return pa.table(values, schema=pa.schema([("n", pa.int64()), ("p", pa.string())]))


def whole(sink) -> list[int]:
    stores = sink._backend.stores()
    manifests = [one for ledger in ledgers(stores.ours) for one in ledger.all()]
    table = read_manifests(stores, manifests).to_table()
    return sorted(table["n"].to_pylist()) if table.num_columns else []


def test_an_epoch_is_shown_by_its_manifest_and_by_nothing_else(drive, folder, sink):
    driver = drive(sink())
    assert driver.committer.check(rows().schema)[0].granted
    winner, loser = driver.prepare(rows(1, 2), 0), driver.prepare(rows(1, 2), 0, attempt=1)
    assert whole(driver.sink) == []
    for _ in range(2):
        driver.commit(0, [winner])
        assert whole(driver.sink) == [1, 2]
    assert folder.shown() == []
    (found,) = driver.committer.in_doubt()
    assert found.handle == loser.handle
    assert driver.committer.outcome(EpochNumber(0), loser) is Proof.UNKNOWN
    driver.committer.abort(EpochNumber(0), [loser, winner])
    assert driver.committer.outcome(EpochNumber(0), loser) is Proof.ABORTED
    assert driver.committer.outcome(EpochNumber(0), winner) is Proof.COMMITTED
    driver.commit(1, [])
    assert driver.committer.newest() == [Mark(uid=driver.uid, epoch=EpochNumber(1))]
    assert whole(driver.sink) == [1, 2]
    assert folder.leftovers() == []


def test_manifests_are_folded_and_lost_data_is_reported(drive, folder, sink):
    driver = drive(sink())
    for epoch in range(3):
        driver.write(rows(epoch), epoch)
    driver.committer.prune(EpochNumber(1000))
    (key,) = [key for key in folder.ours() if key.startswith("epochs/")]
    lines = folder.content(key, is_ours=True).splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2]
    assert whole(driver.sink) == [0, 1, 2]
    lost = driver.prepare(rows(3), 3)
    driver.committer.abort(EpochNumber(3), [lost])
    with pytest.raises(PreparedLost):
        driver.commit(3, [lost])


@pytest.mark.parametrize("by_obstore", [True, False])
def test_a_writer_that_gives_up_leaves_nothing(drive, folder, sink, by_obstore):
    manifest = folder.sink(uploads="manifest", partition_by=["p"])
    driver = drive(sink() if by_obstore else manifest)
    writer = driver.sink.writer(driver.task(rows(), 0))
    writer.write(rows(1, 2).to_batches()[0])
    buffer = writer._rows
    buffer._split_arrived()
    for where in list(buffer._waiting):
        buffer._write_out(where)
    writer.abort()
    assert [key for key in folder.ours() if key.startswith("data/")] == []
    assert folder.leftovers() == []


def test_refused_credentials_are_for_a_person_and_not_shown(drive, sink):
    with pytest.raises(Misconfigured) as caught:
        drive(sink("wrong-secret")).committer.check(None)
    assert "credentials" in caught.value.hint
    assert "wrong-secret" not in str(caught.value)


# Jobs of Spark's own writer, by what they leave in the bucket


def as_by_spark(driver, folder, table: pa.Table, number: int = 1, **changed: int) -> EngineWritten:
    """Objects of two tasks, which Spark's log lists, and of one attempt that does not count."""
    handle = driver.identity.job_handle(EpochNumber(0), number)
    asked = driver.committer.engine_write(handle, table.schema, "parquet")
    top = asked.folder.removeprefix("s3a://lake/")
    reports = []
    for at, part in enumerate((table.slice(0, 1), table.slice(1), table)):
        content = io.BytesIO()
        pq.write_table(part.drop_columns("p"), content)
        key = f"{top}/p=1 ü/part-0000{at}-6ad0.c000.snappy.parquet"
        if "is_elsewhere" not in changed:
            put(folder, key, content.getvalue())
        if at < 2:
            size = len(content.getvalue()) + changed.get("size", 0)
            reports.append(json.dumps({"path": f"s3a://lake/{quote(key)}", "size": size}))
    return EngineWritten(
        handle=handle,
        schema=table.schema,
        fingerprint=Fingerprint(table.num_rows, 7),
        reports=reports,
    )


def put(folder, key: str, content: bytes) -> None:
    folder.server.client.put_object(Bucket="lake", Key=key, Body=content)


def engine_sink(folder):
    return folder.sink(uploads="manifest", partition_by=["p"])


def read(folder) -> list[int]:
    found = read_epochs(folder.url, storage_options=folder.server.options()).to_table()
    return sorted(found["n"].to_pylist()) if found.num_columns else []


def test_objects_of_a_job_are_shown_by_the_manifest_where_spark_has_put_them(drive, folder):
    driver = drive(engine_sink(folder))
    receipt = driver.committer.gather(as_by_spark(driver, folder, rows(1, 3, 5)))
    assert read(folder) == []
    assert [one.handle for one in driver.committer.in_doubt()] == [receipt.handle]
    driver.commit(0, [receipt])
    assert read(folder) == [1, 3, 5]
    assert driver.committer.in_doubt() == []
    driver.commit(1, [driver.committer.gather(as_by_spark(driver, folder, rows(), 2))])
    assert driver.committer.in_doubt() == []


@pytest.mark.parametrize(
    ("changed", "error", "text"),
    [
        ({"is_elsewhere": 1}, Misconfigured, "does not show it"),
        ({"size": 1}, TryAgain, "and it has"),
    ],
)
def test_objects_that_are_not_as_spark_has_put_them_are_refused(
    drive, folder, changed, error, text
):
    driver = drive(engine_sink(folder))
    written = as_by_spark(driver, folder, rows(1, 3), **changed)
    with pytest.raises(error, match=text):
        driver.committer.gather(written)
    assert read(folder) == []


def test_what_tasks_of_an_aborted_job_put_late_is_found_by_a_later_sweep(
    drive, folder, monkeypatch
):
    driver = drive(engine_sink(folder))
    written = as_by_spark(driver, folder, rows(1, 3))
    top = f"{folder.name}.epochal/data/{written.handle}"
    receipt = Receipt(handle=written.handle, fingerprint=NO_ROWS)
    driver.committer.abort(EpochNumber(0), [receipt])
    assert [key for key in folder.ours() if key.startswith("data/")] == []
    put(folder, f"{top}/p=1/part-00007-late.parquet", b"late")
    assert [one.handle for one in driver.committer.in_doubt()] == [written.handle]
    monkeypatch.setattr(whole_objects, "LATE_TASKS_S", 0.0)
    driver.committer.abort(EpochNumber(0), [receipt])
    assert [key for key in folder.ours() if key.startswith(("data/", "in-doubt/"))] == []
    assert driver.committer.in_doubt() == []


@pytest.mark.parametrize("after_effect", [False, True])
def test_a_driver_that_dies_at_any_call_while_it_gathers_objects_shows_no_row_twice(
    drive, s3, monkeypatch, after_effect
):
    monkeypatch.setattr(whole_objects, "LATE_TASKS_S", 0.0)

    def folder_at(number: int) -> Folder:
        return Folder(s3, f"gathered {after_effect} {number}")

    def driver_at(number: int):
        return drive(engine_sink(folder_at(number)))

    for number in range(1, 40):
        written = as_by_spark(driver_at(number), folder_at(number), rows(1, 3))
        left = number
        with monkeypatch.context() as patched:

            def dying(verb, /):
                def call(store, *given):
                    nonlocal left
                    left -= 1
                    if left or after_effect:
                        result = verb(store, *given)
                    if not left:
                        raise Killed
                    return result

                return call

            for name in ("read", "entry", "delete", "put", "put_if_absent", "entries", "folders"):
                patched.setattr(S3Store, name, dying(getattr(S3Store, name)))
            with suppress(Killed):
                driver_at(number).committer.gather(written)
        driver, folder = driver_at(number), folder_at(number)
        assert read(folder) == []
        again = driver.committer.gather(as_by_spark(driver, folder, rows(1, 3), 9))
        driver.commit(0, [again])
        for found in driver.committer.in_doubt():
            bare = Receipt(handle=found.handle, fingerprint=NO_ROWS)
            driver.committer.abort(EpochNumber(0), [bare])
        assert driver.committer.in_doubt() == []
        assert read(folder) == [1, 3]
        owners = {key.split("/")[1] for key in folder.ours() if key.startswith("data/")}
        assert owners == {str(again.handle)}
        if left > 0:
            break
    else:
        raise AssertionError("the calls of gather are more than were tried")
