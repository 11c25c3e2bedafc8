"""`epochal grants` and `epochal staging`: what an administrator of a target runs for a pipeline."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from epochal.cli.output import AsJson, Named, lines, message, show_json
from epochal.config.resolve_target import open_target, streaming_by
from epochal.reports.doctor import grants as grants_of
from epochal.reports.doctor import staging as staging_of


def grants(pipeline: Named, is_json: AsJson = False) -> None:
    """
    Print the statements, ACLs and policies that grant each sink the least privileges it needs, and
    the commands for a log in etcd.

    No target is queried. Those for a database can be read by its client.

    Example: epochal grants jobs.orders:pipeline

    Example: epochal grants orders.yaml | psql shop
    """
    report = grants_of(open_target(pipeline))
    if is_json:
        show_json(report)
        return
    for sink, statements in report.sinks.items():
        message(f"-- {sink}")
        lines(statements)
    if report.log:
        message("-- the epoch log")
        lines(report.log)
    for sink, why in report.unknown.items():
        message(f"-- {sink}: {why}")


def staging(
    pipeline: Named,
    *,
    stream: Annotated[
        str | None,
        typer.Option(
            help="If the pipeline is not a YAML file: module:function that takes a session and "
            "returns the stream."
        ),
    ] = None,
    is_json: AsJson = False,
) -> None:
    """
    Print the DDL that sinks with staging="fixed" need and that is not run yet: their ledger, their
    staging tables and the rights on these.

    The columns of staging follow from the rows, so Spark is started to analyse the query; no row is
    read. Nothing is changed. What `epochal grants` prints is run first.

    Example: epochal staging orders.yaml > staging.sql
    """
    opened = open_target(pipeline)
    if stream is not None:
        opened = replace(opened, streaming=streaming_by(stream))
    report = staging_of(opened)
    if is_json:
        show_json(report)
        return
    for sink, statements in report.sinks.items():
        message(f"-- {sink}" + ("" if statements else ": all is there"))
        lines(f"{statement};" for statement in statements)
    if not report.sinks:
        message("no sink has staging='fixed'")
