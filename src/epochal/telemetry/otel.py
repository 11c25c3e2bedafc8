"""OpenTelemetry: the same metrics pushed by OTLP, and a span per epoch and per phase."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from epochal.coordinator import EpochFigures, Retry, Stopped, Trouble
from epochal.errors import not_installed
from epochal.protocol.machine import Phase
from epochal.protocol.state import State
from epochal.telemetry.instruments import INSTRUMENTS, PHASE_BUCKETS_S, Kind
from epochal.terms import SinkName

try:
    from opentelemetry import trace
    from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation
    from opentelemetry.trace import Status, StatusCode, Tracer
except ImportError as error:
    raise not_installed("OpenTelemetry", error.name, "otel") from error

_NANO = 1_000_000_000
_UNNAMED = "unknown_service"
"""The name of a service where neither OTEL_SERVICE_NAME nor OTEL_RESOURCE_ATTRIBUTES gives one."""
Labels = tuple[str, ...]


class OtelMeters:
    """All instruments of one meter, under the same names as in Prometheus."""

    def __init__(self, meter: Meter) -> None:
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._gauges: dict[str, dict[Labels, Callable[[], float]]] = {}
        self._guard = threading.Lock()
        for name, one in INSTRUMENTS.items():
            if one.kind is Kind.COUNTER:
                self._counters[name] = meter.create_counter(name, description=one.description)
            elif one.kind is Kind.HISTOGRAM:
                self._histograms[name] = meter.create_histogram(
                    name,
                    unit="s",
                    description=one.description,
                    explicit_bucket_boundaries_advisory=PHASE_BUCKETS_S,
                )
            else:
                self._gauges[name] = {}
                meter.create_observable_gauge(
                    name, callbacks=[self._callback(name)], description=one.description
                )

    def add(self, name: str, labels: Labels, amount: float) -> None:
        self._counters[name].add(amount, _named(name, labels))

    def observe(self, name: str, labels: Labels, seconds: float) -> None:
        self._histograms[name].record(seconds, _named(name, labels))

    def watch(self, name: str, labels: Labels, read: Callable[[], float]) -> None:
        with self._guard:
            self._gauges[name][labels] = read

    def unwatch(self, name: str, labels: Labels) -> None:
        with self._guard:
            self._gauges[name].pop(labels, None)

    def _callback(self, name: str) -> Callable[[CallbackOptions], Iterable[Observation]]:
        def observed(_options: CallbackOptions) -> Iterable[Observation]:
            with self._guard:
                gauges = list(self._gauges[name].items())
            return [Observation(read(), _named(name, labels)) for labels, read in gauges]

        return observed


def _named(name: str, labels: Labels) -> dict[str, str]:
    return dict(zip(INSTRUMENTS[name].labels, labels, strict=True))


class Tracing:
    """
    Emits a span per epoch, with a child span per phase, when the epoch has ended.

    The epoch's number is an attribute of the span. It is never the label of a metric.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self._tracer = tracer or trace.get_tracer("epochal")
        self._identity: dict[str, str | int] = {}

    def claimed(self, state: State) -> None:
        self._identity = {
            "epochal.pipeline": state.pipeline,
            "epochal.uid": state.uid,
            "epochal.generation": state.generation,
        }

    def troubled(self, trouble: Trouble) -> None:
        """The span of the epoch carries the error."""

    def retried(self, sink: SinkName, retry: Retry) -> None:
        """The span of the phase shows how long it took."""

    def ended(self, epoch: EpochFigures) -> None:
        attributes = {
            **self._identity,
            "epochal.epoch": epoch.epoch,
            "epochal.outcome": epoch.phase.value,
            "epochal.rows": epoch.rows,
        }
        span = self._tracer.start_span(
            "epochal epoch", start_time=_nanos(epoch.opened_at), attributes=attributes
        )
        within = trace.set_span_in_context(span)
        for phase, spent_s in epoch.seconds.items():
            entered_at = epoch.entered_at.get(phase, epoch.opened_at)
            part = self._tracer.start_span(
                f"epochal {phase.value}",
                context=within,
                start_time=_nanos(entered_at),
                attributes={**self._identity, "epochal.epoch": epoch.epoch},
            )
            part.end(_nanos(entered_at + spent_s))
        if epoch.trouble is not None and epoch.trouble.code != Stopped.code:
            span.set_status(Status(StatusCode.ERROR, epoch.trouble.message))
            span.set_attribute("epochal.error", epoch.trouble.code)
        elif epoch.phase is Phase.COMMITTED:
            span.set_status(Status(StatusCode.OK))
        span.end(_nanos(epoch.finished_at or epoch.opened_at))

    def close(self) -> None:
        """Nothing to do: spans end with their epochs."""


def _nanos(at: float) -> int:
    return int(at * _NANO)


class Push:
    """Pushes metrics and spans to a collector until `close`."""

    def __init__(self, *, endpoint: str | None = None, every_s: float = 15.0) -> None:
        """
        Without an endpoint the usual variables apply: OTEL_EXPORTER_OTLP_ENDPOINT, …_HEADERS.
        """
        try:
            from opentelemetry.exporter.otlp.proto.http.metric_exporter import (  # noqa: PLC0415
                OTLPMetricExporter,
            )
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import (  # noqa: PLC0415
                OTLPSpanExporter,
            )
            from opentelemetry.sdk.metrics import MeterProvider  # noqa: PLC0415
            from opentelemetry.sdk.metrics.export import (  # noqa: PLC0415
                PeriodicExportingMetricReader,
            )
            from opentelemetry.sdk.resources import Resource  # noqa: PLC0415
            from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
            from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
        except ImportError as error:
            raise not_installed("pushing by OTLP", error.name, "otel") from error
        base = None if endpoint is None else endpoint.rstrip("/")
        metrics = OTLPMetricExporter(endpoint=None if base is None else f"{base}/v1/metrics")
        spans = OTLPSpanExporter(endpoint=None if base is None else f"{base}/v1/traces")
        reader = PeriodicExportingMetricReader(metrics, export_interval_millis=every_s * 1000)
        resource = Resource.create()
        if str(resource.attributes.get("service.name", "")).startswith(_UNNAMED):
            resource = resource.merge(Resource({"service.name": "epochal"}))
        self._meters = MeterProvider(metric_readers=[reader], resource=resource)
        self._tracers = TracerProvider(resource=resource)
        self._tracers.add_span_processor(BatchSpanProcessor(spans))
        self.meters = OtelMeters(self._meters.get_meter("epochal"))
        self.tracing = Tracing(self._tracers.get_tracer("epochal"))

    def close(self) -> None:
        """Push the rest and stop."""
        self._meters.shutdown()
        self._tracers.shutdown()
