"""`epochal verify`: compare the visible rows, and the source, with the decided totals."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from epochal.cli.output import (
    EXIT_FAILED,
    AsJson,
    Checkpoint,
    Named,
    message,
    number,
    show_json,
    show_table,
)
from epochal.config.resolve_target import OpenedTarget, open_target, streaming_by
from epochal.reports.model import SinkVerification, SourceVerification, VerificationReport
from epochal.reports.verify import verify as verify_now
from epochal.spark.local_session import quiet_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession


def verify(
    pipeline: Named,
    *,
    shared: Annotated[
        list[str] | None,
        typer.Option(help="A sink whose target other programs write to as well; may be repeated."),
    ] = None,
    hashes: Annotated[
        bool,
        typer.Option(
            "--hashes",
            help="Also start a local Spark, read the rows back and compare sums of row hashes.",
        ),
    ] = False,
    source: Annotated[
        bool,
        typer.Option(
            "--source",
            help="Also start Spark, read the source again by the same query, and compare its rows.",
        ),
    ] = False,
    stream: Annotated[
        str | None,
        typer.Option(
            help="For --source, if the pipeline is not a YAML file: module:function that takes a "
            "session and returns the stream."
        ),
    ] = None,
    checkpoint: Checkpoint = None,
    is_json: AsJson = False,
) -> None:
    """
    Compare the rows that readers see in each sink with the totals of all decided epochs.

    Reports what can't be recounted, such as tables that are updated in place, and which part of a
    source can't be read again. Exits with 1 on any difference. May run while a driver is running.

    Example: epochal verify jobs.orders:pipeline --shared audit
    """
    opened = open_target(pipeline, checkpoint=checkpoint)
    if stream is not None:
        opened = replace(opened, streaming=streaming_by(stream))
    with _engine(opened, hashes=hashes, source=source or stream is not None) as engine:
        report = verify_now(
            opened,
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
    """The Spark session and stream that the verification needs, if any."""

    session: SparkSession | None = None
    stream: DataFrame | None = None


@contextmanager
def _engine(opened: OpenedTarget, *, hashes: bool, source: bool) -> Iterator[_Engine]:
    if not (hashes or source):
        yield _Engine()
        return
    streaming = opened.require_streaming() if source else None
    session = (
        quiet_session("epochal verify", threads=2) if streaming is None else streaming.session()
    )
    try:
        stream = None if streaming is None else streaming.stream(session)
        yield _Engine(session=session, stream=stream)
    finally:
        session.stop()


def _show(report: VerificationReport) -> None:
    show_table(
        ["sink", "verdict", "decided", "visible", "what was counted"],
        [_row(one) for one in report.sinks],
    )
    if report.sources:
        show_table(
            ["sink", "verdict", "decided", "source", "what was read again"],
            [_source_row(one) for one in report.sources],
        )
    found = [(one.sink, one.differences) for one in report.sinks]
    found += [(one.sink, one.differences) for one in report.sources]
    for sink, differences in found:
        for difference in differences:
            message(f"{sink}: {difference}")
    message(f"source: {report.source}")


def _row(one: SinkVerification) -> list[str]:
    return [one.sink, one.verdict, number(one.decided_rows), number(one.visible_rows), one.because]


def _source_row(one: SourceVerification) -> list[str]:
    return [one.sink, one.verdict, number(one.decided_rows), number(one.source_rows), one.because]
