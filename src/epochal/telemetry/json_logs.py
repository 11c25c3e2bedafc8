"""Log lines as JSON objects, with the pipeline, epoch and sink they belong to."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from epochal.coordinator.tracker import ABOUT
from epochal.storage.urls import without_secrets

_LOGGER = "epochal"


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
    logger = logging.getLogger(_LOGGER)
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler
