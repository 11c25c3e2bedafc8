"""
Verification of the source: the rows it returns now against the rows decided for each sink.

The log keeps the total of a sink's receipts since its first epoch, so the pipeline's own query
reads all these epochs again at once. Whether a target shows what was decided: see `verify`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from epochal.contract import Sink
from epochal.coordinator.rejected_rows import reject_sinks
from epochal.errors import EpochalError
from epochal.protocol.state import LastEpoch, State, Total
from epochal.reports.inspect import error_text
from epochal.reports.model import SourceVerification
from epochal.reports.status import hash_hex
from epochal.spark.checkpoint import Checkpoint, open_checkpoint
from epochal.spark.source_replay import NotReplayable, Sums, replay
from epochal.terms import EpochNumber, Fingerprint, SinkName, quantity

_AGREES, _DIFFERS, _NOT_COMPARED = "agrees", "differs", "can't be compared"


def against_source(
    sinks: Mapping[SinkName, Sink], state: State, stream: Any
) -> list[SourceVerification]:
    """Read the source again and compare the rows of each sink."""
    reasons = {name: _incomparable(name, sinks, state) for name in sinks}
    comparable = [sink for name, sink in sinks.items() if not reasons[name]]
    sums: dict[SinkName, Fingerprint | NotReplayable] = {}
    for since in sorted({_total(state, sink.name).since for sink in comparable}):
        some = [sink for sink in comparable if _total(state, sink.name).since == since]
        if state.last is not None:
            sums |= _replay(some, state.location, state.last, stream, since)
    return [
        _not_compared(name, state, reasons[name])
        if reasons[name]
        else _compared(name, _total(state, name), sums[name])
        for name in sinks
    ]


def _incomparable(name: SinkName, sinks: Mapping[SinkName, Sink], state: State) -> str:
    """Return why a sink's total is not the source's rows for it; empty if it is."""
    if name in reject_sinks(sinks):
        return "it receives rows that other targets refuse, and none of the source"
    if state.last is None or name not in state.totals:
        return "the log has no total for it"
    given_up = [one.epoch for one in state.given_up if one.sink == name]
    return f"epoch {given_up[0]} was given up for it by hand" if given_up else ""


def _total(state: State, name: SinkName) -> Total:
    return state.totals[name]


def _replay(
    sinks: Sequence[Sink], location: str, last: LastEpoch, stream: Any, since: EpochNumber
) -> Sums:
    try:
        checkpoint = open_checkpoint(location, stream.sparkSession)
        _require_same(checkpoint, last)
        return replay(stream, checkpoint, sinks, since=since, last=last.epoch)
    except NotReplayable as reason:
        found = reason
    except (EpochalError, OSError) as error:
        found = NotReplayable(error_text(error))
    return dict.fromkeys((sink.name for sink in sinks), found)


def _require_same(checkpoint: Checkpoint, last: LastEpoch) -> None:
    if checkpoint.read(f"offsets/{last.epoch}") is None:
        raise NotReplayable(
            f"{checkpoint.location} has no offsets/{last.epoch}: it is no checkpoint of a "
            "stream, or was removed"
        )
    if checkpoint.offsets(last.epoch).digest != last.offsets.digest:
        raise NotReplayable(
            f"{checkpoint.location} has other offsets for epoch {last.epoch} than the log"
        )


def _not_compared(name: SinkName, state: State, because: str) -> SourceVerification:
    total = state.totals.get(name)
    return SourceVerification(
        sink=name,
        verdict=_NOT_COMPARED,
        decided_rows=None if total is None else total.fingerprint.rows,
        source_rows=None,
        since=None if total is None else total.since,
        decided_hash=None if total is None else hash_hex(total.fingerprint.hash_sum),
        source_hash=None,
        differences=[],
        because=because,
    )


def _compared(name: SinkName, total: Total, now: Fingerprint | NotReplayable) -> SourceVerification:
    decided = total.fingerprint
    blank = SourceVerification(
        sink=name,
        verdict=_NOT_COMPARED,
        decided_rows=decided.rows,
        source_rows=None,
        since=total.since,
        decided_hash=hash_hex(decided.hash_sum),
        source_hash=None,
        differences=[],
        because=str(now),
    )
    if isinstance(now, NotReplayable):
        return blank
    is_hashed = decided.is_comparable_to(now)
    differences = _differences(decided, now)
    return replace(
        blank,
        verdict=_DIFFERS if differences else _AGREES,
        source_rows=now.rows,
        source_hash=hash_hex(now.hash_sum),
        differences=differences,
        because=f"rows {'and the sum of their hashes ' if is_hashed else ''}from epoch "
        f"{total.since} on",
    )


def _differences(decided: Fingerprint, now: Fingerprint) -> list[str]:
    if now.rows != decided.rows:
        more_or_less = "more" if now.rows > decided.rows else "fewer"
        by = quantity(abs(now.rows - decided.rows), "row")
        return [
            f"the source returns {by} {more_or_less} than were decided: {decided.rows:,} decided, "
            f"{now.rows:,} read again; the source or the query has changed since"
        ]
    if not decided.is_comparable_to(now) or decided.hash_sum == now.hash_sum:
        return []
    return [
        f"the source returns as many rows, with {hash_hex(now.hash_sum)} as the sum of hashes: "
        f"{hash_hex(decided.hash_sum)} was decided; rows of the source or the query have changed "
        "since"
    ]
