"""
A listener that adds our figures to Spark's progress of a query.

    spark.streams.addListener(Progress(pipeline, print))

Spark's own progress has the time of `addBatch`; ours has how much of it went into preparing,
deciding and committing, per sink. Spark calls a listener into Python at every progress, so it is
not added by default.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from pyspark.sql.streaming.listener import StreamingQueryListener

from epochal.coordinator import EpochFigures

if TYPE_CHECKING:
    from pyspark.sql.streaming.listener import (
        QueryIdleEvent,
        QueryProgressEvent,
        QueryStartedEvent,
        QueryTerminatedEvent,
    )

    from epochal.spark.pipeline import Pipeline

logger = logging.getLogger("epochal")

Report = Callable[[Mapping[str, Any]], None]


def to_log(progress: Mapping[str, Any]) -> None:
    logger.info("%s", json.dumps(progress, ensure_ascii=False))


class Progress(StreamingQueryListener):
    """Reports every progress of one pipeline's query: Spark's figures, ours under `epochal`."""

    def __init__(self, pipeline: Pipeline, report: Report = to_log) -> None:
        self._pipeline = pipeline
        self._report = report

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802  Spark's name
        """Nothing to add."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802  Spark's name
        progress = json.loads(event.progress.json)
        if progress.get("id") != self._pipeline.query_id:
            return
        figures = self._figures(progress.get("batchId"))
        if figures is None:
            return
        try:
            self._report({**progress, "epochal": epoch_json(figures)})
        except BaseException as error:  # noqa: BLE001  what is no Exception would hang Spark
            logger.warning("%s failed: %s: %s", self._report, type(error).__name__, error)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802  Spark's name
        """Nothing to add."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802  Spark's name
        """Nothing to add."""

    def _figures(self, batch: int | None) -> EpochFigures | None:
        found = [one for one in self._pipeline.last_epochs() if one.epoch == batch]
        return found[-1] if found else None


def epoch_json(figures: EpochFigures) -> dict[str, Any]:
    return {
        "epoch": figures.epoch,
        "phase": figures.phase.value,
        "rows": figures.rows,
        "seconds": {phase.value: round(s, 6) for phase, s in figures.seconds.items()},
        "sinks": {
            name: {
                "rows": sink.rows,
                "bytes": sink.bytes,
                "seconds": {phase.value: round(s, 6) for phase, s in sink.seconds.items()},
            }
            for name, sink in figures.sinks.items()
        },
    }
