"""`epochal recover`: finish what is decided and clear up what is not, without Spark."""

from __future__ import annotations

import typer

from epochal.assembly import reach
from epochal.cli.showing import (
    EXIT_IN_DOUBT,
    AsJson,
    Checkpoint,
    DryRun,
    Named,
    TakeOver,
    age,
    lines,
    say,
    show_json,
)
from epochal.reports.model import RecoveryReport
from epochal.reports.recovering import plan_recovery
from epochal.reports.recovering import recover as recover_now


def recover(
    pipeline: Named,
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Carry out the decided epoch and abort what no decision names: what every start does, by hand.

    May be repeated: where all is settled it says so. A driver that seems to be at work is not
    pushed aside unless asked for. Exits with 3 where something is left for a person.

    Example: epochal recover jobs.orders:pipeline --dry-run
    """
    reached = reach(pipeline, checkpoint=checkpoint)
    report = plan_recovery(reached) if dry_run else recover_now(reached, take_over=take_over)
    if is_json:
        show_json(report)
    else:
        _show(report)
    if report.needs_a_person:
        raise typer.Exit(EXIT_IN_DOUBT)


def _show(report: RecoveryReport) -> None:
    say(f"pipeline {report.pipeline!r} at {report.location}")
    say(f"driver: {report.driver.liveness.value}: {report.driver.because}")
    head = "would: " if report.is_dry_run else "done: "
    lines(f"{head}{step}" for step in report.steps)
    for sink in report.sinks:
        for one in sink.found:
            old = "" if one.age_s is None else f", {age(one.age_s)} old"
            blocks = f"; it blocks {one.blocks}" if one.blocks else ""
            say(f"  {one.sink}: {one.name}{old}: {one.verdict}: {one.because}{blocks}")
    for need in report.needs_a_person:
        say(f"needs a person: {need}")
