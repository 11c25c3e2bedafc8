"""The arguments that verbs share, and the output of reports."""

from __future__ import annotations

import getpass
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from epochal.protocol.admission import Unfinished
from epochal.reports import to_json
from epochal.reports.model import StandbyReport

EXIT_FAILED = 1
EXIT_IN_DOUBT = 3

Target = Annotated[
    str,
    typer.Argument(
        metavar="PIPELINE",
        help="The pipeline: module:object, its YAML file, or its checkpoint (the log only).",
    ),
]
Named = Annotated[
    str,
    typer.Argument(metavar="PIPELINE", help="The pipeline: module:object or its YAML file."),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        help="The location of the log, if the pipeline does not declare it: the checkpoint, the "
        "folder of a once-only load, or the log of a session."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a versioned JSON object on stdout.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]
UnfinishedBatch = Annotated[
    Unfinished,
    typer.Option(
        help="A batch that other code planned and did not finish: `skip` it if its rows are in "
        "the targets, `redo` it if not."
    ),
]
TakeOver = Annotated[
    bool,
    typer.Option(
        "--take-over", help="Proceed if a driver seems to be running: it is fenced and stops."
    ),
]

# Of servers
Port = Annotated[int, typer.Option(help="0 takes a free port and prints it.")]
Certificate = Annotated[Path | None, typer.Option(help="TLS: the certificate, PEM.")]
CertificateKey = Annotated[Path | None, typer.Option(help="TLS: its key, PEM.")]
ClientCa = Annotated[
    Path | None, typer.Option(help="TLS: require client certificates signed by this CA, PEM.")
]

_PIPED_COLUMNS = 10_000
_LAST_COLUMNS_MIN = 24
_STYLES = {
    **dict.fromkeys(["ok", "committed", "agrees"], "green"),
    **dict.fromkeys(["retrying", "gone", "aborted"], "yellow"),
    **dict.fromkeys(["lost", "in doubt", "unreadable", "failed", "differs"], "bold red"),
}
"""Colours of words that say it themselves. Rich shows none where NO_COLOR is set, or in a pipe."""
_GAP = 2
_MINUTE_S = 60.0
_HOUR_S = 3600.0
_DAY_S = 86400.0


def print_address(address: str) -> None:
    """Of a server that is ready."""
    sys.stderr.write(f"ready at {address}, Ctrl-C stops it\n")
    sys.stderr.flush()


def show_json(report: object) -> None:
    sys.stdout.write(json.dumps(to_json(report), ensure_ascii=False) + "\n")


def show_table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, optional: Sequence[str] = ()
) -> None:
    """
    Print a table without truncating cells. On a terminal that is too narrow, columns of `optional`
    are left out, the first one first, until the rest fits. Only the last column wraps.
    """
    rows = [list(row) for row in rows]
    columns = Console().width if sys.stdout.isatty() else _PIPED_COLUMNS
    needed = {
        name: max(map(cell_len, cells)) + _GAP
        for name, *cells in zip(head, head, *rows, strict=True)
    }
    # The last column wraps between words.
    words = [cell_len(word) for row in rows for word in row[-1].split()]
    needed[head[-1]] = min(needed[head[-1]], max(_LAST_COLUMNS_MIN, *words, 0) + _GAP)
    left_out: list[str] = []
    for name in optional:
        if sum(needed.values()) > columns:
            left_out.append(name)
            del needed[name]
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    for name in needed:
        table.add_column(name, no_wrap=name != head[-1])
    for row in rows:
        cells = [cell for name, cell in zip(head, row, strict=True) if name in needed]
        table.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in cells))
    width = max(columns, sum(needed.values()))
    Console(width=width, highlight=False).print(table, soft_wrap=True)
    if left_out:
        message(f"left out on this narrow terminal: {', '.join(left_out)}; --json shows all")


def message(text: str) -> None:
    """Print a message for people to stderr."""
    sys.stderr.write(f"{text}\n")


def lines(text: Iterable[str]) -> None:
    """Print lines of data to stdout."""
    for line in text:
        sys.stdout.write(f"{line}\n")


def person() -> str:
    """Return the user's name, for the log."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown user"


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


def standby_lines(standbys: Sequence[StandbyReport]) -> list[str]:
    """Who works and who waits, and since when."""
    return [
        f"standby: {one.role} since {moment(one.since)}: {one.driver}; lease at {one.lease}"
        for one in standbys
    ]
