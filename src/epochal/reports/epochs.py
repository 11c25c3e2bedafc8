"""Pages of a pipeline's history, completed from the records that the log keeps; all records."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from epochal.coordinator.journal import EpochLog, Numbered, kept_records
from epochal.errors import Misconfigured, TryAgain
from epochal.protocol.receipts import sum_of
from epochal.protocol.records import encode
from epochal.protocol.state import Record, RecordKind
from epochal.reports.model import (
    NOT_QUERIED,
    EpochReport,
    EpochsReport,
    ExportReport,
    ReceiptReport,
)
from epochal.reports.status import no_log, require_record
from epochal.telemetry.history import Page, PastEpoch, history_of
from epochal.terms import EpochNumber, Receipt

EPOCHS_MAX = 1000
_DECIDED = "decided"
"""The outcome of an epoch that only the log knows: the history has ended epochs only."""
_NOTHING_YET = "no epoch has been decided yet"
_NO_HISTORY = (
    "this log's storage supports no history (or history_epochs_kept is 0): only the epochs of "
    "the log's newest records are shown"
)


def epochs(
    log: EpochLog, *, limit: int = 20, cursor: str | None = None, only: str | None = None
) -> EpochsReport:
    """
    Return a page of epochs, newest first; `only` selects one outcome.

    The first page includes decided epochs that the history lacks, from the log.
    """
    state = require_record(log).record.state
    if not 1 <= limit <= EPOCHS_MAX:
        raise Misconfigured(f"limit={limit} is out of range", f"1 to {EPOCHS_MAX}")
    history = history_of(log)
    try:
        page = (
            Page(epochs=[], cursor=None)
            if history is None
            else history.page(limit=limit, cursor=cursor, only=None if only == _DECIDED else only)
        )
    except ValueError as error:
        raise Misconfigured(f"{error}", "take the cursor from the previous page") from error
    is_kept = history is not None and bool(page.epochs or history.segments())
    found = [past_report(one) for one in page.epochs]
    if cursor is None and only in (None, _DECIDED):
        found = sorted(
            [*_from_log(log, found, is_all=page.cursor is None), *found],
            key=lambda one: (-one.epoch, -one.generation),
        )
    return EpochsReport(
        location=state.location,
        pipeline=state.pipeline,
        epochs=[one for one in found if only in (None, one.outcome)],
        cursor=page.cursor,
        because="" if is_kept else _NOTHING_YET if state.last is None else _NO_HISTORY,
    )


def epoch_attempts(log: EpochLog, epoch: int) -> list[EpochReport]:
    """Return every known attempt at one epoch, oldest first."""
    history = history_of(log)
    past = [] if history is None else history.attempts(EpochNumber(epoch))
    found = [past_report(one) for one in past]
    if any(one.outcome == "committed" for one in found):
        return found
    return [*found, *(one for one in _from_log(log, [], is_all=True) if one.epoch == epoch)]


def epoch_receipts(log: EpochLog, epoch: int) -> dict[str, list[ReceiptReport]]:
    """
    Return the receipts of an epoch's decision, while the log keeps its record.

    Without sinks whose receipts lay beside the log and were deleted once the epoch was settled.
    """
    for numbered in reversed(kept_records(log)):
        decision = numbered.record.state.unsettled
        if decision is not None and decision.epoch == epoch:
            found = {sink: _receipts(some) for sink, some in decision.receipts.items()}
            return {sink: some for sink, some in found.items() if some is not None}
    return {}


def _receipts(receipts: Sequence[Receipt]) -> list[ReceiptReport] | None:
    try:
        return [
            ReceiptReport(
                handle=str(receipt.handle),
                rows=receipt.rows,
                bytes=receipt.bytes,
                proof=NOT_QUERIED,
            )
            for receipt in receipts
        ]
    except TryAgain:
        return None


def past_report(past: PastEpoch) -> EpochReport:
    return EpochReport(
        epoch=past.epoch,
        generation=past.generation,
        outcome=past.outcome,
        opened_at=past.opened_at,
        finished_at=past.finished_at,
        rows=past.rows,
        bytes=sum(sink.bytes for sink in past.sinks.values()),
        seconds=past.seconds,
        sinks={name: asdict(sink) for name, sink in past.sinks.items()},
        trouble=None if past.trouble is None else asdict(past.trouble),
        read_from="history",
    )


def _from_log(log: EpochLog, known: list[EpochReport], *, is_all: bool) -> list[EpochReport]:
    """
    Return decided epochs that the history lacks: not written yet, or lost with a killed driver.

    Unless the page holds all of the history, only epochs newer than its oldest one.
    """
    there = {one.epoch for one in known if one.outcome != "aborted"}
    oldest = -1 if is_all else min(there, default=-1)
    decided: dict[int, EpochReport] = {}
    for numbered in kept_records(log):
        one = _decided(numbered.record)
        if one is not None and one.epoch not in there and one.epoch > oldest:
            decided[one.epoch] = one
    return list(decided.values())


def _decided(record: Record) -> EpochReport | None:
    decision = record.state.unsettled
    if decision is None or record.kind is not RecordKind.COMMIT:
        return None
    sinks = {
        name: {
            "rows": sum_of(some).fingerprint.rows,
            "bytes": sum_of(some).bytes,
            "seconds": {},
        }
        for name, some in decision.receipts.items()
    }
    return EpochReport(
        epoch=decision.epoch,
        generation=decision.generation,
        outcome=_DECIDED,
        opened_at=None,
        finished_at=decision.decided_at,
        rows=sum(int(str(sink["rows"])) for sink in sinks.values()),
        bytes=sum(int(str(sink["bytes"])) for sink in sinks.values()),
        seconds={},
        sinks=sinks,
        trouble=None,
        read_from="log",
    )


def export(log: EpochLog) -> ExportReport:
    """
    Return all records of the log, oldest first, each validated. They hold no secrets.

    The newest one holds all its receipts; older ones may name lists, which are deleted.
    """
    records = kept_records(log)
    if not records:
        raise no_log(log.place)
    *older, newest = records
    whole = replace(newest, record=_with_receipts(newest.record))
    return ExportReport(location=log.place, records=[_to_json(one) for one in [*older, whole]])


def _with_receipts(record: Record) -> Record:
    decision = record.state.unsettled
    if decision is None:
        return record
    receipts = {sink: tuple(some) for sink, some in decision.receipts.items()}
    state = replace(record.state, unsettled=replace(decision, receipts=receipts))
    return replace(record, state=state)


def _to_json(one: Numbered) -> dict[str, Any]:
    body: dict[str, Any] = json.loads(encode(one.record).split(b"\n")[1])
    return {"number": one.number, **body}
