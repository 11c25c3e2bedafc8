"""
Repair of a target that went back in time: the rows of the lost epochs, written again by the source.

The pipeline's own query reads exactly these epochs again, as one batch, and the sink that lost them
gets it under a key of its own. That is an exactly-once load: repeated after a crash, it writes
nothing twice. Then it is recorded that the target went back, and the next start goes on.

    target proves 4, 7 was committed        epochs 5 to 7 are lost
    the query, from the end of 4 to 7       run "repair-orders-5-7", to that sink only
    the log                                 accepted: ann, "written again as run repair-orders-5-7"

It is done while no driver runs, so rows of later epochs come after these.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from epochal.config.resolve_target import OpenedTarget
from epochal.contract import Sink
from epochal.coordinator import by_hand
from epochal.errors import Refused
from epochal.protocol.admission import LostEpochs, is_back, lost_epochs, own_epoch
from epochal.protocol.state import Accepted, State
from epochal.reports.inspect import committer_of
from epochal.reports.liveness import under_lease
from epochal.reports.model import ResolutionReport
from epochal.reports.resolve import declared_sink, read_for_change, resolution_report
from epochal.spark.checkpoint import open_checkpoint
from epochal.spark.pipeline import Pipeline
from epochal.spark.source_replay import NotReplayable, replay_batch, require_row_by_row
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
    with committer_of(declared, state, opened.limits) as committer:
        marks = committer.newest()
    if marks is None or not is_back(state, declared.name, marks):
        step = f"sink {sink!r} proves all that was committed there: there is nothing to repair"
        return resolution_report(
            opened, action="repair", sink=sink, epoch=None, step=step, dry_run=dry_run
        )
    lost = lost_epochs(state, declared.name, own_epoch(state, marks))
    since = _first_lost(state, declared.name, lost)
    run = f"repair-{sink}-{since}-{lost.through}"
    step = f"would write epochs {since} to {lost.through} again from the source, as run {run!r}"
    if not dry_run:
        rows = _write_again(
            opened, declared, state, stream, since=since, last=lost.through, run=run
        )
        because = f"written again from the source as run {run!r}"
        word = Accepted(
            sink=declared.name, after=lost.after, through=lost.through, by=by, because=because
        )
        by_hand.accept(opened.require_log(), word)
        step = f"{rows} of epochs {since} to {lost.through} {because}; the next start goes on there"
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


def _first_lost(state: State, sink: SinkName, lost: LostEpochs) -> EpochNumber:
    """The epoch after the newest that is there, or the first that the sink ever got."""
    if lost.after is not None:
        return EpochNumber(lost.after + 1)
    return state.totals[sink].since if sink in state.totals else state.first


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
    pipeline = Pipeline(state.pipeline, sinks=[sink], limits=opened.limits)

    def write(batch: DataFrame) -> None:
        require_row_by_row(sink, batch)
        rows = pipeline.write(batch, run=run, checkpoint=state.location).rows
        written.append(rows.get(sink.name, 0))

    checkpoint = open_checkpoint(state.location, stream.sparkSession)
    try:
        replay_batch(stream, checkpoint, write, since=since, last=last)
    except NotReplayable as reason:
        raise Refused(
            f"epochs {since} to {last} can't be read again: {reason}",
            "bring their rows to the target by other means, if they are anywhere; then `epochal "
            f"resolve accept PIPELINE --sink {sink.name} --because …`",
        ) from reason
    return quantity(sum(written), "row")
