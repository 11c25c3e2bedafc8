"""Moving, copying and renaming a pipeline, with the facts of Spark's checkpoint."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from epochal.contract import EpochLog
from epochal.coordinator import life
from epochal.protocol.admission import Unfinished
from epochal.protocol.state import State
from epochal.spark.checkpoint import open_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def adopt(
    log: EpochLog,
    checkpoint: str | os.PathLike[str],
    spark: SparkSession | None = None,
    *,
    unfinished: Unfinished = Unfinished.ASK,
) -> State:
    folder = open_checkpoint(checkpoint, spark)
    return life.adopt(
        log,
        location=folder.location,
        query_id=folder.query_id,
        position=folder.position,
        unfinished=unfinished,
    )


def fork(
    log: EpochLog,
    checkpoint: str | os.PathLike[str],
    spark: SparkSession | None = None,
    *,
    is_original_alive: bool = False,
) -> State:
    location = open_checkpoint(checkpoint, spark).location
    return life.fork(log, location=location, is_original_alive=is_original_alive)


def rename(log: EpochLog, pipeline: str) -> State:
    return life.rename(log, pipeline=pipeline)
