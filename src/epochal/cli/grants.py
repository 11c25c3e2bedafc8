"""`epochal grants`: the least that each target must grant."""

from __future__ import annotations

from epochal.assembly import reach
from epochal.cli.showing import AsJson, Named, lines, say, show_json
from epochal.reports.granting import grants as grants_of


def grants(pipeline: Named, is_json: AsJson = False) -> None:
    """
    Print the statements, ACLs and policies that give each sink the least it needs.

    Asks no target: what is declared is enough.

    Example: epochal grants jobs.orders:pipeline
    """
    report = grants_of(reach(pipeline))
    if is_json:
        show_json(report)
        return
    for sink, statements in report.sinks.items():
        say(f"-- {sink}")
        lines(statements)
    for sink, why in report.unknown.items():
        say(f"-- {sink}: {why}")
