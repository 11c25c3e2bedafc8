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


_LONG = {
    *("cli/test_demo.py", "cli/test_verify.py", "cli/test_verify_python.py"),
    "sinks/test_four_at_once.py",
    *("spark/test_clusters.py", "spark/test_kills.py", "proof/test_model.py"),
}
"""Files of a minute and more, beside those that share the local Spark."""


def pytest_configure(config: pytest.Config) -> None:
    """Every Spark of this run, in this process or in others, starts quickly."""
    if not hasattr(config, "workerinput"):
        make_archive()
    speed_up_spark()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long goes first: the last file keeps everybody waiting."""
    here = Path(__file__).parent
    long = {here / name for name in _LONG}
    long |= {item.path for item in items if "spark" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small local Spark for the whole run."""
    session = local_session("epochal-tests", threads=2)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
