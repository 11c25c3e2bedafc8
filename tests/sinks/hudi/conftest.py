"""One Spark with Hudi for all tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def hudi_spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from sinks.hudi.hudi_stage import session

    spark = session()
    yield spark
    spark.stop()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "table"
