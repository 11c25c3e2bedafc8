"""A spool in a bucket: on a real S3 server, also for rows that don't fit one request."""

from __future__ import annotations

import os

import pyarrow as pa
import pytest
from servers.s3 import ACCESS_KEY, SECRET, running_s3

from epochal.kit.spool.ledger import SpoolLedger
from epochal.kit.spool.rows import RowSpool
from epochal.terms import EpochNumber, Generation, Identity, Mark, Uid

ME = Identity(pipeline="p", uid=Uid("aaaabbbbcccc"), sink="s", generation=Generation(1))
ZERO = EpochNumber(0)


@pytest.fixture(scope="module")
def bucket():
    with running_s3() as server:
        server.client.create_bucket(Bucket="spool")
        yield server


@pytest.fixture
def spool(bucket, monkeypatch) -> RowSpool:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", ACCESS_KEY)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", bucket.url)
    return RowSpool.at("s3://spool/here")


def test_large_rows_go_up_in_parts_and_appear_whole(spool):
    handle = ME.handle(ZERO, partition=0, attempt=1)
    batch = pa.record_batch({"text": [os.urandom(3_000_000).hex()]})
    writer = spool.writer(handle, batch.schema)
    for _ in range(4):
        writer.write(batch)
        assert spool.listed(ME.uid, ME.tag) == []
    assert writer.finish().rows == 4
    assert [one.handle for one in spool.listed(ME.uid, ME.tag)] == [handle]
    assert list(spool.read(handle, rows=4)) == [batch] * 4
    for _ in range(2):
        spool.remove([handle])
    assert spool.listed(ME.uid, ME.tag) == []


def test_the_ledger_of_a_bucket_proves_and_forgets(spool):
    ledger = SpoolLedger(spool.store, ME)
    assert ledger.newest() == []
    ledger.acknowledge(ZERO, [[0, 1, 2]])
    assert ledger.acknowledged(ZERO) == [[0, 1, 2]]
    ledger.settle(ZERO, frozenset(), {})
    ledger.forget_delivery(ZERO)
    assert ledger.acknowledged(ZERO) is None
    assert ledger.newest() == [Mark(uid=ME.uid, epoch=ZERO)]
