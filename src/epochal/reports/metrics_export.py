"""The status of pipelines as Prometheus metrics, for the console."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping

from epochal.coordinator.tracker import ENDS
from epochal.errors import not_installed
from epochal.protocol.machine import Phase
from epochal.reports.model import PipelineReport, StatusReport
from epochal.telemetry.health import Health
from epochal.telemetry.instruments import INSTRUMENTS

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:
    raise not_installed("metrics for Prometheus", error.name, "metrics") from error

_TOTALS = {"epochal_rows_total": "rows", "epochal_bytes_total": "bytes"}


def prometheus_text(report: StatusReport) -> bytes:
    """Return the metrics that logs know, under the names and labels that drivers use."""
    registry = CollectorRegistry()
    registry.register(_Collector(report))
    return generate_latest(registry)


class _Collector:
    def __init__(self, report: StatusReport) -> None:
        self._report = report
        self._now = time.time()

    def collect(self) -> Iterator[Metric]:
        pipelines = self._report.pipelines
        for name, value in _OF_PIPELINE.items():
            yield _gauge(name, [([p.pipeline], value(p)) for p in pipelines])
        yield _gauge(
            "epochal_health",
            [([p.pipeline, one.value], p.health is one) for p in pipelines for one in Health],
        )
        yield _gauge(
            "epochal_phase_age_seconds",
            [([p.pipeline, one.value], _phase_age(p, one)) for p in pipelines for one in Phase],
        )
        yield _gauge(
            "epochal_given_up_epochs",
            [
                ([p.pipeline, sink.name], sum(one.sink == sink.name for one in p.given_up))
                for p in pipelines
                for sink in p.sinks
            ],
        )
        yield _gauge(
            "epochal_retrying_seconds",
            [
                ([p.pipeline, one.sink], max(0.0, self._now - one.since))
                for p in pipelines
                for one in p.retrying
            ],
        )
        yield _gauge(
            "epochal_unreadable_logs", [([one.location], 1) for one in self._report.unreadable]
        )
        doubts = [(p.pipeline, one) for p in pipelines for one in p.in_doubt]
        yield _gauge("epochal_in_doubt", [([name, one.sink], one.count) for name, one in doubts])
        yield _gauge(
            "epochal_oldest_in_doubt_seconds",
            [([name, one.sink], one.oldest_age_s or 0.0) for name, one in doubts],
        )
        for metric, figure in _TOTALS.items():
            family = CounterMetricFamily(
                metric, INSTRUMENTS[metric].description, labels=INSTRUMENTS[metric].labels
            )
            sums: Counter[tuple[str, ...]] = Counter()
            for one in pipelines:
                for sink in one.sinks:
                    sums[one.pipeline, sink.name] += getattr(sink, figure) or 0
            for labels, counted in sums.items():
                family.add_metric(labels, counted)
            yield family


def _gauge(name: str, values: list[tuple[list[str], float]]) -> Metric:
    family = GaugeMetricFamily(name, INSTRUMENTS[name].description, labels=INSTRUMENTS[name].labels)
    # Runs of one pipeline share its name, and a series may occur once: the highest value counts.
    highest: dict[tuple[str, ...], float] = {}
    for labels, value in values:
        highest[tuple(labels)] = max(float(value), highest.get(tuple(labels), float(value)))
    for series, value in highest.items():
        family.add_metric(series, value)
    return family


def _phase_age(one: PipelineReport, phase: Phase) -> float:
    if one.phase != phase.value or phase in ENDS or one.phase_since is None:
        return 0.0
    return max(0.0, time.time() - one.phase_since)


_PENDING = frozenset({Health.IN_DOUBT, Health.RETRYING, Health.LOST})
_OF_PIPELINE: Mapping[str, Callable[[PipelineReport], float]] = {
    "epochal_generation": lambda one: one.driver.generation,
    "epochal_heartbeat_timestamp_seconds": lambda one: one.driver.seen_at or 0.0,
    "epochal_last_decided_timestamp_seconds": lambda one: one.decided_at or 0.0,
    "epochal_decided_unsettled": lambda one: one.unsettled is not None and one.health in _PENDING,
    "epochal_input_rows_per_second": lambda one: one.input_rows_per_s,
    "epochal_source_behind": lambda one: sum(one.behind.values()),
    "epochal_last_epoch": lambda one: -1 if one.last_epoch is None else one.last_epoch,
}
