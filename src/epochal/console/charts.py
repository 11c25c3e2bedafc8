"""
Charts as SVG, drawn on the server, so that they need no script.

Colour is never the only mark: phases differ in lightness and have a legend, points have titles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from epochal.reports.model import EpochReport
from epochal.terms import quantity

PHASES = ("active", "preparing", "prepared", "decided", "committing")
"""In the order in which an epoch passes through them."""
_WIDE, _NARROW, _HEIGHT = 720, 400, 150
_LEFT, _BOTTOM, _TOP, _DOT = 46, 20, 8, 3


@dataclass(frozen=True, slots=True)
class Scale:
    top: float

    def y(self, value: float) -> float:
        return _TOP + (_HEIGHT - _TOP - _BOTTOM) * (1 - min(value / self.top, 1.0))


def nice_top(value: float) -> float:
    """Return the next round number above."""
    if value <= 0:
        return 1.0
    unit = 1.0
    while unit * 10 <= value:
        unit *= 10
    while unit > value:
        unit /= 10
    return next(unit * step for step in (1, 2, 5, 10) if unit * step >= value)


def timeline(epochs: Sequence[EpochReport]) -> str:
    """Draw each epoch as a bar of its phases, oldest left."""
    drawn = [one for one in reversed(epochs) if one.seconds]
    if not drawn:
        return ""
    scale = Scale(nice_top(max(sum(one.seconds.values()) for one in drawn)))
    step = (_WIDE - _LEFT) / len(drawn)
    bars = "".join(_bar(one, _LEFT + at * step, step, scale) for at, one in enumerate(drawn))
    return _figure(
        "Seconds of each epoch by phase",
        bars,
        scale,
        drawn,
        shown=seconds_text,
        width=_WIDE,
    )


def _bar(one: EpochReport, x: float, step: float, scale: Scale) -> str:
    pieces, below = [], 0.0
    for phase in (*PHASES, *(name for name in one.seconds if name not in PHASES)):
        spent = one.seconds.get(phase, 0.0)
        if not spent:
            continue
        top, bottom = scale.y(below + spent), scale.y(below)
        pieces.append(
            f'<rect class="phase-{escape(phase)}" x="{x:.1f}" y="{top:.1f}" '
            f'width="{max(step - 1, 1):.1f}" height="{max(bottom - top, 0.4):.1f}"/>'
        )
        below += spent
    parts = ", ".join(f"{phase} {seconds_text(spent)}" for phase, spent in one.seconds.items())
    mark = "" if one.outcome == "committed" else f" ({one.outcome})"
    if mark:
        pieces.append(f'<text class="mark" x="{x + step / 2:.1f}" y="{_TOP + 4}">×</text>')
    title = f"epoch {one.epoch}{mark}: {seconds_text(below)}, {quantity(one.rows, 'row')}; {parts}"
    return f'<g class="bar"><title>{escape(title)}</title>{"".join(pieces)}</g>'


def plot(
    title: str,
    epochs: Sequence[EpochReport],
    value: Callable[[EpochReport], float | None],
    shown: Callable[[float], str],
) -> str:
    """Draw one value of each epoch as a line."""
    drawn = [(one, found) for one in reversed(epochs) if (found := value(one)) is not None]
    if len(drawn) < 2:
        return ""
    scale = Scale(nice_top(max(found for _, found in drawn)))
    step = (_NARROW - _LEFT - _DOT) / (len(drawn) - 1)
    points = [(_LEFT + at * step, scale.y(found)) for at, (_, found) in enumerate(drawn)]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dots = "".join(
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5"><title>epoch {one.epoch}: '
        f"{escape(shown(found))}</title></circle>"
        for (x, y), (one, found) in zip(points, drawn, strict=True)
    )
    body = f'<polyline class="line" points="{line}"/>{dots}'
    return _figure(title, body, scale, [one for one, _ in drawn], shown=shown, width=_NARROW)


def _figure(
    title: str,
    body: str,
    scale: Scale,
    drawn: Sequence[EpochReport],
    *,
    shown: Callable[[float], str],
    width: int,
) -> str:
    base = _HEIGHT - _BOTTOM
    axis = "".join(
        f'<line class="grid" x1="{_LEFT}" x2="{width}" y1="{scale.y(value):.1f}" '
        f'y2="{scale.y(value):.1f}"/><text class="tick" x="{_LEFT - 6}" '
        f'y="{scale.y(value) + 3:.1f}">{escape(shown(value))}</text>'
        for value in (0.0, scale.top / 2, scale.top)
    )
    ends = (
        f'<text class="first" x="{_LEFT}" y="{base + 15}">epoch {drawn[0].epoch}</text>'
        f'<text class="last" x="{width}" y="{base + 15}">{drawn[-1].epoch}</text>'
    )
    return (
        f'<svg viewBox="0 0 {width} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title>{axis}{body}{ends}</svg>"
    )


def seconds_text(value: float) -> str:
    if value == 0:
        return "0"
    return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"


def rows_per_second(one: EpochReport) -> float | None:
    if one.opened_at is None or one.finished_at is None or one.outcome != "committed":
        return None
    return one.rows / max(one.finished_at - one.opened_at, 1e-3)


def seconds_to_commit(one: EpochReport) -> float | None:
    return one.seconds.get("committing") if one.outcome == "committed" else None
