"""Tables in an object store: a real S3 server process on loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.io.pyarrow import schema_to_pyarrow
from servers.s3 import ACCESS_KEY, SECRET, S3Server, running_s3
from sinks.iceberg.conftest import ORDERS, orders

from epochal.contract import Begin, EngineWritten
from epochal.errors import Misconfigured, TryAgain
from epochal.sinks.iceberg.engine_job import ICEBERG
from epochal.terms import EpochNumber, Fingerprint, Receipt


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


@pytest.fixture
def in_store(s3, tmp_path, open_warehouse):
    return open_warehouse(
        {
            "type": "sql",
            "uri": f"sqlite:///{tmp_path}/catalog.db",
            "warehouse": f"s3://lake/{tmp_path.name}",
            "s3.endpoint": s3.url,
            "s3.region": "us-east-1",
            "s3.access-key-id": ACCESS_KEY,
            "s3.secret-access-key": SECRET,
        }
    )


def ours(s3, table) -> list[str]:
    """Our objects of a table, but for the empty one that Arrow has in the place of a folder."""
    folder = f"{table.location().removeprefix('s3://lake/')}/data/epochal/"
    listed = s3.client.list_objects_v2(Bucket="lake", Prefix=folder)
    keys = [one["Key"].removeprefix(folder) for one in listed.get("Contents", ())]
    return [key for key in keys if key not in ("", "in-doubt/")]


def test_epochs_in_a_store_are_whole_and_losers_are_cleared(s3, in_store, live, some):
    name = in_store.create()
    job = live(in_store.sink(name))
    job.write(0, some(1, 2), some(3))
    loser, winner = job.prepare(some(4, 5), 1), job.prepare(some(4, 5), 1)
    assert in_store.ids(name) == [1, 2, 3]
    job.rehearse(1, [winner])
    job.commit(1, [winner])
    live(in_store.sink(name), generation=2).commit(1, [winner])
    assert in_store.ids(name) == [1, 2, 3, 4, 5]
    (found,) = job.committer.in_doubt()
    assert found.handle == loser.handle
    job.committer.abort(EpochNumber(1), [loser])
    used = {task.file.file_path for task in in_store.load(name).scan().plan_files()}
    there = ours(s3, in_store.load(name))
    assert len(there) == len(used) == 3
    assert job.committer.in_doubt() == []


def by_iceberg(s3, table, job, rows: pa.Table, *, is_put: bool = True, more_bytes: int = 0):
    """A job of Iceberg's own writer: an object of two attempts, of which one counts."""
    job.committer.begin(Begin(epoch=EpochNumber(0)))
    handle = job.identity.job_handle(EpochNumber(0), 1)
    asked = job.committer.engine_write(handle, rows.schema, ICEBERG)
    assert asked.folder == f"{table.location()}/data/epochal/{handle}"
    assert json.loads(asked.table)["properties"]["write.data.path"] == asked.folder
    content = pa.BufferOutputStream()
    pq.write_table(rows.cast(schema_to_pyarrow(table.schema())), content)
    body = content.getvalue().to_pybytes()
    for attempt in (0, 1) if is_put else ():
        key = f"{asked.folder.removeprefix('s3://lake/')}/0110/00000-{attempt}.parquet"
        s3.client.put_object(Bucket="lake", Key=key, Body=body)
    report = {
        "spec-id": 0,
        "content": "DATA",
        "file-path": f"{asked.folder}/0110/00000-0.parquet",
        "file-format": "PARQUET",
        "file-size-in-bytes": len(body) + more_bytes,
        "record-count": rows.num_rows,
    }
    return EngineWritten(
        handle=handle,
        schema=rows.schema,
        fingerprint=Fingerprint(rows.num_rows, 7),
        files=1,
        bytes=len(body),
        reports=[json.dumps(report)],
    )


def test_objects_of_a_job_are_committed_where_icebergs_writer_has_put_them(
    s3, in_store, live, some
):
    name = in_store.create(ORDERS)
    job = live(in_store.sink(name))
    job.start(some(1))
    assert job.committer.engine_location.startswith("s3a://lake/")
    assert job.committer.engine_refusal(some(1).schema, ICEBERG) is None
    assert "only Iceberg's own writer" in job.committer.engine_refusal(some(1).schema, "parquet")
    receipt = job.committer.gather(by_iceberg(s3, in_store.load(name), job, some(1, 2, 3)))
    assert in_store.ids(name) == []
    assert [one.handle for one in job.committer.in_doubt()] == [receipt.handle]
    job.rehearse(0, [receipt])
    job.commit(0, [receipt])
    assert in_store.ids(name) == [1, 2, 3]
    assert job.committer.in_doubt() == []


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"is_put": False}, (Misconfigured, "does not show it")),
        ({"more_bytes": 1}, (TryAgain, "and it has")),
    ],
)
def test_objects_that_are_not_as_iceberg_has_put_them_are_refused_and_can_be_cleared(
    s3, in_store, live, changed, refusal
):
    name = in_store.create(ORDERS)
    job = live(in_store.sink(name))
    job.start(orders(1))
    written = by_iceberg(s3, in_store.load(name), job, orders(1, 2), **changed)
    error, text = refusal
    with pytest.raises(error, match=text):
        job.committer.gather(written)
    bare = Receipt(handle=written.handle, fingerprint=Fingerprint(0))
    job.committer.abort(EpochNumber(0), [bare])
    assert ours(s3, in_store.load(name)) == []
