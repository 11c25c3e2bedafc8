"""`epochal metrics`: the dashboard and the alert rules that ship with the metrics."""

from __future__ import annotations

import sys
from enum import Enum
from importlib.resources import files
from typing import Annotated

import typer

from epochal.cli.output import show_table
from epochal.telemetry.instruments import INSTRUMENTS


class Part(Enum):
    NAMES = "names"
    GRAFANA = "grafana"
    ALERTS = "alerts"


_FILES = {Part.GRAFANA: "grafana.json", Part.ALERTS: "alerts.yaml"}
_LINK = "runbook_url: "


def metrics(
    part: Annotated[
        Part, typer.Argument(help="names, grafana (a dashboard) or alerts (rules).")
    ] = Part.NAMES,
    docs: Annotated[
        str,
        typer.Option(
            metavar="URL",
            help="With alerts: the address of this documentation, for the links to its pages.",
        ),
    ] = "",
) -> None:
    """
    Print the names of all metrics, a Grafana dashboard, or alert rules for Prometheus.

    Example: epochal metrics alerts --docs https://docs.example/epochal > rules/epochal.yaml
    """
    if part in _FILES:
        found = files("epochal.telemetry").joinpath(_FILES[part])
        text = found.read_text(encoding="utf-8")
        base = f"{docs.rstrip('/')}/" if docs else ""
        sys.stdout.write(text.replace(_LINK, f"{_LINK}{base}"))
        return
    show_table(
        ["metric", "kind", "labels", "meaning"],
        [
            [name, one.kind.value, ", ".join(one.labels), one.description]
            for name, one in INSTRUMENTS.items()
        ],
    )
