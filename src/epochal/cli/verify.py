"""`epochal verify`: count what readers see, and what the source gives, against what was decided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from epochal.assembly import Reached, reach, streaming_by
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
from epochal.reports.model import AuditReport, SinkAudit, SourceAudit
from epochal.spark.local_session import quiet_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def verify(
    pipeline: Named,
    *,
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
    source: Annotated[
        bool,
        typer.Option(
            "--source",
            help="Start Spark, read the source again by the same query, and compare that, too.",
        ),
    ] = False,
    stream: Annotated[
        str | None,
        typer.Option(
            help="module:function that makes the stream, given a session; for --source, where the "
            "pipeline is no file."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    is_json: AsJson = False,
) -> None:
    """
    Count the rows that readers see of each sink against the totals of all decided epochs.

    Says plainly what can't be recounted, such as tables that are updated in place, and what of a
    source can't be read again. Exits with 1 on any difference. May run beside a driver at work.

    Example: epochal verify jobs.orders:pipeline --shared audit
    """
    reached = reach(pipeline, checkpoint=checkpoint)
    if stream is not None:
        reached = replace(reached, streaming=streaming_by(stream))
    with _engine(reached, hashes=hashes, source=source or stream is not None) as engine:
        report = audit(
            reached,
            shared=shared or (),
            spark=engine.session if hashes else None,
            stream=engine.stream,
        )
    if is_json:
        show_json(report)
    else:
        _show(report)
    if report.differs:
        raise typer.Exit(EXIT_FAILED)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Engine:
    """What of Spark an audit needs; nothing where it needs none."""

    session: SparkSession | None = None
    stream: DataFrame | None = None


@contextmanager
def _engine(reached: Reached, *, hashes: bool, source: bool) -> Iterator[_Engine]:
    if not (hashes or source):
        yield _Engine()
        return
    streaming = reached.require_streaming() if source else None
    session = (
        quiet_session("epochal verify", threads=2) if streaming is None else streaming.session()
    )
    try:
        stream = None if streaming is None else streaming.stream(session)
        yield _Engine(session=session, stream=stream)
    finally:
        session.stop()


def _show(report: AuditReport) -> None:
    show_table(
        ["sink", "verdict", "decided", "visible", "what was counted"],
        [_row(one) for one in report.sinks],
    )
    if report.sources:
        show_table(
            ["sink", "verdict", "decided", "source", "what was read again"],
            [_source_row(one) for one in report.sources],
        )
    told = [(one.sink, one.differences) for one in report.sinks]
    told += [(one.sink, one.differences) for one in report.sources]
    for sink, differences in told:
        for difference in differences:
            say(f"{sink}: {difference}")
    say(f"source: {report.source}")


def _row(one: SinkAudit) -> list[str]:
    return [one.sink, one.verdict, number(one.decided_rows), number(one.visible_rows), one.because]


def _source_row(one: SourceAudit) -> list[str]:
    return [one.sink, one.verdict, number(one.decided_rows), number(one.source_rows), one.because]
