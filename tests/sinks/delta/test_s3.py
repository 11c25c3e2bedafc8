"""The same on an object store: a real S3 server process on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder
from servers.s3 import ACCESS_KEY, SECRET, S3Server, running_s3
from sinks.delta.conftest import ORDERS
from sinks.life import Life

from epochal.errors import Misconfigured, RowRejected
from epochal.sinks.delta import Delta
from epochal.sinks.delta.client import Table
from epochal.terms import EpochNumber, Proof

TABLE = "s3://lake/tables/orders"


@pytest.fixture(scope="module")
def s3() -> Iterator[S3Server]:
    with running_s3() as server:
        yield server


def options(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ENDPOINT_URL": server.url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": ACCESS_KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def life(server: S3Server, **more: Any) -> Life:
    table = more.pop("table", TABLE)
    return Life(
        sink=Delta(table, create_table="if_missing", storage_options=options(server), **more)
    )


def ids(server: S3Server, table: str = TABLE) -> list[int]:
    query = QueryBuilder().register("t", DeltaTable(table, storage_options=options(server)))
    return sorted(pa.table(query.execute("SELECT id FROM t").read_all())["id"].to_pylist())


def objects(server: S3Server, prefix: str) -> list[str]:
    listed = server.client.list_objects_v2(Bucket="lake", Prefix=prefix)
    return [one["Key"] for one in listed.get("Contents", ())]


@pytest.mark.parametrize(
    ("table", "wrong", "hint"),
    [
        ("s3://nowhere/orders", {}, "the bucket must exist"),
        (TABLE, {"AWS_SECRET_ACCESS_KEY": "wrong"}, "AWS_SECRET_ACCESS_KEY"),
        (TABLE, {"AWS_ALLOW_HTTP": "false"}, '"AWS_ALLOW_HTTP": "true"'),
    ],
)
def test_a_store_that_lets_nobody_in_is_for_a_person_in_one_line(s3, some, table, wrong, hint):
    sink = Delta(table, create_table="if_missing", storage_options={**options(s3), **wrong})
    with pytest.raises(Misconfigured) as raised:
        Life(sink=sink).start(some(1))
    assert hint in raised.value.hint
    assert "\n" not in raised.value.message
    assert "\x1b" not in raised.value.message


def test_epochs_in_a_partitioned_table_are_whole_and_losers_are_cleared(s3, some):
    job = life(s3, partition_by=["name"])
    job.write(0, some(1, 2), some(3))
    loser, winner = job.prepare(some(4, 5), 1), job.prepare(some(4, 5), 1)
    assert ids(s3) == [1, 2, 3]
    job.rehearse(1, [winner])
    job.commit(1, [winner])
    job.fresh(generation=2).commit(1, [winner])
    assert ids(s3) == [1, 2, 3, 4, 5]
    (found,) = job.committer.in_doubt()
    assert found.handle == loser.handle
    job.committer.abort(EpochNumber(1), [loser])
    assert job.committer.outcome(EpochNumber(1), winner) is Proof.COMMITTED
    assert job.committer.outcome(EpochNumber(1), loser) is Proof.ABORTED
    assert objects(s3, "tables/orders/_epochal/") == []
    assert len([key for key in objects(s3, "tables/orders/name=") if "parquet" in key]) == 5


def test_a_table_is_opened_once_for_all_its_epochs_and_again_when_it_was_made_anew(
    s3, some, monkeypatch
):
    table = "s3://lake/tables/kept"
    job = life(s3, table=table)
    for epoch in range(2):
        job.write(epoch, some(epoch))
    opened, real = [], Table.open

    def counted(self: Table) -> Any:
        opened.append(self)
        return real(self)

    monkeypatch.setattr(Table, "open", counted)
    job.write(2, some(2))
    assert opened == []
    for key in objects(s3, "tables/kept/"):
        s3.client.delete_object(Bucket="lake", Key=key)
    DeltaTable.create(table, ORDERS, storage_options=options(s3))
    job.write(3, some(3))
    assert opened
    assert ids(s3, table) == [3]


def test_a_merge_reads_what_was_staged_there(s3, some):
    table = "s3://lake/tables/merged"
    job = life(s3, table=table, mode="merge", keys=["id"])
    job.write(0, some(1, 2))
    job.write(1, some(2, 3, name="new"))
    assert ids(s3, table) == [1, 2, 3]
    with pytest.raises(RowRejected, match="several rows of one key"):
        job.write(2, some(4), some(4))
    (found, other) = job.committer.in_doubt()
    for one in (found, other):
        job.committer.abort(EpochNumber(2), [_receipt(one.handle)])
    assert objects(s3, "tables/merged/_epochal/") == []
    assert [mark.epoch for mark in job.committer.newest()] == [1]


def test_no_error_shows_a_secret(s3):
    sink = Delta("s3://nowhere/t", storage_options=options(s3))
    job = Life(sink=sink)
    with pytest.raises(Exception, match="nowhere") as caught:
        job.committer.check(ORDERS)
    assert SECRET not in str(caught.value)


def _receipt(handle: Any) -> Any:
    from epochal.terms import NO_ROWS, Receipt

    return Receipt(handle=handle, fingerprint=NO_ROWS)
