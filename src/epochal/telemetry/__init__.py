"""Telemetry of drivers: history of epochs, metrics, traces and JSON logs.

None of it can delay or fail an epoch. Listeners take notes on the driver's thread and do their I/O
on another thread; their errors are logged and otherwise ignored. Only the epoch log is
authoritative.
"""

from epochal.telemetry.exporters import log_as_json, push_otlp, serve_metrics

__all__ = ["log_as_json", "push_otlp", "serve_metrics"]
