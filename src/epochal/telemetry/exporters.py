"""
The exporters of this process. They apply to every pipeline that starts after they were enabled.

    serve_metrics(9464)            Prometheus scrapes this driver
    push_otlp("http://otel:4318")  this driver pushes metrics and spans
    log_as_json()                  this driver logs JSON lines to stderr

If the program has configured OpenTelemetry itself, spans go to its provider too.
"""

from __future__ import annotations

import json
import logging
import sys
import threading
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

from epochal.coordinator import Listener, Tracker
from epochal.coordinator.journal import EpochLog
from epochal.coordinator.tracker import ABOUT
from epochal.storage.urls import without_secrets
from epochal.telemetry.history_writer import record_history
from epochal.telemetry.instruments import Meters
from epochal.telemetry.metrics import measure
from epochal.telemetry.probes import Activity, activities
from epochal.terms import Limits

if TYPE_CHECKING:
    from epochal.telemetry.otel import Push

_guard = threading.Lock()
_meters: list[Meters] = []
_tracing: list[Listener] = []


def serve_metrics(port: int, host: str = "127.0.0.1") -> int:
    """Serve the metrics of this process for Prometheus at `/metrics`; returns the port."""
    from epochal.telemetry.prometheus import (  # noqa: PLC0415  needs epochal[metrics]
        prometheus_meters,
        serve,
    )

    bound = serve(port, host)
    _add_meters(prometheus_meters())
    return bound


def push_otlp(endpoint: str | None = None, *, every_s: float = 15.0) -> Push:
    """Push the metrics and spans of this process to an OpenTelemetry collector until `close()`."""
    from epochal.telemetry.otel import Push  # noqa: PLC0415  needs epochal[otel]

    push = Push(endpoint=endpoint, every_s=every_s)
    _add_meters(push.meters)
    with _guard:
        _tracing.append(push.tracing)
    return push


def attach(tracker: Tracker, log: EpochLog, limits: Limits) -> None:
    """Attach the enabled exporters and the history writer to the tracker of a driver."""
    record_history(tracker, log, epochs_kept=limits.history_epochs_kept)
    with _guard:
        meters, tracing = tuple(_meters), tuple(_tracing)
    measure(tracker, meters)
    for listener in (*tracing, *_programs_provider()):
        tracker.listen(listener)


def watch_standby(pipeline: str) -> Callable[[], None]:
    """Show by the enabled meters whether a standby waits or works; returns what ends it."""
    with _guard:
        meters = tuple(_meters)
    gauges = {
        "epochal_standby_waiting": Activity.WAITING,
        "epochal_standby_working": Activity.WORKING,
    }
    for one, name in product(meters, gauges):
        one.watch(name, (pipeline,), partial(_is_doing, pipeline, gauges[name]))

    def end() -> None:
        for one, name in product(meters, gauges):
            one.unwatch(name, (pipeline,))

    return end


def _is_doing(pipeline: str, wanted: Activity) -> float:
    return float(activities().get(pipeline) is wanted)


def _programs_provider() -> list[Listener]:
    """Return a listener for the program's own OpenTelemetry provider, if it has one."""
    if "opentelemetry.sdk.trace" not in sys.modules:
        return []
    from opentelemetry import trace  # noqa: PLC0415  loaded already

    from epochal.telemetry.otel import Tracing  # noqa: PLC0415  needs epochal[otel]

    is_set_up = not isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    return [Tracing()] if is_set_up else []


def _add_meters(meters: Meters) -> None:
    with _guard:
        if not any(one is meters for one in _meters):
            _meters.append(meters)


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time, level, message, pipeline, epoch, sink."""

    def format(self, record: logging.LogRecord) -> str:
        entry: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            # A library's message that is quoted here may hold a URL with secrets.
            "message": without_secrets(record.getMessage()),
            **ABOUT.get(),
        }
        if record.exc_info:
            entry["error"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(entry, ensure_ascii=False, default=str)


def log_as_json(level: int = logging.INFO) -> logging.Handler:
    """Write this package's log to stderr as JSON lines. Returns the handler."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger("epochal")
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler
