"""
Repair of a target that went back in time: the rows of the lost epochs, written again by the source.

The pipeline's own query reads exactly these epochs again, as one batch, and the sink that lost them
gets it under a key of its own. That is an exactly-once load: repeated after a crash, it writes
nothing twice. Then it is recorded that the target went back, and the next start goes on.

    target proves 4, 7 was committed        epochs 5 to 7 are lost
    the query, from the end of 4 to 7       run "repair-orders-5-7", to that sink only
    the log                                 accepted: ann, "written again as run repair-orders-5-7"

A target that goes back once more, to a time after the repair, has the rows of that run: they are
not written a second time (`protocol.admission.lost_epochs`).

It is done while no driver runs, so rows of later epochs come after these.
"""

from __future__ import annotations

from shlex import quote
from typing import TYPE_CHECKING, Any

from epochal.config.resolve_target import OpenedTarget
from epochal.contract import Sink
from epochal.coordinator import by_hand
from epochal.coordinator.rejected_rows import reject_sinks
from epochal.coordinator.targets import by_name
from epochal.errors import Refused
from epochal.protocol.state import Accepted, State, epochs_text
from epochal.reports.liveness import under_lease
from epochal.reports.model import ResolutionReport
from epochal.reports.resolve import declared_sink, lost_at, read_for_change, resolution_report
from epochal.spark.checkpoint import open_checkpoint
from epochal.spark.pipeline import Pipeline
from epochal.spark.projection import project_unordered
from epochal.spark.source_replay import NotReplayable, replay_batch, require_row_by_row
from epochal.telemetry.history import history_of
from epochal.terms import EpochNumber, SinkName, quantity

if TYPE_CHECKING:
    from pyspark.sql import DataFrame


@under_lease("repair a sink")
def repair(
    opened: OpenedTarget,
    *,
    sink: str,
    by: str,
    stream: Any = None,
    dry_run: bool,
    take_over: bool = False,
) -> ResolutionReport:
    """Write lost epochs again from the source. `stream` is needed unless it is a dry run."""
    state = read_for_change(opened, dry_run=dry_run, take_over=take_over, doing="repair a sink")
    declared = declared_sink(opened, sink)
    lost = lost_at(declared, state, opened.limits)
    if lost is None:
        step = f"sink {sink!r} proves all that was committed there: there is nothing to repair"
        return resolution_report(
            opened, action="repair", sink=sink, epoch=None, step=step, dry_run=dry_run
        )
    epochs = epochs_text(lost.since, lost.through)
    try:
        _require_from_source(opened, declared, lost.since, lost.through)
    except NotReplayable as reason:
        raise _refused(declared, epochs, reason) from None
    run = f"repair-{sink}-{lost.since}-{lost.through}"
    step = f"would write {epochs} again from the source, as run {run!r}"
    if not dry_run:
        rows = _write_again(
            opened, declared, state, stream, since=lost.since, last=lost.through, run=run
        )
        because = f"written again from the source as run {run!r}"
        word = Accepted(
            sink=declared.name,
            after=lost.after,
            since=lost.since,
            through=lost.through,
            by=by,
            because=because,
            run=run,
        )
        by_hand.accept(opened.require_log(), word)
        step = f"{rows} of {epochs} {because}; the next start goes on there"
    return resolution_report(
        opened,
        action="repair",
        sink=sink,
        epoch=lost.through,
        evidence=[
            f"the target proves {lost.proven_text}; epoch {lost.through} was committed there",
            f"missing there: {lost.text}",
        ],
        step=step,
        dry_run=dry_run,
    )


def _require_from_source(
    opened: OpenedTarget, sink: Sink, since: EpochNumber, last: EpochNumber
) -> None:
    """
    Raise where a load could not leave the sink for rejected rows as it is: rows that the target
    rejects again would come there a second time.
    """
    if sink.name in reject_sinks(by_name(opened.require_sinks())):
        raise NotReplayable("this sink gets rows that other targets reject, and no source has them")
    taker = sink.rejects_to
    if taker is None:
        return
    rejected = _decided_rows(opened, taker.name, since, last)
    if rejected is None:
        raise NotReplayable(f"the history does not have how many of their rows {taker.name!r} got")
    if rejected:
        raise NotReplayable(
            f"{quantity(rejected, 'row')} of them went to {taker.name!r} and would go there again"
        )


def _decided_rows(
    opened: OpenedTarget, sink: SinkName, since: EpochNumber, last: EpochNumber
) -> int | None:
    """How many rows a sink got by these epochs; None where the history does not have them all."""
    history = history_of(opened.require_log())
    if history is None:
        return None
    rows = 0
    for epoch in range(since, last + 1):
        attempts = history.attempts(EpochNumber(epoch))
        if not attempts or sink not in attempts[-1].sinks:
            return None
        rows += attempts[-1].sinks[sink].rows
    return rows


def _write_again(
    opened: OpenedTarget,
    sink: Sink,
    state: State,
    stream: Any,
    *,
    since: EpochNumber,
    last: EpochNumber,
    run: str,
) -> str:
    written: list[int] = []
    decided = _decided_rows(opened, sink.name, since, last)
    pipeline = Pipeline(state.pipeline, sinks=[sink], limits=opened.limits)

    def write(batch: DataFrame) -> None:
        require_row_by_row(sink, batch)
        if decided is not None and (now := project_unordered(sink, batch).count()) != decided:
            raise NotReplayable(
                f"the source returns {quantity(now, 'row')} of them now, and {decided} were decided"
            )
        rows = pipeline.write(batch, run=run, checkpoint=state.location).rows
        written.append(rows.get(sink.name, 0))

    checkpoint = open_checkpoint(state.location, stream.sparkSession)
    try:
        replay_batch(stream, checkpoint, write, since=since, last=last)
    except NotReplayable as reason:
        raise _refused(sink, epochs_text(since, last), reason) from reason
    return quantity(sum(written), "row")


def _refused(sink: Sink, epochs: str, reason: NotReplayable) -> Refused:
    return Refused(
        f"{epochs} can't be read again: {reason}",
        "bring their rows to the target by other means, if they are anywhere; then `epochal "
        f"resolve accept PIPELINE --sink {quote(sink.name)} --because …`",
    )
