"""
Verification: the rows that readers see in each sink against the rows decided for it.

The log keeps running totals of all receipts that decisions name, so the log and the targets are
enough. A driver may run meanwhile: the log is read before and after the count, and the visible rows
must lie between those settled before and those decided after.

    log read     1,000 decided, epoch 8 (100 rows) not settled        at least   900
    count        1,050 visible                                        fits
    log read     1,100 decided, epoch 9 (100 rows) not settled        at most  1,100
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from epochal.config.resolve_target import OpenedTarget
from epochal.contract import Sink
from epochal.coordinator.targets import by_name
from epochal.errors import EpochalError
from epochal.kit.sink_base import Operable, Recount
from epochal.protocol.receipts import sum_of
from epochal.protocol.state import State, Total
from epochal.reports.inspect import committer_of, error_text
from epochal.reports.model import SinkVerification, VerificationReport
from epochal.reports.status import hash_hex, require_record
from epochal.reports.verify_source import against_source
from epochal.spark.error_text import spark_message
from epochal.terms import Fingerprint, SinkName, quantity

_DIFFERENCES_MAX = 20
_NO_SOURCE = (
    "not compared: only running the query again counts its rows; --source does that, for a "
    "pipeline's file or with --stream"
)
_SOURCE = "read again by the same query, for all decided epochs"


def verify(
    opened: OpenedTarget,
    *,
    shared: Collection[str] = (),
    spark: Any | None = None,
    stream: Any | None = None,
) -> VerificationReport:
    """
    Count the rows of every sink and compare. `shared` names sinks whose targets other programs
    write to as well: surplus rows are no difference there. With a Spark session rows are also read
    back and hashed, if the target returns them as they were written. With the pipeline's stream its
    source is also read again.
    """
    log = opened.require_log()
    declared = by_name(opened.require_sinks())
    audits = []
    for name, sink in declared.items():
        before = require_record(log).record.state
        counted = _counted(sink, before, opened)
        hashed = None if spark is None else _reread(sink, before, opened, spark)
        after = require_record(log).record.state
        refused = _refused(sink, before, after, opened)
        found = _compared(name, counted, before, after, refused, is_shared=name in shared)
        audits.append(found if hashed is None else _with_hash(found, hashed, before, after))
    state = require_record(log).record.state
    return VerificationReport(
        location=state.location,
        pipeline=state.pipeline,
        up_to=None if state.last is None else state.last.epoch,
        sinks=audits,
        source=_NO_SOURCE if stream is None else _SOURCE,
        sources=() if stream is None else against_source(declared, state, stream),
    )


def _counted(sink: Sink, state: State, opened: OpenedTarget) -> Recount:
    try:
        with committer_of(sink, state, opened.limits) as committer:
            if isinstance(committer, Operable):
                return committer.recount()
    except (EpochalError, OSError) as error:
        return Recount(rows=None, because=f"the target could not be queried: {error_text(error)}")
    return Recount(rows=None, because=f"a {sink.describe()['kind']} target can't be recounted")


def _reread(sink: Sink, state: State, opened: OpenedTarget, spark: Any) -> Fingerprint | str:
    """The sum of the rows that are read back, or why there is none."""
    from pyspark.errors import PySparkException  # noqa: PLC0415  needs Spark

    from epochal.spark.row_hash import fingerprint_of  # noqa: PLC0415  needs Spark

    try:
        with committer_of(sink, state, opened.limits) as committer:
            rows = committer.reread(spark) if isinstance(committer, Operable) else None
            if rows is None:
                return "the target does not return rows as they were written"
            return fingerprint_of(rows)
    except (EpochalError, OSError) as error:
        return error_text(error)
    except PySparkException as error:
        return spark_message(error)


def _with_hash(
    found: SinkVerification, visible: Fingerprint | str, before: State, after: State
) -> SinkVerification:
    """Compare sums of hashes, or say why only rows were counted."""
    total = _total(after, found.sink)
    decided = Fingerprint(0) if total is None else total.fingerprint
    reason = _not_comparable(decided, visible, is_at_rest=before == after and not after.pending)
    if not isinstance(visible, str):
        found = replace(found, visible_hash=hash_hex(visible.hash_sum))
    if reason:
        return replace(found, because=f"{found.because}; hashes are not compared: {reason}")
    if visible == decided:
        return found
    difference = (
        f"the sum of row hashes is {found.visible_hash}, {found.decided_hash} was decided: "
        "rows were changed"
    )
    return replace(found, verdict="differs", differences=[*found.differences, difference])


def _not_comparable(decided: Fingerprint, visible: Fingerprint | str, *, is_at_rest: bool) -> str:
    if isinstance(visible, str):
        return visible
    if visible.hash_sum is None:
        return "a column has a type without a hash"
    if decided.hash_sum is None:
        return "not all decided rows were hashed, or not all by one algorithm"
    if not decided.is_comparable_to(visible):
        return (
            f"decided rows were hashed by algorithm {decided.algorithm}, visible ones by "
            f"{visible.algorithm}"
        )
    # A sum can't be compared in parts.
    return "" if is_at_rest else "an epoch was decided meanwhile, or is not committed yet"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Refused:
    """Bounds on the decided rows that a sink's target refused: they are in another sink."""

    at_least: int = 0
    at_most: int = 0


