"""
Removal of everything a dead pipeline left at its targets and in its log, except the rows.

The order allows an interrupted removal to be repeated: require that no driver is running; claim the
pipeline, so that no sleeping driver can decide any more; abort what is in doubt; remove ids, ledger
rows and staging at each target; remove the log last, because it lists what is to be removed.
"""

from __future__ import annotations

import time

from epochal.config.resolve_target import OpenedTarget
from epochal.contract import Sink
from epochal.coordinator import by_hand
from epochal.coordinator.cleanup import abort_judged
from epochal.coordinator.journal import EpochLog
from epochal.coordinator.targets import by_name
from epochal.errors import EpochalError, Refused
from epochal.kit.sink_base import Dropped, Operable
from epochal.protocol.recovery import Verdict, give_up_command, judge
from epochal.protocol.state import State
from epochal.reports.inspect import committer_of, error_text
from epochal.reports.liveness import driver_report, lease_for_tool, require_no_driver
from epochal.reports.model import DropReport
from epochal.reports.status import live_of, require_original, require_record
from epochal.telemetry.history import history_of
from epochal.telemetry.standby import members_of
from epochal.terms import quantity

_NOT_REACHED = "not reached: "


def drop(opened: OpenedTarget, *, dry_run: bool, is_dead: bool = False) -> DropReport:
    """
    Remove it, or show what would be removed. With `is_dead` a person confirms that a driver is dead
    whose state can't be found out from here; a driver that is seen to be alive is refused anyway.
    """
    log = opened.require_log()
    state = require_record(log).record.state
    if not (dry_run or is_dead):
        require_original(log, state, doing="drop the pipeline", option="--dead")
    _require_dead(log, state, is_dead=is_dead, dry_run=dry_run)
    _require_nothing_decided(state)
    if dry_run:
        return _dropped(opened, log, by_hand.as_successor(state), dry_run=True)
    with lease_for_tool(log, doing="drop the pipeline", take_over=is_dead):
        return _dropped(opened, log, by_hand.take_over(log, opened.limits), dry_run=False)


def _dropped(opened: OpenedTarget, log: EpochLog, state: State, *, dry_run: bool) -> DropReport:
    # Again: a driver that seemed dead may have decided before the claim.
    _require_nothing_decided(state)
    removed, left = _at_targets(opened, state, dry_run=dry_run)
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
            f"epoch {state.unsettled.epoch} is decided and not committed on "
            f"{', '.join(state.pending)}: to drop it would lose rows (I4)",
            "commit it: `epochal recover PIPELINE`; if that never works, keep its rows elsewhere "
            f"and record it: {give_up_command(next(iter(state.pending)), state.unsettled.epoch)}",
        )


def _require_dead(log: EpochLog, state: State, *, is_dead: bool, dry_run: bool) -> None:
    if dry_run:
        return
    driver = driver_report(state, live_of(log), now=time.time())
    if driver.liveness.value == "alive":
        raise Refused(
            f"generation {driver.generation} is running ({driver.because}): a running "
            "pipeline can't be dropped",
            "stop it first",
        )
    require_no_driver(driver, take_over=is_dead, doing="drop the pipeline")


def _is_any_unreached(left: dict[str, str]) -> bool:
    return any(why.startswith(_NOT_REACHED) for why in left.values())


def _at_targets(
    opened: OpenedTarget, state: State, *, dry_run: bool
) -> tuple[dict[str, list[str]], dict[str, str]]:
    removed: dict[str, list[str]] = {}
    left: dict[str, str] = {}
    for name, sink in by_name(opened.require_sinks()).items():
        try:
            doubts, dropped = _one(sink, state, opened, dry_run=dry_run)
        except (EpochalError, OSError) as error:
            left[name] = f"{_NOT_REACHED}{error_text(error)}"
            continue
        removed[name] = [*doubts, *dropped.removed]
        if dropped.kept:
            left[name] = dropped.kept
    return removed, left


def _one(
    sink: Sink, state: State, opened: OpenedTarget, *, dry_run: bool
) -> tuple[list[str], Dropped]:
    with committer_of(sink, state, opened.limits) as committer:
        judged = [judge(found, state) for found in committer.in_doubt()]
        doubts = [one.found.name for one in judged if one.verdict is Verdict.ABORT]
        if not dry_run:
            abort_judged(committer, judged, state)
        if not isinstance(committer, Operable):
            return doubts, Dropped(
                kept="proofs of old epochs: this kind of target can't remove them"
            )
        return doubts, committer.drop(is_dry_run=dry_run)


def _log(log: EpochLog, *, dry_run: bool, is_kept: bool) -> list[str]:
    """Remove the records and the history, unless a target could not be cleared."""
    if is_kept:
        return ["kept: not every target was reached; repeat the command when they are"]
    numbers = log.numbers()
    history = history_of(log)
    names = [] if history is None else list(history.store.names())
    if not dry_run:
        if history is not None:
            history.store.delete(names)
        members = members_of(log)
        if members is not None:
            members.clear()
        # The highest number last: it is the state of the log as long as it exists.
        for number in numbers:
            log.delete([number])
        log.delete_lists(log.list_names())
    return [
        f"{quantity(len(numbers), 'record')} in {log.place}",
        f"{quantity(len(names), 'part')} of its history",
    ]
