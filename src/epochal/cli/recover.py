"""`epochal recover`: commit the decided epoch and abort undecided work, without Spark."""

from __future__ import annotations

import typer

from epochal.cli.output import (
    EXIT_IN_DOUBT,
    AsJson,
    Checkpoint,
    DryRun,
    Named,
    TakeOver,
    age,
    lines,
    message,
    show_json,
)
from epochal.config.resolve_target import open_target
from epochal.reports.model import RecoveryReport
from epochal.reports.recover import plan_recovery
from epochal.reports.recover import recover as recover_now


def recover(
    pipeline: Named,
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Commit the decided epoch and abort undecided work, as every start of the pipeline does.

    May be repeated: if everything is settled, it reports so. Refused while a driver seems to be
    running, unless --take-over is given. Exits with 3 if something is left for a person.

    Example: epochal recover jobs.orders:pipeline --dry-run
    """
    opened = open_target(pipeline, checkpoint=checkpoint)
    report = plan_recovery(opened) if dry_run else recover_now(opened, take_over=take_over)
    if is_json:
        show_json(report)
    else:
        _show(report)
    if report.needs_a_person:
        raise typer.Exit(EXIT_IN_DOUBT)


def _show(report: RecoveryReport) -> None:
    message(f"pipeline {report.pipeline!r} at {report.location}")
    message(f"driver: {report.driver.liveness.value}: {report.driver.because}")
    head = "would: " if report.is_dry_run else "done: "
    lines(f"{head}{step}" for step in report.steps)
    # What a recovery found is gone after it: the steps are what it did.
    found = [one for sink in report.sinks for one in sink.found if report.is_dry_run]
    for one in found:
        old = "" if one.age_s is None else f", {age(one.age_s)} old"
        blocks = f"; it blocks {one.blocks}" if one.blocks else ""
        message(f"  {one.sink}: {one.name}{old}: {one.verdict}: {one.because}{blocks}")
    for need in report.needs_a_person:
        message(f"needs a person: {need}")
