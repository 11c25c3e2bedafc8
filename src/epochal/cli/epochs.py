"""`epochal epochs`: the outcome and duration of each epoch."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from epochal.cli.output import (
    AsJson,
    Checkpoint,
    Target,
    message,
    moment,
    number,
    show_json,
    show_table,
)
from epochal.config.resolve_target import open_target
from epochal.reports.epochs import EPOCHS_MAX
from epochal.reports.epochs import epochs as epochs_of
from epochal.reports.model import EpochReport


def epochs(  # noqa: PLR0917  typer reads the options off the signature
    pipeline: Target,
    limit: Annotated[
        int,
        typer.Option("--limit", "-n", min=1, max=EPOCHS_MAX, help="Maximum number of epochs."),
    ] = 20,
    cursor: Annotated[
        str | None, typer.Option(help="Continue an earlier page: the cursor that it printed.")
    ] = None,
    only: Annotated[
        Literal["committed", "aborted", "failed", "decided"] | None,
        typer.Option(metavar="OUTCOME", help="One outcome: committed, aborted, failed, decided."),
    ] = None,
    checkpoint: Checkpoint = None,
    is_json: AsJson = False,
) -> None:
    """
    Show the history of a pipeline, newest first: outcome, rows, and the seconds of each phase.

    The history is kept beside the log, for people only: the last seconds of a killed driver may be
    missing from it. Such epochs are read from the log.

    Example: epochal epochs s3://lake/checkpoints/orders --only aborted
    """
    report = epochs_of(
        open_target(pipeline, checkpoint=checkpoint).require_log(),
        limit=limit,
        cursor=cursor,
        only=only,
    )
    if is_json:
        show_json(report)
        return
    show_table(
        ["epoch", "outcome", "rows", "seconds", "by phase", "finished", "gen", "why"],
        [_row(one) for one in report.epochs],
        optional=["by phase", "gen", "finished", "seconds"],
    )
    if report.because:
        message(report.because)
    if report.cursor is not None:
        message(f"older: --cursor {report.cursor}")


def _row(one: EpochReport) -> list[str]:
    by_phase = " ".join(f"{phase} {spent_s:.3f}" for phase, spent_s in one.seconds.items())
    return [
        str(one.epoch),
        one.outcome,
        number(one.rows),
        f"{sum(one.seconds.values()):.3f}" if one.seconds else "",
        by_phase,
        moment(one.finished_at),
        str(one.generation),
        "" if one.trouble is None else f"{one.trouble['message']} [{one.trouble['code']}]",
    ]
