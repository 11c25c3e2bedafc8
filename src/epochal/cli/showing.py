"""What the verbs share: their arguments, and how a report goes to stdout."""

from __future__ import annotations

import getpass
import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from epochal.reports import to_json

EXIT_FAILED = 1
EXIT_IN_DOUBT = 3

Target = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE",
        help="A pipeline: module:object, its YAML file, or its checkpoint (then the log alone).",
    ),
]
Named = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE", help="A pipeline whose targets are reached: module:object or YAML."
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        help="Where its log is, if the pipeline does not declare it: the checkpoint, the folder of "
        "a once-only load, or the log of a session."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, with a version.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; do nothing.")]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over", help="Also where a driver seems to be at work: it is fenced and stops."
    ),
]

_PIPED_COLUMNS = 10_000
_GAP = 2
_MINUTE_S = 60.0
_HOUR_S = 3600.0
_DAY_S = 86400.0


def show_json(report: object) -> None:
    sys.stdout.write(json.dumps(to_json(report), ensure_ascii=False) + "\n")


def show_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """A plain table of which nothing is cut: a terminal that is too narrow breaks its lines."""
    table = Table(*head, box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*row)
    Console(width=_columns_for(table), highlight=False).print(table, soft_wrap=True)


def _columns_for(table: Table) -> int:
    if not sys.stdout.isatty():
        return _PIPED_COLUMNS
    # Measured without the padding that the last column is then given all the same.
    narrowest = Console(width=_PIPED_COLUMNS).measure(table).minimum + _GAP
    return max(Console().width, narrowest)


def say(text: str) -> None:
    """Talk, which is not data."""
    sys.stderr.write(f"{text}\n")


def lines(told: Iterable[str]) -> None:
    for line in told:
        sys.stdout.write(f"{line}\n")


def person() -> str:
    """Who speaks, for the log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "somebody without a name"


def age(seconds: float | None) -> str:
    if seconds is None:
        return ""
    for unit_s, unit in ((_DAY_S, "d"), (_HOUR_S, "h"), (_MINUTE_S, "min")):
        if seconds >= unit_s:
            return f"{seconds / unit_s:.1f} {unit}"
    return f"{seconds:.0f} s"


def moment(at: float | None) -> str:
    if at is None:
        return ""
    return time.strftime("%Y-%m-%d %H:%M:%SZ", time.gmtime(at))


def number(value: int | None) -> str:
    return "" if value is None else f"{value:,}"
