"""Log lines as JSON objects, each with the pipeline, epoch and sink it is about."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime

from epochal.coordinator.tracker import ABOUT
from epochal.logs.names import without_secrets

_LOGGER = "epochal"


class JsonLines(logging.Formatter):
    """One object a line: time, level, message, and what the line is about as far as is known."""

    def format(self, record: logging.LogRecord) -> str:
        told: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            # Messages hold no secrets; a library's own, quoted in one, might hold a URL with some.
            "message": without_secrets(record.getMessage()),
            **ABOUT.get(),
        }
        if record.exc_info:
            told["error"] = without_secrets(self.formatException(record.exc_info))
        return json.dumps(told, ensure_ascii=False, default=str)


def log_as_json(level: int = logging.INFO) -> logging.Handler:
    """Write this package's log to stderr as JSON lines. Gives the handler, to take it off again."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonLines())
    logger = logging.getLogger(_LOGGER)
    logger.addHandler(handler)
    logger.setLevel(level)
    return handler