def _refused(sink: Sink, before: State, after: State, opened: OpenedTarget) -> _Refused:
    taker = sink.rejects_to
    if taker is None:
        return _Refused()
    sharers = [
        one
        for one in opened.require_sinks()
        if one.rejects_to is not None and one.rejects_to.name == taker.name
    ]
    total = _total(after, taker.name)
    return _Refused(
        # If several sinks send refused rows to one, the share of each is not known.
        at_least=_settled_rows(before, taker.name) if len(sharers) == 1 else 0,
        at_most=0 if total is None else total.fingerprint.rows,
    )


def _compared(
    name: SinkName,
    counted: Recount,
    before: State,
    after: State,
    refused: _Refused,
    *,
    is_shared: bool,
) -> SinkVerification:
    decided = _total(after, name)
    blank = SinkVerification(
        sink=name,
        verdict="can't be recounted",
        decided_rows=None if decided is None else decided.fingerprint.rows,
        visible_rows=counted.rows,
        since=None if decided is None else decided.since,
        decided_hash=None if decided is None else hash_hex(decided.fingerprint.hash_sum),
        visible_hash=None,
        epochs_compared=0 if counted.epochs is None else len(counted.epochs),
        differences=[],
        because=counted.because,
    )
    visible = counted.rows
    if visible is None:
        return blank
    differences = [
        *counted.faults,
        *_rows_differ(
            visible,
            at_least=_settled_rows(before, name) - refused.at_most,
            at_most=(0 if decided is None else decided.fingerprint.rows) - refused.at_least,
            is_shared=is_shared,
            is_alone=counted.is_alone,
        ),
        *_last_epoch_differs(name, counted, before, after),
    ]
    return replace(
        blank,
        verdict="differs" if differences else "agrees",
        because=_with_pending(counted.because, after, name),
        differences=differences[:_DIFFERENCES_MAX],
    )


def _with_pending(because: str, state: State, name: SinkName) -> str:
    """Add the epoch that is not committed here yet: its rows are decided and not visible."""
    waiting = state.pending.get(name)
    if state.unsettled is None or not waiting:
        return because
    rows = quantity(sum_of(waiting).fingerprint.rows, "row")
    return f"{because}; epoch {state.unsettled.epoch} ({rows}) is decided and not committed yet"


def _total(state: State, name: SinkName) -> Total | None:
    return state.totals.get(name)


def _settled_rows(state: State, name: SinkName) -> int:
    """Return the rows that must be visible: all but those of an unsettled epoch."""
    total = _total(state, name)
    if total is None:
        return 0
    pending = sum_of(state.pending.get(name, ())).fingerprint.rows
    return total.fingerprint.rows - pending


def _rows_differ(
    visible: int, *, at_least: int, at_most: int, is_shared: bool, is_alone: bool
) -> list[str]:
    if visible < at_least:
        missing = quantity(at_least - visible, "row")
        return [f"{missing} missing: {at_least:,} decided, {visible:,} visible"]
    if visible > at_most and not is_shared:
        hint = "" if is_alone else "; if other programs write here too: --shared"
        surplus = quantity(visible - at_most, "row")
        return [f"{surplus} too many: {at_most:,} decided, {visible:,} visible{hint}"]
    return []


def _last_epoch_differs(
    name: SinkName, counted: Recount, before: State, after: State
) -> Sequence[str]:
    """Compare the newest epoch, if the target stores epochs and none was decided meanwhile."""
    last = after.last
    if counted.epochs is None or last is None or name not in last.rows or before.last != last:
        return []
    if name in after.pending or any(
        (one.epoch, one.sink) == (last.epoch, name) for one in after.given_up
    ):
        return []
    found = counted.epochs.get(last.epoch, 0)
    if found == last.rows[name]:
        return []
    return [f"epoch {last.epoch}: {last.rows[name]:,} decided, {found:,} visible"]
