"""`epochal log export`: the epoch log as one document."""

from __future__ import annotations

import typer

from epochal.assembly import reach
from epochal.cli.showing import Checkpoint, Target, show_json
from epochal.reports.exporting import export as export_now

log = typer.Typer(help="Look into an epoch log.", no_args_is_help=True)


@log.callback()
def options() -> None:
    """Look into an epoch log."""


@log.command()
def export(pipeline: Target, checkpoint: Checkpoint = None) -> None:
    """
    Print every record that the log keeps as one JSON object, each record checked.

    Holds no secret, as no record does; it holds handles, row counts and offsets.

    Example: epochal log export s3://lake/checkpoints/orders > orders-log.json
    """
    show_json(export_now(reach(pipeline, checkpoint=checkpoint).require_log()))
