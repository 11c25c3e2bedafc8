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


def metrics(
    part: Annotated[
        Part, typer.Argument(help="names, grafana (a dashboard) or alerts (rules).")
    ] = Part.NAMES,
) -> None:
    """
    Print the names of all metrics, a Grafana dashboard, or alert rules for Prometheus.

    Example: epochal metrics alerts > /etc/prometheus/rules/epochal.yaml
    """
    if part in _FILES:
        found = files("epochal.telemetry").joinpath(_FILES[part])
        sys.stdout.write(found.read_text(encoding="utf-8"))
        return
    show_table(
        ["metric", "kind", "labels", "meaning"],
        [
            [name, one.kind.value, ", ".join(one.labels), one.description]
            for name, one in INSTRUMENTS.items()
        ],
    )
