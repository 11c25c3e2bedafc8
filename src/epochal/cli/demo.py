"""`epochal demo`: see exactly-once hold while the driver is killed again and again."""

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
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live
from rich.table import Table

from epochal.demo.audit import Verdict, audit
from epochal.demo.killing import Progress, run_until_drained
from epochal.demo.place import Place
from epochal.demo.servers import forget, running_servers
from epochal.demo.source import write_source
from epochal.terms import quantity

_SEEDS = 10_000

talk = Console(stderr=True)


def demo(  # noqa: PLR0917  typer reads the options off the signature
    rows: Annotated[int, typer.Option(min=1, help="Rows to push through the pipeline.")] = 200_000,
    kills: Annotated[int, typer.Option(min=0, help="How often the driver is killed.")] = 5,
    epochs: Annotated[int, typer.Option(min=1, help="Micro-batches the rows are cut into.")] = 20,
    seed: Annotated[
        int | None, typer.Option(help="Repeats the same killings; chosen and told if not given.")
    ] = None,
    is_json: Annotated[
        bool, typer.Option("--json", help="Print the audit as one JSON object on stdout.")
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
            "--console/--no-console", help="Show the run in a web page on loopback while it lasts."
        ),
    ] = True,
) -> None:
    """
    See exactly-once hold while the driver is killed again and again.

    A stream goes into a PostgreSQL table, a Kafka topic and files under one decision, its driver
    dies by SIGKILL several times, and then every row is counted, by each target's own client: none
    lost, none twice, no epoch in one sink and not in another.
    """
    chosen = random.randrange(_SEEDS) if seed is None else seed
    parts = min(epochs, rows)
    with _room(keep) as root:
        place = Place(root)
        talk.print(
            f"{quantity(rows, 'row')} in {quantity(parts, 'epoch')}, {quantity(kills, 'kill')}, "
            f"seed {chosen}; in {root}"
        )
        write_source(place.source, rows=rows, parts=parts)
        started_s = time.monotonic()
        with running_servers(place, kafka), _console(place, is_wanted=has_console):
            with _display(parts) as show:
                progress = run_until_drained(place, kills=kills, seed=chosen, show=show)
            verdict = audit(place, rows=rows, parts=parts)
        seconds = time.monotonic() - started_s
    _tell(verdict, progress, seed=chosen, seconds=seconds, is_json=is_json)
    if not verdict.is_clean:
        raise typer.Exit(1)


@contextmanager
def _room(keep: Path | None) -> Iterator[Path]:
    """A folder for the run: the user's own and new, or a passing one."""
    if keep is not None:
        if keep.exists() and any(keep.iterdir()):
            raise typer.BadParameter(f"{keep} is not empty", param_hint="--keep")
        keep.mkdir(parents=True, exist_ok=True)
        yield keep.absolute()
        return
    root = Path(tempfile.mkdtemp(prefix="epochal-demo-"))
    try:
        yield root
    except Exception:
        # Kept: after a failure the drivers' log is what one looks for.
        raise
    except BaseException:
        _remove(root)
        raise
    _remove(root)


def _remove(root: Path) -> None:
    forget(Place(root))
    shutil.rmtree(root, ignore_errors=True)


@contextmanager
def _console(place: Place, *, is_wanted: bool) -> Iterator[None]:
    """The run as an operator would see it; a demonstration without it is one all the same."""
    if not is_wanted:
        yield
        return
    try:
        from epochal.console.serving import served  # noqa: PLC0415  an extra
    except ModuleNotFoundError as error:
        talk.print(f'no console: {error.name} is not installed (pip install "epochal[console]")')
        yield
        return
    with served(str(place.checkpoint)) as address:
        talk.print(f"the console of this run: {address} (Ctrl-C ends both)", soft_wrap=True)
        yield


@contextmanager
def _display(parts: int) -> Iterator[Callable[[Progress], None]]:
    """A live table on a terminal; a line for every driver and every kill elsewhere."""
    if not talk.is_terminal:
        yield _LinePrinter(parts).show
        return
    with Live(console=talk, refresh_per_second=8, transient=True) as live:
        yield lambda progress: live.update(_table(progress, parts))


class _LinePrinter:
    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._told = (0, 0)

    def show(self, progress: Progress) -> None:
        now = (progress.drivers, progress.kills)
        if now == self._told:
            return
        if progress.kills > self._told[1]:
            sys.stderr.write(f"driver {progress.drivers}: {_epoch(progress, self._parts)}: ")
            sys.stderr.write(f"{progress.last_kill}\n")
        else:
            sys.stderr.write(f"driver {progress.drivers}: starting\n")
        self._told = now


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


def _tell(
    verdict: Verdict, progress: Progress, *, seed: int, seconds: float, is_json: bool
) -> None:
    figures: dict[str, object] = {
        **verdict.told(),
        "kills": progress.kills,
        "drivers": progress.drivers,
        "seed": seed,
        "seconds": round(seconds, 1),
    }
    if is_json:
        print(json.dumps(figures))
        return
    talk.print("the audit: every row of every sink against the source")
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, figure in figures.items():
        table.add_row(
            name.replace("_", " "), f"{figure:,}" if isinstance(figure, int) else str(figure)
        )
    Console().print(table)
    talk.print(
        f"every row once in each of {verdict.sinks} sinks, after {quantity(progress.kills, 'kill')}"
        if verdict.is_clean
        else "NOT exactly once: this is a defect; run again with --keep and the same --seed"
    )
