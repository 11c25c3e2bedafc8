"""
The source against what was decided: whether each sink was given all that came in, and no more.

What the log keeps of receipts is their total since a sink's first epoch, so the whole span is read
again at once, by the pipeline's own query. That a target shows what was decided is another audit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from epochal.contract import Sink
from epochal.coordinator.rejecting import takers
from epochal.errors import EpochalError
from epochal.protocol.state import LastEpoch, State, Total
from epochal.reports.inspect import told
from epochal.reports.model import SourceAudit
from epochal.reports.status import hash_told
from epochal.spark.checkpoint import Checkpoint, open_checkpoint
from epochal.spark.source_replay import NotReplayable, Sums, replay
from epochal.terms import EpochNumber, Fingerprint, SinkName, quantity

_AGREES, _DIFFERS, _NOT_COMPARED = "agrees", "differs", "can't be compared"


def against_source(sinks: Mapping[SinkName, Sink], state: State, stream: Any) -> list[SourceAudit]:
    """Read the stream's source again and compare, sink by sink."""
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
    """Why a sink's total is not what came in for it; empty where it is."""
    if name in takers(sinks):
        return "it is given what others refuse, and nothing of the source itself"
    if state.last is None or name not in state.totals:
        return "nothing that was decided for it is counted in the log"
    given_up = [word.epoch for word in state.given_up if word.sink == name]
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
        found = NotReplayable(told(error))
    return dict.fromkeys((sink.name for sink in sinks), found)


def _require_same(checkpoint: Checkpoint, last: LastEpoch) -> None:
    if checkpoint.read(f"offsets/{last.epoch}") is None:
        raise NotReplayable(
            f"{checkpoint.location} has no offsets/{last.epoch}: no stream was read there, or its "
            "checkpoint was removed"
        )
    if checkpoint.offsets(last.epoch).digest != last.offsets.digest:
        raise NotReplayable(
            f"{checkpoint.location} says other rows of epoch {last.epoch} than the log does"
        )


def _not_compared(name: SinkName, state: State, because: str) -> SourceAudit:
    total = state.totals.get(name)
    return SourceAudit(
        sink=name,
        verdict=_NOT_COMPARED,
        decided_rows=None if total is None else total.fingerprint.rows,
        source_rows=None,
        since=None if total is None else total.since,
        decided_hash=None if total is None else hash_told(total.fingerprint.hash_sum),
        source_hash=None,
        differences=[],
        because=because,
    )


def _compared(name: SinkName, total: Total, now: Fingerprint | NotReplayable) -> SourceAudit:
    decided = total.fingerprint
    blank = SourceAudit(
        sink=name,
        verdict=_NOT_COMPARED,
        decided_rows=decided.rows,
        source_rows=None,
        since=total.since,
        decided_hash=hash_told(decided.hash_sum),
        source_hash=None,
        differences=[],
        because=str(now),
    )
    if isinstance(now, NotReplayable):
        return blank
    is_hashed = None not in (decided.hash_sum, now.hash_sum)
    differences = _differences(decided, now)
    return replace(
        blank,
        verdict=_DIFFERS if differences else _AGREES,
        source_rows=now.rows,
        source_hash=hash_told(now.hash_sum),
        differences=differences,
        because=f"rows {'and the sum of their hashes ' if is_hashed else ''}from epoch "
        f"{total.since} on",
    )


def _differences(decided: Fingerprint, now: Fingerprint) -> list[str]:
    if now.rows != decided.rows:
        more_or_less = "more" if now.rows > decided.rows else "fewer"
        by = quantity(abs(now.rows - decided.rows), "row")
        return [
            f"the source gives {by} {more_or_less} than were decided: {decided.rows:,} decided, "
            f"{now.rows:,} read again; the source has changed since, or the query has"
        ]
    if None in (decided.hash_sum, now.hash_sum) or decided.hash_sum == now.hash_sum:
        return []
    return [
        f"the source gives as many rows, and their hashes sum up to {hash_told(now.hash_sum)}: "
        f"{hash_told(decided.hash_sum)} was decided; rows of the source were changed since, or the "
        "query was"
    ]
