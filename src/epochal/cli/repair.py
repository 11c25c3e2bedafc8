"""`epochal repair`: write epochs again that a target which went back in time has lost."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from epochal.cli.output import AsJson, Checkpoint, DryRun, Named, TakeOver, person
from epochal.cli.resolve import Sink, show_resolution
from epochal.config.resolve_target import OpenedTarget, open_target, streaming_by
from epochal.reports.model import ResolutionReport
from epochal.reports.repair import repair as repair_now


def repair(  # noqa: PLR0917  typer reads the options off the signature
    pipeline: Named,
    sink: Sink,
    stream: Annotated[
        str | None,
        typer.Option(
            help="If the pipeline is not a YAML file: module:function that takes a session and "
            "returns the stream."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Write the epochs again that a target which went back in time has lost.

    Starts Spark, reads exactly these epochs again by the same query, and writes them to this sink
    only, under a key of their own: repeated, it writes nothing twice. Then the log records that the
    target went back, and the next start goes on. For queries without state whose source still has
    the rows. A dry run starts no Spark.

    Example: epochal repair pipeline.yaml --sink orders --dry-run
    """
    opened = open_target(pipeline, checkpoint=checkpoint)
    if stream is not None:
        opened = replace(opened, streaming=streaming_by(stream))
    show_resolution(_repaired(opened, sink, dry_run=dry_run, take_over=take_over), is_json)


def _repaired(
    opened: OpenedTarget, sink: str, *, dry_run: bool, take_over: bool
) -> ResolutionReport:
    if dry_run:
        return repair_now(opened, sink=sink, by=person(), dry_run=True)
    streaming = opened.require_streaming()
    session = streaming.session()
    try:
        return repair_now(
            opened,
            sink=sink,
            by=person(),
            stream=streaming.stream(session),
            dry_run=False,
            take_over=take_over,
        )
    finally:
        session.stop()
