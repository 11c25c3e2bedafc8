"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from servers.jvm import make_archive, speed_up_spark

from epochal.spark.local_session import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_SPARKS = {
    *("cli/test_demo.py", "cli/test_verify.py", "cli/test_verify_python.py", "docs/test_docs.py"),
    *("broker/test_spark.py", "examples/test_sqlite_package.py", "docs/test_docs_types.py"),
    *("sinks/delta/test_spark.py", "sinks/files/test_s3_spark.py", "sinks/test_four_at_once.py"),
    *("spark/test_clusters.py", "spark/test_kills.py", "proof/test_model.py"),
}
"""Files that keep the cores busy, beside those that share the local Spark."""
_LONG = {
    *("broker/test_like_apache.py", "broker/test_real_clients.py", "console/test_console.py"),
    *("kafka/test_broker.py", "storage/test_processes.py", "testing/test_crash.py"),
    *("storage/test_etcd.py",),
    *("sinks/files/test_s3.py", "sinks/files/test_s3_conformance.py"),
    *("sinks/http/test_conformance.py", "sinks/http/test_faults.py"),
    *("sinks/iceberg/test_conformance.py", "sinks/delta/test_conformance.py"),
    *("sinks/kafka/test_conformance.py", "sinks/kafka/test_faults.py"),
    *("sinks/kafka/test_transactions.py", "sinks/mysql/test_conformance.py"),
    *("sinks/mysql/test_strategies.py", "sinks/mysql/test_faults.py"),
    *("sinks/postgres/test_conformance.py", "sinks/postgres/test_crashes.py"),
    *("sinks/postgres/test_faults.py", "sinks/postgres/test_shared_transactions.py"),
    *("sinks/postgres/test_strategies.py", "storage/test_every_store.py"),
}
"""Files of twenty seconds and more that wait for servers."""


def pytest_configure(config: pytest.Config) -> None:
    """Every Spark of this run, in this process or in others, starts quickly."""
    if not hasattr(config, "workerinput"):
        make_archive()
    speed_up_spark()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    What takes long goes first, as the last file keeps everybody waiting; files that keep the cores
    busy alternate with those that wait.
    """
    here = Path(__file__).parent
    busy, long = ({here / name for name in names} for names in (_SPARKS, _LONG))
    busy |= {item.path for item in items if "spark" in getattr(item, "fixturenames", ())}
    paths = list(dict.fromkeys(item.path for item in items))
    waiting = sorted(set(paths) - busy, key=lambda path: (path not in long, path))
    ranks = {path: rank for group in (sorted(busy), waiting) for rank, path in enumerate(group)}
    items.sort(key=lambda item: ranks[item.path])


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small local Spark for the whole run."""
    session = local_session("epochal-tests", threads=2)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
