"""
Removing all that a dead pipeline left at its targets and in its log; the rows stay.

In an order that may be cut short and begun again: nobody may be at work; the pipeline is claimed,
so that no sleeping driver decides any more; what is in doubt is aborted; each target forgets; the
log goes last, as it says what there is to remove.
"""

from __future__ import annotations

import time

from epochal.assembly import Reached
from epochal.contract import Dropped, EpochLog, Operable, Sink
from epochal.coordinator import resolving
from epochal.coordinator.starting import by_name
from epochal.coordinator.sweeping import abort_judged
from epochal.errors import EpochalError, Refused
from epochal.protocol.recovery import Verdict, judge
from epochal.protocol.state import State
from epochal.reports.inspect import committer_of, told
from epochal.reports.liveness import driver_report, require_nobody_at_work
from epochal.reports.model import DropReport
from epochal.reports.status import history_of, live_of, require_record
from epochal.terms import quantity

_NOT_REACHED = "not reached: "


def drop(reached: Reached, *, dry_run: bool, is_dead: bool = False) -> DropReport:
    """
    Remove it, or show what would go. `is_dead` is a person's word on a driver of which nothing can
    be known from here; one that is seen to be alive is refused all the same.
    """
    log = reached.require_log()
    state = require_record(log).record.state
    _require_dead(log, state, is_dead=is_dead, dry_run=dry_run)
    _require_nothing_decided(state)
    state = resolving.as_successor(state) if dry_run else resolving.take_over(log, reached.limits)
    # Again: a driver that was thought dead may have decided before the claim.
    _require_nothing_decided(state)
    removed, left = _at_targets(reached, state, dry_run=dry_run)
    return DropReport(
        location=state.location,
        pipeline=state.pipeline,
        is_dry_run=dry_run,
        sinks=removed,
        left=left,
        log=_log(log, dry_run=dry_run, is_kept=_is_any_unreached(left)),
    )


def _require_nothing_decided(state: State) -> None:
    if state.unsettled is not None and state.pending:
        raise Refused(
            f"epoch {state.unsettled.epoch} is decided and not carried out on "
            f"{', '.join(state.pending)}: to drop it would lose rows (I4)",
            "`epochal recover` carries it out; `epochal resolve give-up` lets it go, on record",
        )


def _require_dead(log: EpochLog, state: State, *, is_dead: bool, dry_run: bool) -> None:
    if dry_run:
        return
    driver = driver_report(state, live_of(log), now=time.time())
    if driver.liveness.value == "alive":
        raise Refused(
            f"generation {driver.generation} is at work ({driver.because}): a living pipeline "
            "can't be dropped",
            "stop it first",
        )
    require_nobody_at_work(driver, take_over=is_dead, doing="drop the pipeline")


def _is_any_unreached(left: dict[str, str]) -> bool:
    return any(why.startswith(_NOT_REACHED) for why in left.values())


def _at_targets(
    reached: Reached, state: State, *, dry_run: bool
) -> tuple[dict[str, list[str]], dict[str, str]]:
    removed: dict[str, list[str]] = {}
    left: dict[str, str] = {}
    for name, sink in by_name(reached.require_sinks()).items():
        try:
            doubts, dropped = _one(sink, state, reached, dry_run=dry_run)
        except (EpochalError, OSError) as error:
            left[name] = f"{_NOT_REACHED}{told(error)}"
            continue
        removed[name] = [*doubts, *dropped.removed]
        if dropped.kept:
            left[name] = dropped.kept
    return removed, left


def _one(sink: Sink, state: State, reached: Reached, *, dry_run: bool) -> tuple[list[str], Dropped]:
    with committer_of(sink, state, reached.limits) as committer:
        judged = [judge(found, state) for found in committer.in_doubt()]
        doubts = [one.found.name for one in judged if one.verdict is Verdict.ABORT]
        if not dry_run:
            abort_judged(committer, judged, state)
        if not isinstance(committer, Operable):
            return doubts, Dropped(kept="what this kind of target remembers of old epochs")
        return doubts, committer.drop(is_dry_run=dry_run)


def _log(log: EpochLog, *, dry_run: bool, is_kept: bool) -> list[str]:
    """The log's own records and history. Kept while a target could not be cleared."""
    if is_kept:
        return ["kept: not every target was reached; drop it again once they are"]
    numbers = log.numbers()
    history = history_of(log)
    names = [] if history is None else list(history.place.names())
    if not dry_run:
        if history is not None:
            history.place.delete(names)
        # The highest last: as long as a record is there, it is the truth.
        for number in numbers:
            log.delete([number])
    return [
        f"{quantity(len(numbers), 'record')} in {log.place}",
        f"{quantity(len(names), 'part')} of its history",
    ]
