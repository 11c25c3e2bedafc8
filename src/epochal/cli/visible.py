"""`epochal visible`: up to which epoch each sink shows all rows."""

from __future__ import annotations

from epochal.cli.output import AsJson, Checkpoint, Target, message, number, show_json, show_table
from epochal.reports.visible import visible as visible_of


def visible(pipeline: Target, checkpoint: Checkpoint = None, is_json: AsJson = False) -> None:
    """
    Show up to which epoch all rows are visible, by sink and for all sinks together.

    For jobs that read what the pipeline writes: start them once the epoch they need is visible.
    Targets are asked about the newest epoch that they prove, unless the pipeline is named by its
    checkpoint. Nothing changes.

    Example: epochal visible orders.yaml --json | jq .through
    """
    report = visible_of(pipeline, checkpoint=checkpoint)
    if is_json:
        show_json(report)
        return
    show_table(
        ["sink", "visible through", "not known", "why"],
        [
            [name, number(one.through), number(one.pending), one.because]
            for name, one in report.sinks.items()
        ],
    )
    through = "no epoch yet" if report.through is None else f"epoch {report.through:,}"
    message(f"every sink shows all rows through {through}")
    for name, epochs in report.given_up.items():
        message(f"given up at {name}: {', '.join(map(str, epochs))}")
