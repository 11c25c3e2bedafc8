"""The epoch log as one document: for backups, for support, for whoever wants to look."""

from __future__ import annotations

import json
from typing import Any

from epochal.contract import EpochLog
from epochal.coordinator.reading import Numbered, kept_records
from epochal.protocol.records import encode
from epochal.reports.model import ExportReport
from epochal.reports.status import no_log


def export(log: EpochLog) -> ExportReport:
    """Every record that is kept, oldest first, each checked. Holds no secret, as no record does."""
    records = kept_records(log)
    if not records:
        raise no_log(log.place)
    return ExportReport(location=log.place, records=[_told(one) for one in records])


def _told(one: Numbered) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(one.record).split(b"\n")[1])
    return {"number": one.number, **body}
