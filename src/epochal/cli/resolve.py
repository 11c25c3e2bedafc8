"""`epochal resolve`: a person settles what is left, one thing at a time."""

from __future__ import annotations

from typing import Annotated

import typer

from epochal.assembly import reach
from epochal.cli.showing import (
    AsJson,
    Checkpoint,
    DryRun,
    Named,
    TakeOver,
    Target,
    lines,
    person,
    say,
    show_json,
)
from epochal.protocol.state import GivenUp
from epochal.reports import resolving
from epochal.reports.model import ResolutionReport
from epochal.terms import EpochNumber

resolve = typer.Typer(
    help="Settle by hand what is left: finish or give up one sink of a decided epoch, or abort one "
    "undecided handle. What is not decided can't be committed. The evidence is shown, and written "
    "to the log.",
    no_args_is_help=True,
)

Sink = Annotated[str, typer.Option(help="The sink, by its name.")]
Epoch = Annotated[int, typer.Option(help="The decided epoch, as `epochal status` names it.")]


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
    Commit one sink of the decided epoch, whatever becomes of the others.

    Example: epochal resolve finish jobs.orders:pipeline --sink orders --epoch 7041 --dry-run
    """
    reached = reach(pipeline, checkpoint=checkpoint)
    _show(
        resolving.finish(
            reached, sink=sink, epoch=epoch, by=person(), dry_run=dry_run, take_over=take_over
        ),
        is_json,
    )


@resolve.command("give-up")
def give_up(  # noqa: PLR0917  typer reads the options off the signature
    pipeline: Target,
    sink: Sink,
    epoch: Epoch,
    kept_at: Annotated[str, typer.Option(help="Where the rows are kept instead.")],
    because: Annotated[str, typer.Option(help="Why, for whoever reads the log later.")],
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Let one sink of the decided epoch go, on record: its rows are elsewhere, or brought by hand.

    The way out where a target lost prepared rows and a replay can't be proven to be the same. The
    log alone is enough; with the pipeline named, what the target proves is put on record too.

    Example: epochal resolve give-up chk/orders --sink orders --epoch 7041
    --kept-at s3://kept/7041 --because "topic was deleted"
    """
    reached = reach(pipeline, checkpoint=checkpoint)
    word = GivenUp(
        epoch=EpochNumber(epoch), sink=sink, kept_at=kept_at, by=person(), because=because
    )
    _show(resolving.give_up(reached, word, dry_run=dry_run, take_over=take_over), is_json)


@resolve.command()
def abort(  # noqa: PLR0917  typer reads the options off the signature
    pipeline: Named,
    sink: Sink,
    name: Annotated[str, typer.Option(help="As `epochal recover --dry-run` lists it.")],
    checkpoint: Checkpoint = None,
    dry_run: DryRun = False,
    take_over: TakeOver = False,
    is_json: AsJson = False,
) -> None:
    """
    Throw away one prepared thing that no decision names.

    The pipeline is claimed first, so that no decision can come any more; one that is there protects
    what it names.

    Example: epochal resolve abort jobs.orders:pipeline --sink orders --name epochal-…-p0-t7
    """
    reached = reach(pipeline, checkpoint=checkpoint)
    _show(
        resolving.abort(
            reached, sink=sink, name=name, by=person(), dry_run=dry_run, take_over=take_over
        ),
        is_json,
    )


def _show(report: ResolutionReport, is_json: bool) -> None:
    if is_json:
        show_json(report)
        return
    say(f"pipeline {report.pipeline!r} at {report.location}")
    for fact in report.evidence:
        say(f"evidence: {fact}")
    lines([report.step])
