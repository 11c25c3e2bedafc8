"""Spark and S3: a driver that gets SIGKILL after the decision, and a reader of whole epochs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from itertools import chain
from posixpath import basename

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from servers import s3a
from servers.s3 import ACCESS_KEY, SECRET
from sinks.conftest import Driver
from sinks.files import bucket_reader, bucket_writer, s3_victim
from sinks.files.conftest import Folder

from epochal.sinks.files import read_epochs


@pytest.mark.proof
def test_a_killed_driver_leaves_every_row_once_in_the_bucket(spark, folder, tmp_path):
    (tmp_path / "in").mkdir()
    for epoch in range(3):
        file = tmp_path / "in" / f"{epoch}.json"
        file.write_text("\n".join(json.dumps({"n": epoch * 10 + at}) for at in range(10)))
        os.utime(file, (1_700_000_000 + epoch,) * 2)
    sink = {"path": folder.url, "storage_options": folder.server.options()}
    (tmp_path / "sink.json").write_text(json.dumps(sink))
    command = [sys.executable, s3_victim.__file__, str(tmp_path), "decided"]
    # Into a file: the JVM outlives its driver for a moment, and would keep a pipe open.
    with (tmp_path / "output").open("wb") as output:
        died = subprocess.run(command, stdout=output, stderr=output, check=False, timeout=900)
    assert died.returncode == -signal.SIGKILL, (tmp_path / "output").read_text()[-2000:]
    assert sorted(row["n"] for row in folder.rows()) == list(range(10))
    assert folder.uploads(), "what is decided waits to be completed"
    s3_victim.run(spark, tmp_path, lambda at, epoch: None)
    assert sorted(row["n"] for row in folder.rows()) == list(range(30))
    rows = read_epochs(folder.url, storage_options=folder.server.options()).to_table()
    assert sorted(rows["n"].to_pylist()) == list(range(30))
    assert folder.leftovers() == []


ODD = ["plain", "a/b", "a=b", "100%", "x y", "ü雪", "q\"'", "c:\\d", "[{^}]*?#"]
WAYS = (
    {},
    {"uploads": "manifest"},
    {"format": "jsonl", "compression": "gzip"},
    {"format": "csv"},
)


def odd(first: int) -> pa.Table:
    """A row for every odd value of the partition column, with a number of its own."""
    numbers = pa.array(range(first, first + len(ODD)), pa.int64())
    return pa.table({"p": pa.array(ODD), "n": numbers})


def pairs(rows: pa.Table) -> list[list[object]]:
    return [[row["p"], row["n"]] for row in rows.to_pylist()]


@pytest.fixture(scope="module")
def found(s3):
    """What a Spark that reaches the bucket itself finds there."""
    folders = [Folder(s3, f"read {number}/ü") for number in range(len(WAYS))]
    reads: list[tuple[str, list[int] | None]] = []
    for folder, options in zip(folders, WAYS, strict=True):
        driver = Driver(folder.sink(partition_by=["p"], **options))
        driver.write(odd(0), 0)
        driver.write(odd(100), 1)
        driver.prepare(odd(200), 2)
        assert driver.committer.in_doubt(), "what is undecided lies in the bucket"
        reads += [(folder.url, None), (folder.url, [1]), (folder.url, [2])]
    given = {
        "settings": {"spark.jars": s3a.jars(), **s3a.settings(s3)},
        "storage_options": s3.options(),
        "reads": reads,
        "store": "s3a://lake/store",
    }
    command = [sys.executable, bucket_reader.__file__, json.dumps(given)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-4000:]
    return json.loads(ran.stdout.splitlines()[-1])


def test_spark_reads_whole_epochs_from_a_bucket_and_nothing_undecided(found):
    reads = iter(found["reads"])
    for options in WAYS:
        assert next(reads) == sorted(pairs(odd(0)) + pairs(odd(100))), options
        assert next(reads) == sorted(pairs(odd(100))), options
        assert next(reads) == [], options


STEPS = ("begun", "prepared", "rehearsed", "decided", "committed f")


def test_jobs_of_spark_write_to_a_bucket_and_no_death_of_their_driver_doubles_a_row(s3, tmp_path):
    """
    Files with `uploads="manifest"` and a Delta table: nothing is seen by a manifest or the table's
    log that is not decided.
    """
    (tmp_path / "in").mkdir()
    every = []
    for epoch in range(len(STEPS) + 1):
        rows = [[epoch * 10 + at, ODD[at % len(ODD)]] for at in range(10)]
        file = tmp_path / "in" / f"{epoch}.json"
        file.write_text("\n".join(json.dumps({"n": n, "p": p}) for n, p in rows))
        os.utime(file, (1_700_000_000 + epoch,) * 2)
        every.append(rows)
    folder = Folder(s3, "by jobs/ü")
    sink = {
        "path": folder.url,
        "storage_options": s3.options(),
        "uploads": "manifest",
        "partition_by": ["p"],
    }
    table = {
        "table": "s3://lake/tables/by jobs",
        "storage_options": {
            "AWS_ENDPOINT_URL": s3.url,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
        },
        "partition_by": ["p"],
        "create_table": "if_missing",
    }
    given = {
        "settings": {"spark.jars": s3a.jars(), **s3a.settings(s3)},
        "root": str(tmp_path),
        "sink": sink,
        "delta": table,
        "steps": STEPS,
    }
    command = [sys.executable, bucket_writer.__file__, json.dumps(given)]
    ran = subprocess.run(command, check=False, capture_output=True, text=True, timeout=900)
    assert ran.returncode == 0, ran.stderr[-4000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    # An epoch is seen once its driver has decided it and put the manifest.
    for at, seen in enumerate(found["seen"]):
        decided = every[: at + (STEPS[at] == "committed f")]
        assert seen == sorted(chain.from_iterable(decided))
    for at, seen in enumerate(found["seen_in_table"]):
        may_be_there = every[: at + 1] if STEPS[at] in ("decided", "committed f") else every[:at]
        assert seen in [sorted(chain.from_iterable(one)) for one in (every[:at], may_be_there)]
    assert found["rows"] == found["by_spark"] == sorted(chain.from_iterable(every))
    assert found["table"] == found["rows"]
    assert found["writers"] == ["Spark", "Spark"]
    assert found["in_doubt"] == []
    assert folder.leftovers() == []
    assert folder.shown() == []
    data = [key for key in folder.ours() if key.startswith("data/")]
    assert [key for key in data if not key.endswith(".parquet")] == []
    assert len({key.split("/")[1] for key in data}) == len(every)
    listed = s3.client.list_objects_v2(Bucket="lake", Prefix="tables/by jobs/")["Contents"]
    in_table = [one["Key"].removeprefix("tables/by jobs/") for one in listed]
    there = [key for key in in_table if not key.startswith("_delta_log/")]
    named = DeltaTable(table["table"], storage_options=table["storage_options"]).file_uris()
    # By the last part of their names, which Spark gives once.
    assert sorted(map(basename, there)) == sorted(map(basename, named))
    assert len({key.split("/")[0] for key in there}) == len(every)


def test_a_store_through_s3a_creates_a_key_once_and_shows_it_whole(s3, found):
    assert found["store"] == {
        "absent": None,
        "created": [True, False],
        "kept": "first",
        "replaced": "replaced",
        "names": ["1", "2"],
        "left": ["1"],
    }
    kept = s3.client.get_object(Bucket="lake", Key="store/log/1")
    assert kept["Body"].read() == b"replaced"
