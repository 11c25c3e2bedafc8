"""The epoch log as one document, for backups and support."""

from __future__ import annotations

import json
from typing import Any

from epochal.coordinator.journal import EpochLog, Numbered, kept_records
from epochal.protocol.records import encode
from epochal.reports.model import ExportReport
from epochal.reports.status import no_log


def export(log: EpochLog) -> ExportReport:
    """Return all records of the log, oldest first, each validated. They hold no secrets."""
    records = kept_records(log)
    if not records:
        raise no_log(log.place)
    return ExportReport(location=log.place, records=[_to_json(one) for one in records])


def _to_json(one: Numbered) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(one.record).split(b"\n")[1])
    return {"number": one.number, **body}
