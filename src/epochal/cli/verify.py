"""`epochal verify`: count what readers see against what was decided."""

from __future__ import annotations

from typing import Annotated

import typer

from epochal.assembly import reach
from epochal.cli.showing import (
    EXIT_FAILED,
    AsJson,
    Checkpoint,
    Named,
    number,
    say,
    show_json,
    show_table,
)
from epochal.reports.auditing import audit
from epochal.reports.model import SinkAudit
from epochal.spark.local import local_session


def verify(
    pipeline: Named,
    shared: Annotated[
        list[str] | None,
        typer.Option(help="A sink whose target others write to as well; may be repeated."),
    ] = None,
    hashes: Annotated[
        bool,
        typer.Option(
            "--hashes",
            help="Start a local Spark, read rows back and compare the sums of their hashes, too.",
        ),
    ] = False,
    checkpoint: Checkpoint = None,
    is_json: AsJson = False,
) -> None:
    """
    Count the rows that readers see of each sink against the totals of all decided epochs.

    Says plainly what can't be recounted, such as tables that are updated in place. Exits with 1 on
    any difference. May run beside a driver at work.

    Example: epochal verify jobs.orders:pipeline --shared audit
    """
    reached = reach(pipeline, checkpoint=checkpoint)
    spark = local_session("epochal verify", threads=2) if hashes else None
    try:
        report = audit(reached, shared=shared or (), spark=spark)
    finally:
        if spark is not None:
            spark.stop()
    if is_json:
        show_json(report)
    else:
        show_table(
            ["sink", "verdict", "decided", "visible", "what was counted"],
            [_row(one) for one in report.sinks],
        )
        for one in report.sinks:
            for difference in one.differences:
                say(f"{one.sink}: {difference}")
        say(f"source: {report.source}")
    if report.differs:
        raise typer.Exit(EXIT_FAILED)


def _row(one: SinkAudit) -> list[str]:
    return [one.sink, one.verdict, number(one.decided_rows), number(one.visible_rows), one.because]
