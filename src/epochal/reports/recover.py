"""
Recovery without Spark: what every start of a pipeline does first.

`plan_recovery` shows the steps. `recover` lets the coordinator take them: claim, commit the decided
epoch, abort what no decision names, stop.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from epochal.config.resolve_target import OpenedTarget
from epochal.coordinator import Coordinator, this_driver
from epochal.coordinator.journal import EpochLog
from epochal.coordinator.targets import described
from epochal.errors import Unsettled
from epochal.protocol.admission import Start
from epochal.protocol.recovery import Verdict, give_up_command
from epochal.protocol.state import State
from epochal.reports.inspect import AFTER_COMMIT, count_proofs, inspect_sinks
from epochal.reports.liveness import driver_report, require_no_driver, under_lease
from epochal.reports.model import RecoveryReport, SinkInspection
from epochal.reports.status import live_of, require_original, require_record
from epochal.telemetry.history_writer import record_history
from epochal.terms import quantity


def plan_recovery(opened: OpenedTarget, *, now: float | None = None) -> RecoveryReport:
    """Return the steps of a recovery. Queries the targets and changes nothing."""
    log = opened.require_log()
    state = require_record(log).record.state
    inspected = inspect_sinks(opened, state)
    return _report(
        state,
        log,
        inspected,
        is_dry_run=True,
        steps=[*_claiming(state), *_steps(state, inspected, is_dry_run=True)],
        needs=_needs(inspected),
        now=now,
    )


@under_lease("recover")
def recover(
    opened: OpenedTarget, *, take_over: bool = False, now: float | None = None
) -> RecoveryReport:
    """
    Recover, and return what was done. Raises `Refused` if a driver seems to be running, unless
    `take_over` is set; `Unsettled` if a target still can't be committed.
    """
    log = opened.require_log()
    state = require_record(log).record.state
    if not take_over:
        require_original(log, state, doing="recover", option="--take-over")
    driver = driver_report(state, live_of(log), now=time.time() if now is None else now)
    require_no_driver(driver, take_over=take_over, doing="recover")
    before = inspect_sinks(opened, state)
    coordinator = Coordinator(log=log, sinks=opened.require_sinks(), limits=opened.limits)
    record_history(coordinator.tracker, log, epochs_kept=opened.limits.history_epochs_kept)
    try:
        coordinator.start(start_of(opened, state))
        lost = {sink: len(handles) for sink, handles in coordinator.lost.items()}
        left = [f"{one.found.name}: {one.because}" for one in coordinator.left_for_a_person]
    finally:
        coordinator.stop()
    if lost:
        raise Unsettled(
            f"epoch {state.expected - 1} is decided, and targets have discarded prepared "
            f"receipts: {', '.join(f'{sink} ({count})' for sink, count in lost.items())}",
            "start the pipeline: the epoch is replayed and its rows are written again if sums "
            "prove them equal; if that never works, keep them elsewhere and record it: "
            f"{give_up_command(next(iter(lost)), state.expected - 1)}",
        )
    after = require_record(log).record.state
    return _report(
        after,
        log,
        before,
        is_dry_run=False,
        steps=_steps(state, before, is_dry_run=False),
        needs=left,
        now=now,
    )


def start_of(opened: OpenedTarget, state: State) -> Start:
    """Return a start with the query and run of the pipeline's last one."""
    return Start(
        pipeline=opened.pipeline or state.pipeline,
        location=state.location,
        sinks=described(opened.require_sinks()),
        driver=this_driver(),
        query_id=state.query_id,
        run=state.run,
    )


def _report(
    state: State,
    log: EpochLog,
    inspected: Sequence[SinkInspection],
    *,
    is_dry_run: bool,
    steps: Sequence[str],
    needs: Sequence[str],
    now: float | None,
) -> RecoveryReport:
    return RecoveryReport(
        location=state.location,
        pipeline=state.pipeline,
        is_dry_run=is_dry_run,
        driver=driver_report(state, live_of(log), now=time.time() if now is None else now),
        epoch=None if state.unsettled is None else state.unsettled.epoch,
        sinks=inspected,
        steps=steps,
        needs_a_person=needs,
    )


def _claiming(state: State) -> list[str]:
    return [f"claim generation {state.generation + 1}; generation {state.generation} is fenced"]


def _steps(state: State, inspected: Sequence[SinkInspection], *, is_dry_run: bool) -> list[str]:
    """Return the steps as sentences; with proofs in a dry run, as commits outdate them."""
    steps = []
    for sink in inspected:
        if sink.is_pending and state.unsettled is not None:
            proofs = ", ".join(f"{count} {proof}" for proof, count in count_proofs(sink).items())
            proven = f" ({proofs})" if proofs and is_dry_run else ""
            steps.append(
                f"commit epoch {state.unsettled.epoch} on {sink.sink}: "
                f"{quantity(len(sink.receipts), 'receipt')}{proven}"
            )
        aborts = [one for one in sink.found if one.verdict == Verdict.ABORT.value]
        if aborts:
            steps.append(
                f"abort {quantity(len(aborts), 'attempt')} on {sink.sink} that no decision names"
            )
    return steps or ["nothing is in doubt"]


def _needs(inspected: Sequence[SinkInspection]) -> list[str]:
    unreached = [f"{sink.sink}: {sink.error}" for sink in inspected if not sink.is_reached]
    lost = [
        f"{sink.sink}: the target proves "
        f"{quantity(count_proofs(sink)['aborted'], 'decided receipt')} discarded; a start "
        "of the pipeline must write the epoch again"
        for sink in inspected
        if "aborted" in count_proofs(sink)
    ]
    left = [
        f"{one.sink}: {one.name}: {one.because}"
        for sink in inspected
        for one in sink.found
        if one.verdict not in (Verdict.ABORT.value, Verdict.COMMIT.value, AFTER_COMMIT)
    ]
    return [*unreached, *lost, *left]
