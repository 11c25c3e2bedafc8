"""Stores that only put whole objects, by the client that reaches Google and Azure.

Neither is available here: the same client talks to the S3 server, and all but the URL is the same.
"""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from servers.s3 import ACCESS_KEY, SECRET

from epochal.errors import Misconfigured, PreparedLost
from epochal.sinks.files.backend import Stores, WholeObjectBackend, object_stores
from epochal.sinks.files.ledger import ledgers
from epochal.sinks.files.reader import read_manifests
from epochal.sinks.files.target import storage_options
from epochal.terms import EpochNumber, Mark, Proof


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
