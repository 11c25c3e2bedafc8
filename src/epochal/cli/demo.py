"""`epochal demo`: exactly-once delivery while the driver is killed repeatedly."""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from epochal.demo.kills import Progress, run_until_drained
from epochal.demo.servers import forget, running_servers
from epochal.demo.workspace import Workspace, write_source
from epochal.errors import Misconfigured
from epochal.terms import quantity

if TYPE_CHECKING:
    from epochal.demo.audit import Verdict

_SEEDS = 10_000

_stderr = Console(stderr=True)


def demo(  # noqa: PLR0917  typer reads the options off the signature
    rows: Annotated[int, typer.Option(min=1, help="Number of rows.")] = 200_000,
    kills: Annotated[int, typer.Option(min=0, help="Number of times the driver is killed.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Number of micro-batches.")] = 20,
    seed: Annotated[
        int | None,
        typer.Option(help="Repeats the kills of an earlier run; default: random."),
    ] = None,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print the audit as a JSON object on stdout.")
    ] = False,
    keep: Annotated[
        Path | None, typer.Option(help="Keep targets, checkpoint and logs in this new folder.")
    ] = None,
    kafka: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Your Kafka instead of the embedded broker."),
    ] = None,
    has_console: Annotated[
        bool,
        typer.Option(
            "--console/--no-console",
            help="Serve the web console on loopback meanwhile.",
        ),
    ] = True,
) -> None:
    """
    Show exactly-once delivery while the driver is killed repeatedly.

    A stream is written to a PostgreSQL table, a Kafka topic and files under one decision. Its
    driver is killed by SIGKILL several times. Then every row is counted by each target's own
    client: none lost, none duplicated, no epoch in one sink and not in another.

    Example: epochal demo --rows 20000 --kills 3
    """
    from epochal.demo.audit import audit  # noqa: PLC0415  pyarrow.dataset loads pandas

    chosen = random.randrange(_SEEDS) if seed is None else seed
    parts = min(epochs, rows)
    with _folder(keep) as root:
        workspace = Workspace(root)
        _stderr.print(
            f"{quantity(rows, 'row')} in {quantity(parts, 'epoch')}, {quantity(kills, 'kill')}, "
            f"seed {chosen}; in {root}"
        )
        write_source(workspace.source, rows=rows, parts=parts)
        started_s = time.monotonic()
        with running_servers(workspace, kafka), _console(workspace, is_wanted=has_console):
            with _display(parts) as show:
                progress = run_until_drained(workspace, kills=kills, seed=chosen, show=show)
            verdict = audit(workspace, rows=rows, parts=parts)
        seconds = time.monotonic() - started_s
    _print_verdict(verdict, progress, seed=chosen, seconds=seconds, is_json=is_json)
    if not verdict.is_clean:
        raise typer.Exit(1)


@contextmanager
def _folder(keep: Path | None) -> Iterator[Path]:
    """Yield the folder of the run: `keep`, which must be new or empty, or a temporary one."""
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise typer.BadParameter(f"{keep} is not empty", param_hint="--keep")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    root = Path(tempfile.mkdtemp(prefix="epochal-demo-"))
    try:
        yield root
    except BaseException as error:
        # If a driver failed, its log explains why: keep the folder.
        if isinstance(error, Misconfigured) or not isinstance(error, Exception):
            _remove(root)
        raise
    _remove(root)


def _remove(root: Path) -> None:
    forget(root / "postgres")
    shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _console(workspace: Workspace, *, is_wanted: bool) -> Iterator[None]:
    """Serve the console of the run; the demonstration runs without it too."""
    if not is_wanted:
        yield
        return
    try:
        from epochal.console.app import served  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        _stderr.print(f'no console: {error.name} is not installed (pip install "epochal[console]")')
        yield
        return
    with served(str(workspace.checkpoint)) as address:
        _stderr.print(f"the console of this run: {address} (Ctrl-C ends both)", soft_wrap=True)
        yield


@contextmanager
def _display(parts: int) -> Iterator[Callable[[Progress], None]]:
    """Show a live table on a terminal; elsewhere print a line per driver and per kill."""
    if not _stderr.is_terminal:
        yield _LinePrinter(parts).show
        return
    with Live(console=_stderr, refresh_per_second=8, transient=True) as live:
        yield lambda progress: live.update(_table(progress, parts))


class _LinePrinter:
    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._printed = (0, 0)

    def show(self, progress: Progress) -> None:
        now = (progress.drivers, progress.kills)
        if now == self._printed:
            return
        if progress.kills > self._printed[1]:
            sys.stderr.write(f"driver {progress.drivers}: {_epoch(progress, self._parts)}: ")
            sys.stderr.write(f"{progress.last_kill}\n")
        else:
            sys.stderr.write(f"driver {progress.drivers}: starting\n")
        self._printed = now


def _table(progress: Progress, parts: int) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    done = max(0, progress.epoch + 1)
    bar = "█" * (30 * done // parts)
    table.add_row("epoch", f"{bar:<30} {_epoch(progress, parts)}")
    table.add_row("step", progress.step)
    table.add_row("driver", str(progress.drivers))
    table.add_row("kills", f"{progress.kills}   {progress.last_kill}")
    return table


def _epoch(progress: Progress, parts: int) -> str:
    return f"epoch {max(0, progress.epoch)} of {parts}"


def _print_verdict(
    verdict: Verdict, progress: Progress, *, seed: int, seconds: float, is_json: bool
) -> None:
    figures: dict[str, object] = {
        **verdict.to_json(),
        "kills": progress.kills,
        "drivers": progress.drivers,
        "seed": seed,
        "seconds": round(seconds, 1),
    }
    if is_json:
        print(json.dumps(figures))
        return
    _stderr.print("the audit: every row of every sink against the source")
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, figure in figures.items():
        table.add_row(
            name.replace("_", " "), f"{figure:,}" if isinstance(figure, int) else str(figure)
        )
    Console().print(table)
    _stderr.print(
        f"every row once in each of {verdict.sinks} sinks, after {quantity(progress.kills, 'kill')}"
        if verdict.is_clean
        else "NOT exactly once: this is a defect; run again with --keep and the same --seed"
    )
