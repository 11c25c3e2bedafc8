"""`epochal status`: all pipelines below a folder, with their health."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Annotated

import typer

from epochal.cli.output import AsJson, age, message, number, show_json, show_table, standby_lines
from epochal.protocol.state import epochs_text
from epochal.reports.model import PipelineReport, StatusReport
from epochal.reports.status import status as status_of
from epochal.telemetry.health import MEANINGS, Health
from epochal.terms import EpochNumber


def status(
    root: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINTS",
            help="A checkpoint, or a folder or URL above any number of them; or one pipeline: its "
            "YAML file or module:object.",
        ),
    ],
    is_json: AsJson = False,
) -> None:
    """
    Show every pipeline below a folder: its health and since when, last epoch, driver, rates.

    Reads logs only: no target is queried and nothing changes. The most urgent comes first, and
    the reason follows the table. Exits with 3 if a decided epoch is not visible everywhere or a
    log can't be read, with 1 if a driver is gone.

    Example: epochal status s3://lake/checkpoints
    """
    report = status_of(root)
    if is_json:
        show_json(report)
    else:
        _show(report)
    found = [one.health for one in report.pipelines] + [Health.UNREADABLE] * len(report.unreadable)
    code = max(MEANINGS[health].exit_code for health in found)
    if code:
        raise typer.Exit(code)


def _show(report: StatusReport) -> None:
    now = time.time()
    show_table(
        ["pipeline", "health", "for", "epoch", "phase", "driver", "rows/s", "location"],
        [_row(one, now) for one in report.pipelines],
        optional=["location", "rows/s", "driver", "phase"],
    )
    for one in report.pipelines:
        for line in [*_details(one, now), *_standbys(one)]:
            message(line)
    for broken in report.unreadable:
        message(f"error: {broken.message} [{broken.code}]\nhint: {broken.hint}")


def _row(one: PipelineReport, now: float) -> list[str]:
    return [
        _name(one),
        one.health.value,
        "" if one.since is None else age(max(0.0, now - one.since)),
        number(one.epoch),
        one.phase,
        f"{one.driver.liveness.value}, g{one.driver.generation}",
        f"{one.rows_per_s:,.0f}" if one.rows_per_s else "",
        one.location,
    ]


def _name(one: PipelineReport) -> str:
    return one.pipeline if one.run is None else f"{one.pipeline} (run {one.run})"


def _details(one: PipelineReport, now: float) -> Iterator[str]:
    """The reason of a health that is not well, and what a person has decided."""
    name = _name(one)
    if one.health.is_bad or one.health is Health.COPY:
        since = "" if one.since is None else f" for {age(max(0.0, now - one.since))}"
        yield f"{name}: {one.health.value}{since}: {one.because}"
        yield f"  blocks: {one.blocks}"
        yield f"  to do: {one.to_do}"
    for lost in one.accepted:
        again = "" if lost.run is None else " and written again"
        epochs = epochs_text(EpochNumber(lost.since), EpochNumber(lost.through))
        yield (
            f"{name}: lost at {lost.sink}{again}: {epochs}; accepted by {lost.by}: {lost.because}"
        )
    if one.pause is not None:
        yield f"{name}: {one.pause}"
        yield f"hint: `epochal resume {one.location}`"


def _standbys(one: PipelineReport) -> list[str]:
    return [f"{one.pipeline}: {line}" for line in standby_lines(one.standbys)]
