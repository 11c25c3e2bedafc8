"""`epochal status`: all pipelines below a folder, with their health."""

from __future__ import annotations

from typing import Annotated

import typer

from epochal.cli.output import EXIT_IN_DOUBT, AsJson, age, message, number, show_json, show_table
from epochal.reports.model import Health, PipelineReport, StatusReport
from epochal.reports.status import status as status_of


def status(
    root: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINTS", help="A checkpoint, or a folder or URL above any number of them."
        ),
    ],
    is_json: AsJson = False,
) -> None:
    """
    Show every pipeline below a folder: last epoch, phase, driver, rates, what is in doubt.

    Reads logs only: no target is queried and nothing changes. Exits with 3 if an epoch is decided
    and no driver is committing it, or if a person is needed.

    Example: epochal status s3://lake/checkpoints
    """
    report = status_of(root)
    if is_json:
        show_json(report)
    else:
        _show(report)
    if any(one.health is Health.IN_DOUBT for one in report.pipelines) or report.unreadable:
        raise typer.Exit(EXIT_IN_DOUBT)


def _show(report: StatusReport) -> None:
    show_table(
        [
            "pipeline",
            "health",
            "epoch",
            "phase",
            "driver",
            "gen",
            "rows/s",
            "epochs/min",
            "location",
        ],
        [_row(one) for one in report.pipelines],
    )
    for one in report.pipelines:
        if one.unsettled is not None and one.health is Health.IN_DOUBT:
            message(f"{one.pipeline}: {one.because}, for {age(one.unsettled.age_s)}")
            message(
                f"hint: `epochal recover MODULE:PIPELINE --checkpoint {one.location} --dry-run`"
            )
        elif one.health is Health.IN_DOUBT:
            message(f"{one.pipeline}: {one.because}")
        for lost in one.accepted:
            message(
                f"{one.pipeline}: epochs up to {lost.through} are accepted as lost at {lost.sink}"
                f"{'' if lost.after is None else f', after {lost.after}'}; by {lost.by}: "
                f"{lost.because}"
            )
        if one.pause is not None:
            message(f"{one.pipeline}: {one.pause}\nhint: `epochal resume {one.location}`")
    for broken in report.unreadable:
        message(f"error: {broken.message} [{broken.code}]\nhint: {broken.hint}")


def _row(one: PipelineReport) -> list[str]:
    name = one.pipeline if one.run is None else f"{one.pipeline} (run {one.run})"
    return [
        name,
        one.health.value,
        number(one.epoch),
        one.phase,
        one.driver.liveness.value,
        str(one.driver.generation),
        f"{one.rows_per_s:,.0f}" if one.rows_per_s else "",
        f"{one.epochs_per_minute:,.1f}" if one.epochs_per_minute else "",
        one.location,
    ]
