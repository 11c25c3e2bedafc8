"""What a driver leaves for operators: a history, metrics, traces, structured logs.

Nothing here is on the path of an epoch. A listener takes note on the driver's thread and works on
another one; what goes wrong is logged and forgotten, and the epoch log alone says what is true.
"""

from epochal.telemetry.switchboard import log_as_json, push_otlp, serve_metrics

__all__ = ["log_as_json", "push_otlp", "serve_metrics"]
