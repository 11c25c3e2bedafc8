"""`epochal resolve`: settle one sink of a decided epoch, or one undecided handle, by hand."""

from __future__ import annotations

from typing import Annotated

import typer

from epochal.cli.output import (
    AsJson,
    Checkpoint,
    DryRun,
    Named,
    TakeOver,
    Target,
    lines,
    message,
    person,
    show_json,
)
from epochal.config.resolve_target import open_target
from epochal.protocol.state import GivenUp
from epochal.reports import resolve as resolution
from epochal.reports.model import ResolutionReport
from epochal.terms import EpochNumber

resolve = typer.Typer(
    help="Settle by hand: finish or give up one sink of a decided epoch, abort one undecided "
    "handle, or accept that a target went back in time. An undecided epoch can't be committed. The "
    "evidence is shown and written to the log.",
    no_args_is_help=True,
)

Sink = Annotated[str, typer.Option(help="The name of the sink.")]
Epoch = Annotated[int, typer.Option(help="The decided epoch; `epochal status` shows it.")]


@resolve.command()
def finish(  # noqa: PLR0917  typer reads the options off the signature
    pipeline: Named,
    sink: Sink,
    epoch: Epoch,
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Commit one sink of the decided epoch, independently of the others.

    Example: epochal resolve finish jobs.orders:pipeline --sink orders --epoch 7041 --dry-run
    """
    opened = open_target(pipeline, checkpoint=checkpoint)
    show_resolution(
        resolution.finish(
            opened, sink=sink, epoch=epoch, by=person(), dry_run=dry_run, take_over=take_over
        ),
        is_json,
    )


@resolve.command("give-up")
def give_up(  # noqa: PLR0917  typer reads the options off the signature
    pipeline: Target,
    sink: Sink,
    epoch: Epoch,
    kept_at: Annotated[str, typer.Option(help="Where the rows are kept instead.")],
    because: Annotated[str, typer.Option(help="The reason, for readers of the log.")],
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Give up one sink of the decided epoch: record in the log that its rows are kept elsewhere.

    For a target that lost prepared rows when the replayed rows can't be proven equal. The log alone
    is enough; if the pipeline is named, the target's proof is recorded too.

    Example: epochal resolve give-up chk/orders --sink orders --epoch 7041
    --kept-at s3://kept/7041 --because "topic was deleted"
    """
    opened = open_target(pipeline, checkpoint=checkpoint)
    given_up = GivenUp(
        epoch=EpochNumber(epoch), sink=sink, kept_at=kept_at, by=person(), because=because
    )
    show_resolution(
        resolution.give_up(opened, given_up, dry_run=dry_run, take_over=take_over), is_json
    )


@resolve.command()
def abort(  # noqa: PLR0917  typer reads the options off the signature
    pipeline: Named,
    sink: Sink,
    name: Annotated[str, typer.Option(help="The name that `epochal recover --dry-run` lists.")],
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Abort one prepared handle that no decision names.

    The pipeline is claimed first, so that no running driver can decide on the handle any more. A
    handle that a decision names is never aborted.

    Example: epochal resolve abort jobs.orders:pipeline --sink orders --name epochal-…-p0-t7
    """
    opened = open_target(pipeline, checkpoint=checkpoint)
    show_resolution(
        resolution.abort(
            opened, sink=sink, name=name, by=person(), dry_run=dry_run, take_over=take_over
        ),
        is_json,
    )


@resolve.command()
def accept(  # noqa: PLR0917  typer reads the options off the signature
    pipeline: Named,
    sink: Sink,
    because: Annotated[str, typer.Option(help="The reason, for readers of the log.")],
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Accept that a target went back in time, and go on there.

    For a target that was restored, or replaced by a replica that lagged behind, and will not get
    the missing epochs back, or has got them by other means. What is missing is shown; the epochs,
    your name and the reason are recorded in the log.

    Example: epochal resolve accept jobs.orders:pipeline --sink orders --because "failover"
    """
    opened = open_target(pipeline, checkpoint=checkpoint)
    show_resolution(
        resolution.accept(
            opened,
            sink=sink,
            by=person(),
            because=because,
            dry_run=dry_run,
            take_over=take_over,
        ),
        is_json,
    )


def show_resolution(report: ResolutionReport, is_json: bool) -> None:
    """Print what was done by hand, or would be."""
    if is_json:
        show_json(report)
        return
    message(f"pipeline {report.pipeline!r} at {report.location}")
    for fact in report.evidence:
        message(f"evidence: {fact}")
    lines([report.step])
