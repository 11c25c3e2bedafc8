"""What all tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from epochal.spark.local import local_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@pytest.fixture(scope="session")
def spark() -> Iterator[SparkSession]:
    """One small local Spark for the whole run."""
    session = local_session("epochal-tests", threads=2)
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()
