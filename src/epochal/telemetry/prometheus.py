"""Prometheus: metrics in a registry of its client library, and an endpoint to scrape."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from epochal.errors import Misconfigured, not_installed
from epochal.telemetry.instruments import INSTRUMENTS, PHASE_BUCKETS_S, Kind
from epochal.telemetry.probes import activities, is_live, is_ready

try:
    from prometheus_client import (
        REGISTRY,
        CollectorRegistry,
        Counter,
        Gauge,
        Histogram,
        start_http_server,
    )
except ImportError as error:
    raise not_installed("metrics for Prometheus", error.name, "metrics") from error

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication

_PROBES = {"/live": is_live, "/ready": is_ready}


class PrometheusMeters:
    """All instruments of one registry."""

    def __init__(self, registry: CollectorRegistry = REGISTRY) -> None:
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._gauges: dict[str, Gauge] = {}
        for name, one in INSTRUMENTS.items():
            if one.kind is Kind.COUNTER:
                self._counters[name] = Counter(name, one.description, one.labels, registry=registry)
            elif one.kind is Kind.HISTOGRAM:
                self._histograms[name] = Histogram(
                    name, one.description, one.labels, registry=registry, buckets=PHASE_BUCKETS_S
                )
            else:
                self._gauges[name] = Gauge(name, one.description, one.labels, registry=registry)

    def add(self, name: str, labels: tuple[str, ...], amount: float) -> None:
        self._counters[name].labels(*labels).inc(amount)

    def observe(self, name: str, labels: tuple[str, ...], seconds: float) -> None:
        self._histograms[name].labels(*labels).observe(seconds)

    def watch(self, name: str, labels: tuple[str, ...], read: Callable[[], float]) -> None:
        self._gauges[name].labels(*labels).set_function(read)

    def unwatch(self, name: str, labels: tuple[str, ...]) -> None:
        self._gauges[name].remove(*labels)


_guard = threading.Lock()
_meters: dict[int, PrometheusMeters] = {}
_served: dict[tuple[str, int], int] = {}


def prometheus_meters(registry: CollectorRegistry = REGISTRY) -> PrometheusMeters:
    """Return the meters of a registry; the first call creates them."""
    with _guard:
        if id(registry) not in _meters:
            _meters[id(registry)] = PrometheusMeters(registry)
        return _meters[id(registry)]


def serve(port: int, host: str = "127.0.0.1") -> int:
    """
    Serve the metrics of this process at `/metrics` and its health at `/live` and `/ready`, and
    return the port. A second call with the same host and port does nothing.

    Loopback by default, as labels name pipelines and sinks. 0 takes a free port.
    """
    prometheus_meters()
    with _guard:
        if port and (host, port) in _served:
            return _served[host, port]
        try:
            server, _ = start_http_server(port, addr=host)
        except OSError as error:
            raise Misconfigured(
                f"metrics can't be served at {host}:{port}: {error.strerror}",
                "another driver on this machine may use the port: give each driver its own, or 0",
            ) from error
        metrics = server.get_app()
        if metrics is not None:
            server.set_app(_with_probes(metrics))
        _served[host, port] = int(server.server_port)
        return _served[host, port]


def _with_probes(metrics: WSGIApplication) -> WSGIApplication:
    """Kubernetes' probes beside the metrics: 200 or 503, and what each pipeline is doing."""

    def app(environ: dict[str, Any], start_response: StartResponse) -> Iterable[bytes]:
        probe = _PROBES.get(environ.get("PATH_INFO", ""))
        if probe is None:
            return metrics(environ, start_response)
        status = "200 OK" if probe() else "503 Service Unavailable"
        start_response(status, [("Content-Type", "application/json")])
        return [json.dumps({name: one.value for name, one in activities().items()}).encode()]

    return app
