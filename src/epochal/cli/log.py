"""`epochal log export`: the epoch log as a JSON document."""

from __future__ import annotations

import typer

from epochal.cli.output import Checkpoint, Target, show_json
from epochal.config.resolve_target import open_target
from epochal.reports.epochs import export as export_now

log = typer.Typer(help="Read an epoch log.", no_args_is_help=True)


@log.callback()
def options() -> None:
    """Read an epoch log."""


@log.command()
def export(pipeline: Target, checkpoint: Checkpoint = None) -> None:
    """
    Print all records of the log as one JSON object. Every record is validated.

    It contains handles, row counts and offsets, and no secrets.

    Example: epochal log export s3://lake/checkpoints/orders > orders-log.json
    """
    show_json(export_now(open_target(pipeline, checkpoint=checkpoint).require_log()))
