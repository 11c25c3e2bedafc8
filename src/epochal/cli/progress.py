"""What a running pipeline shows: a live table on a terminal, a line an epoch where it is piped."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.live import Live
from rich.table import Table

from epochal.coordinator import EpochFigures
from epochal.protocol.machine import Phase
from epochal.spark.pipeline import Pipeline
from epochal.terms import quantity

_EPOCHS_SHOWN = 8
_EPOCHS_LOOKED_AT = 1000
_RATE_EPOCHS = 20
Show = Callable[[], None]


@contextmanager
def progress_of(pipeline: Pipeline, *, quiet: bool) -> Iterator[Show]:
    """Gives a function that shows how the pipeline stands, to be called now and then."""
    if quiet:
        yield lambda: None
    elif sys.stderr.isatty():
        with Live(console=Console(stderr=True), auto_refresh=False, transient=False) as live:
            yield lambda: live.update(_table(pipeline), refresh=True)
    else:
        yield _Lines(pipeline)


class _Lines:
    """Each epoch that has ended, once."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._told: tuple[float, int] = (0.0, -1)

    def __call__(self) -> None:
        for figures in self._pipeline.last_epochs(_EPOCHS_LOOKED_AT):
            mark = (figures.opened_at, int(figures.epoch))
            if figures.finished_at is not None and mark > self._told:
                self._told = mark
                sys.stderr.write(f"{self._pipeline.name}: {_line(figures)}\n")
        sys.stderr.flush()


def _line(figures: EpochFigures) -> str:
    sinks = ", ".join(
        f"{name} {quantity(sink.rows, 'row')}" for name, sink in figures.sinks.items()
    )
    return f"epoch {figures.epoch} {figures.phase.value} in {_spent(figures)} ({sinks or 'empty'})"


def _spent(figures: EpochFigures) -> str:
    return f"{sum(figures.seconds.values()):.2f} s"


def _table(pipeline: Pipeline) -> Table:
    epochs = pipeline.last_epochs(_RATE_EPOCHS)
    metrics = pipeline.metrics()
    table = Table(
        title=f"{pipeline.name} · {quantity(metrics.commits, 'epoch')}, "
        f"{quantity(metrics.rows, 'row')}, {rate_of(epochs):,.0f} rows/s",
        title_justify="left",
        box=None,
        pad_edge=False,
    )
    for column in ("epoch", "phase", "rows", "prepare", "rehearse", "commit"):
        table.add_column(column, justify="left" if column == "phase" else "right")
    for figures in epochs[-_EPOCHS_SHOWN:]:
        table.add_row(
            str(figures.epoch),
            figures.phase.value,
            str(figures.rows),
            *(_ms(figures, phase) for phase in (Phase.PREPARING, Phase.PREPARED, Phase.COMMITTING)),
        )
    return table


def _ms(figures: EpochFigures, phase: Phase) -> str:
    seconds = figures.seconds.get(phase)
    return "" if seconds is None else f"{seconds * 1000:.0f} ms"


def rate_of(epochs: Sequence[EpochFigures]) -> float:
    """Rows a second over the epochs that are done."""
    done = [one for one in epochs if one.finished_at is not None]
    if not done:
        return 0.0
    first, last = done[0].opened_at, max(one.finished_at or 0.0 for one in done)
    return sum(one.rows for one in done) / max(last - first, 1e-3)
