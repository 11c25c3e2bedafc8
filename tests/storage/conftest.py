"""Every kind of store, opened as often as a test likes."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import obstore.store
import pytest
from servers.etcd import NEW, EtcdCluster, running_etcd
from servers.fake_s3 import FakeS3, running_fake_s3
from servers.postgres import NoServer, PostgresServer, running_server

from epochal.storage import Store, open_store
from epochal.storage.memory import MemoryStore
from epochal.storage.objects import ObjectStore

HDFS = os.environ.get("EPOCHAL_TEST_HDFS")
"""A namenode to judge against, where there is one: hdfs://host:port"""

IN_THIS_PROCESS = ["memory", "objects-memory"]
THROUGH_SPARK = ["hadoop", *(["hdfs"] if HDFS else [])]
ELSEWHERE = ["local", "objects-s3", "sqlite", "postgres", "etcd"]
Opener = Callable[[], Store]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeS3]:
    with running_fake_s3(monkeypatch) as server:
        yield server


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    try:
        with running_server() as running:
            yield running
    except NoServer as error:
        pytest.fail(f"no PostgreSQL to prove anything on: {error}", pytrace=False)


@pytest.fixture(scope="session")
def etcd() -> Iterator[EtcdCluster]:
    try:
        with running_etcd() as running:
            yield running
    except NoServer as error:
        pytest.fail(f"no etcd to prove anything on: {error}", pytrace=False)


@pytest.fixture(scope="session")
def etcd_trio() -> Iterator[EtcdCluster]:
    """Three members of a newer release."""
    try:
        with running_etcd(size=3, suite=NEW) as running:
            yield running
    except NoServer as error:
        pytest.fail(f"no etcd to prove anything on: {error}", pytrace=False)


@pytest.fixture(params=[*IN_THIS_PROCESS, *ELSEWHERE, *THROUGH_SPARK])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def url(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> str:
    if kind == "postgres":
        server: PostgresServer = request.getfixturevalue("postgres")
        return f"{server.url()}#{uuid.uuid4().hex}"
    if kind == "etcd":
        cluster: EtcdCluster = request.getfixturevalue("etcd")
        return cluster.url(f"tests/{uuid.uuid4().hex}")
    if kind == "objects-s3":
        request.getfixturevalue("s3")
    return {
        "local": f"{tmp_path}/a/b",
        "objects-s3": "s3://bucket/a/b",
        "sqlite": f"sqlite://{tmp_path}/store.db",
        "hadoop": f"hadoop+file://{tmp_path}/a/b",
        "hdfs": f"{HDFS}/epochal-tests/{uuid.uuid4().hex}",
    }.get(kind, kind)


@pytest.fixture
def reopen(kind: str, url: str, request: pytest.FixtureRequest) -> Iterator[Opener]:
    """Opens the same store again and again, each time anew where it outlives its object."""
    opened: list[Store] = []
    memory = MemoryStore()
    client = obstore.store.MemoryStore() if kind == "objects-memory" else None
    spark = request.getfixturevalue("spark") if kind in THROUGH_SPARK else None

    def open_one() -> Store:
        if kind == "memory":
            return memory
        if client is not None:
            return ObjectStore(client, location="objects")
        opened.append(open_store(url, spark=spark))
        return opened[-1]

    yield open_one
    for store in opened:
        store.close()


@pytest.fixture
def store(reopen: Opener) -> Store:
    return reopen()
