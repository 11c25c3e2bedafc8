"""Text and HTML of a pipeline and its epochs, for notebooks and terminals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from epochal.contract import Sink
from epochal.coordinator import EpochFigures
from epochal.terms import Ability, SinkName, quantity

_EPOCHS_SHOWN = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckReport:
    """What every target of a pipeline can promise."""

    pipeline: str
    abilities: Mapping[SinkName, Sequence[Ability]]
    advice: Sequence[str] = ()
    """Settings of this Spark session that would make epochs faster."""

    def __str__(self) -> str:
        lines = [f"pipeline {self.pipeline!r}: every target answered"]
        for sink, found in self.abilities.items():
            lines.append(f"  {sink}")
            lines += [
                f"    {'yes' if ability.granted else 'no ':3} {ability.name}: {ability.because}"
                for ability in found
            ]
        lines.append(
            "each decided row is in every sink once (calls and callbacks: at least once), an "
            "undecided one in none; across sinks, all or none at rest"
        )
        lines += [f"faster: {advice}" for advice in self.advice]
        return "\n".join(lines)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        rows = [
            (sink, ability.name, "yes" if ability.granted else "no", ability.because)
            for sink, found in self.abilities.items()
            for ability in found
        ]
        advice = "".join(f"<li>faster: {escape(one)}</li>" for one in self.advice)
        return (
            f"<p><b>Pipeline {escape(self.pipeline)}</b>: every target answered</p>"
            + _table(("sink", "ability", "granted", "because"), rows)
            + (f"<ul>{advice}</ul>" if advice else "")
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """The result of a once-only load."""

    run: str
    rows: Mapping[SinkName, int]
    is_repeat: bool
    """It was done before: this call wrote nothing new."""

    def __str__(self) -> str:
        counts = ", ".join(f"{sink}: {quantity(rows, 'row')}" for sink, rows in self.rows.items())
        how = "was done already" if self.is_repeat else "is done"
        return f"run {self.run!r} {how} ({counts})"


class Epochs(tuple[EpochFigures, ...]):
    """Epochs, oldest first; a line each in a terminal, a table in a notebook."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "\n".join(f"epoch {_epoch_line(epoch)}" for epoch in self) or "no epochs yet"

    def _repr_html_(self) -> str:
        if not self:
            return "<p>no epochs yet</p>"
        titles = ("epoch", "phase", "rows", "seconds", "longest phase", "why")
        return _table(titles, map(_epoch_cells, self))


def _table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    def line(kind: str, cells: Sequence[str]) -> str:
        return f"<tr>{''.join(f'<{kind}>{escape(cell)}</{kind}>' for cell in cells)}</tr>"

    return f"<table>{line('th', titles)}{''.join(line('td', row) for row in rows)}</table>"


def _epoch_cells(epoch: EpochFigures) -> tuple[str, ...]:
    longest = max(epoch.seconds.items(), key=lambda one: one[1], default=None)
    return (
        str(epoch.epoch),
        epoch.phase.value,
        ", ".join(f"{name}: {figures.rows:,}" for name, figures in epoch.sinks.items()),
        f"{sum(epoch.seconds.values()):.2f}",
        f"{longest[0].value} {longest[1]:.2f}" if longest else "",
        epoch.trouble.message if epoch.trouble else "",
    )


def in_text(name: str, sinks: Iterable[Sink], status: str, epochs: Sequence[EpochFigures]) -> str:
    lines = [f"Pipeline {name!r}: {status}"]
    lines += [f"  {sink.name} ({_target_of(sink)})" for sink in sinks]
    lines += [f"  epoch {_epoch_line(epoch)}" for epoch in epochs[-_EPOCHS_SHOWN:]]
    return "\n".join(lines)


def in_html(name: str, sinks: Iterable[Sink], status: str, epochs: Sequence[EpochFigures]) -> str:
    html = f"<p><b>Pipeline {escape(name)}</b>: {escape(status)}</p>"
    html += _table(("sink", "target"), [(sink.name, _target_of(sink)) for sink in sinks])
    if epochs:
        html += Epochs(epochs[-_EPOCHS_SHOWN:])._repr_html_()
    return html


def _target_of(sink: Sink) -> str:
    described = sink.describe()
    parts = [str(described[key]) for key in ("kind", "mode", "target") if described.get(key)]
    if sink.where is not None:
        parts.append(f"where {sink.where}")
    return ", ".join(parts)


def _epoch_line(epoch: EpochFigures) -> str:
    spent_s = sum(epoch.seconds.values())
    return f"{epoch.epoch}: {epoch.phase.value}, {quantity(epoch.rows, 'row')}, {spent_s:.2f} s"
