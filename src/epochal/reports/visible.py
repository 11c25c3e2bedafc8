"""
`visible`: up to which epoch each sink shows all rows. For jobs that read what a pipeline writes.

The log knows it of every epoch but possibly the newest: that an epoch is settled is written with
the decision of the next one. Where the pipeline declares its sinks, the targets are asked about
that one, and whether they still have the others: a restored backup may have lost some.

    log      epoch 7 committed on orders and audit, epoch 8 decided
    orders   proves epoch 8                                          through 8
    audit    does not answer                                         through 7, 8 may be visible
    all                                                              through 7
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import TYPE_CHECKING

from epochal.config.resolve_target import OpenedTarget, open_target
from epochal.contract import Sink
from epochal.coordinator.targets import by_name
from epochal.errors import EpochalError
from epochal.protocol.admission import is_back, lost_epochs, own_epoch
from epochal.protocol.state import State
from epochal.reports.inspect import committer_of, error_text, is_pending_at
from epochal.reports.model import VisibleReport, VisibleSink
from epochal.reports.status import require_record
from epochal.terms import EpochNumber, Limits, Mark, SinkName

if TYPE_CHECKING:
    from epochal.spark.pipeline import Pipeline

_NOT_COMMITTED = "decided, and not committed there yet"
_NOT_ASKED = "its target was not asked: name the pipeline object or its file instead of a place"


def visible(pipeline: str | Pipeline, *, checkpoint: str | None = None) -> VisibleReport:
    """
    Return up to which epoch each sink of a pipeline shows all its rows. Changes nothing.

    `pipeline` is a `Pipeline`, `module:object`, a YAML file, or a checkpoint, whose log alone is
    read. `checkpoint` names the log's location where the pipeline does not declare it.
    """
    opened = open_target(pipeline, checkpoint=checkpoint)
    log = opened.require_log()
    try:
        return visible_epochs(opened, require_record(log).record.state)
    finally:
        log.close()


def visible_epochs(opened: OpenedTarget, state: State) -> VisibleReport:
    declared = {} if opened.sinks is None else by_name(opened.sinks)
    sinks = {
        name: _visible_sink(name, state, declared.get(name), opened.limits) for name in state.sinks
    }
    through = [one.through for one in sinks.values() if one.through is not None]
    return VisibleReport(
        location=state.location,
        pipeline=state.pipeline,
        first=state.first,
        through=min(through, default=None) if len(through) == len(sinks) else None,
        decided=None if state.last is None else state.last.epoch,
        sinks=sinks,
        given_up={
            name: [one.epoch for one in state.given_up if one.sink == name]
            for name in sorted({one.sink for one in state.given_up})
        },
    )


def _visible_sink(name: SinkName, state: State, sink: Sink | None, limits: Limits) -> VisibleSink:
    known, decision = _settled(name, state), state.unsettled
    if decision is not None and name in state.done:
        known = decision.epoch
    pending = decision.epoch if decision is not None and name in state.pending else None
    if sink is None:
        because = "" if pending is None else _NOT_ASKED
        return VisibleSink(through=known, pending=pending, because=because)
    try:
        with committer_of(sink, state, limits) as committer:
            marks = committer.newest()
            if is_back(state, name, marks):
                return _gone_back(name, state, marks or ())
            if not is_pending_at(name, state, committer):
                newest = known if pending is None else pending
                return VisibleSink(through=newest, pending=None, because="")
    except (EpochalError, OSError) as error:
        return VisibleSink(through=known, pending=pending, because=error_text(error))
    return VisibleSink(through=known, pending=pending, because=_NOT_COMMITTED)


def _gone_back(name: SinkName, state: State, marks: Sequence[Mark]) -> VisibleSink:
    lost = lost_epochs(state, name, own_epoch(state, marks))
    because = f"the target went back in time; missing there: {lost.text}"
    return VisibleSink(through=lost.after, pending=None, because=because)


def _settled(name: SinkName, state: State) -> EpochNumber | None:
    """Return the newest epoch that the log knows to be visible, or given up after such a one."""
    newest = state.newest_committed.get(name)
    if newest is None:
        return None
    given_up = {one.epoch for one in state.given_up if one.sink == name}
    return next(EpochNumber(epoch) for epoch in count(newest) if epoch + 1 not in given_up)
