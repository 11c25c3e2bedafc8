"""The status of pipelines as Prometheus metrics, for the console."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from epochal.errors import Misconfigured
from epochal.reports.model import Health, PipelineReport, StatusReport
from epochal.telemetry.instruments import INSTRUMENTS

try:
    from prometheus_client import CollectorRegistry, generate_latest
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as error:
    raise Misconfigured(
        f"metrics for Prometheus need a package that is not installed: {error.name}",
        'pip install "epochal[metrics]"',
    ) from error

_TOTALS = {"epochal_rows_total": "rows", "epochal_bytes_total": "bytes"}


def prometheus_text(report: StatusReport) -> bytes:
    """Return the metrics that logs know, under the names and labels that drivers use."""
    registry = CollectorRegistry()
    registry.register(_Collector(report))
    return generate_latest(registry)


class _Collector:
    def __init__(self, report: StatusReport) -> None:
        self._report = report

    def collect(self) -> Iterator[Metric]:
        pipelines = self._report.pipelines
        yield _gauge("epochal_generation", [([p.pipeline], p.driver.generation) for p in pipelines])
        yield _gauge("epochal_decided_unsettled", [([p.pipeline], _stuck(p)) for p in pipelines])
        yield _gauge(
            "epochal_last_epoch",
            [([p.pipeline], -1 if p.last_epoch is None else p.last_epoch) for p in pipelines],
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
            for labels, value in sums.items():
                family.add_metric(labels, value)
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


def _stuck(pipeline: PipelineReport) -> int:
    """A running driver is not stuck: its last epoch is settled by the next record."""
    return int(pipeline.unsettled is not None and pipeline.health is Health.IN_DOUBT)
