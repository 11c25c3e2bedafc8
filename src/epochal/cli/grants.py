"""`epochal grants`: the least privileges that each sink needs."""

from __future__ import annotations

from epochal.cli.output import AsJson, Named, lines, message, show_json
from epochal.config.resolve_target import open_target
from epochal.reports.doctor import grants as grants_of


def grants(pipeline: Named, is_json: AsJson = False) -> None:
    """
    Print the statements, ACLs and policies that grant each sink the least privileges it needs, and
    the commands for a log in etcd.

    No target is queried.

    Example: epochal grants jobs.orders:pipeline
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
