"""`epochal drop`: remove everything a dead pipeline left except its rows."""

from __future__ import annotations

from typing import Annotated

import typer

from epochal.cli.output import (
    EXIT_IN_DOUBT,
    AsJson,
    Checkpoint,
    DryRun,
    Named,
    lines,
    message,
    show_json,
)
from epochal.config.resolve_target import open_target
from epochal.reports.drop import drop as drop_now
from epochal.reports.model import DropReport


def drop(
    pipeline: Named,
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    is_dead: Annotated[
        bool,
        typer.Option(
            "--dead", help="Confirms that no driver runs, where this can't be found out from here."
        ),
    ] = False,
    is_json: AsJson = False,
) -> None:
    """
    Remove what a dead pipeline left: prepared work, ids, ledger rows, history, log. Rows are kept.

    Refused while a driver is running and while a decided epoch is not committed everywhere. May be
    repeated if it was interrupted. Spark's own files in the checkpoint are not touched.

    Example: epochal drop jobs.orders:pipeline --dry-run
    """
    report = drop_now(
        open_target(pipeline, checkpoint=checkpoint), dry_run=dry_run, is_dead=is_dead
    )
    if is_json:
        show_json(report)
    else:
        _show(report)
    if any(part.startswith("kept") for part in report.log):
        raise typer.Exit(EXIT_IN_DOUBT)


def _show(report: DropReport) -> None:
    message(f"pipeline {report.pipeline!r} at {report.location}")
    head = "would remove" if report.is_dry_run else "removed"
    for sink, parts in report.sinks.items():
        lines(f"{head} from {sink}: {part}" for part in parts)
    lines(f"{head}: {part}" for part in report.log)
    for sink, why in report.left.items():
        message(f"left at {sink}: {why}")
