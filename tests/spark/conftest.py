"""Fixtures of the tests on Spark."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

# pytest imports test files one by one: what they share must be found by name.
sys.path.insert(0, str(Path(__file__).parent))
# Before Spark starts: tasks run in the Python that runs the tests.
os.environ.setdefault("PYSPARK_PYTHON", sys.executable)

from spark_stage import Killer, Source

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """PySpark 4.0 leaves the sockets of `collect()` to the garbage collector."""
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"))


@pytest.fixture
def source(spark: SparkSession, tmp_path: Path) -> Source:
    folder = tmp_path / "source"
    folder.mkdir()
    return Source(spark, folder)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint"


@pytest.fixture(autouse=True)
def no_query_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "spark" in request.fixturenames:
        for query in request.getfixturevalue("spark").streams.active:
            query.stop()


@pytest.fixture
def killer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Killer]:
    killer = Killer(monkeypatch)
    yield killer
    killer.close()
