"""
The pictures of docs/concepts/architecture.md as SVG, from the transition table and the layers.

Each text below is kept by a phase or a package; a phase that the table gains, or a package that
the layers gain, has no text, and drawing fails until it has one. `make docs` writes the pictures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape

from epochal.protocol.machine import DECIDED_PHASES, TABLE, Move, Phase

_INK, _FAINT, _LINE, _PAPER = "#1f2933", "#5a6775", "#9aa5b1", "#ffffff"
_BEFORE, _AFTER, _PLAIN = "#fdf0dc", "#dff3e4", "#eef1f6"
_BEFORE_LINE, _AFTER_LINE, _DECISION = "#b7791f", "#2f855a", "#3949ab"
_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
_WIDE_PX = 0.56
"""The width of a letter, as a part of its height: what lines are broken by."""


@dataclass(slots=True)
class Drawing:
    """Shapes and texts, collected as SVG elements."""

    width: int
    height: int
    title: str
    elements: list[str] = field(default_factory=list)

    def box(
        self, x: float, y: float, width: float, height: float, *, fill: str, line: str = _LINE
    ) -> None:
        self.elements.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            f'fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: int = 13,
        colour: str = _INK,
        anchor: str = "start",
        bold: bool = False,
    ) -> None:
        weight = ' font-weight="600"' if bold else ""
        self.elements.append(
            f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{colour}" '
            f'text-anchor="{anchor}"{weight}>{escape(text)}</text>'
        )

    def lines(self, x: float, y: float, width: float, text: str, *, size: int = 12) -> None:
        """A text, broken into lines that fit the width."""
        for at, line in enumerate(_broken(text, int(width / (size * _WIDE_PX)))):
            self.text(x, y + at * (size + 4), line, size=size)

    def arrow(self, *points: tuple[float, float], colour: str = _FAINT, dash: bool = False) -> None:
        path = " ".join(f"{'L' if at else 'M'}{x:g} {y:g}" for at, (x, y) in enumerate(points))
        dashed = ' stroke-dasharray="5 4"' if dash else ""
        self.elements.append(
            f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="1.6"{dashed} '
            f'marker-end="url(#tip)"/>'
        )

    def svg(self) -> str:
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img" font-family="{_FONT}">'
        )
        tip = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0 8 4 0 8z" '
            f'fill="{_FAINT}"/></marker></defs>'
        )
        paper = (
            f'<rect width="{self.width}" height="{self.height}" rx="10" fill="{_PAPER}" '
            f'stroke="#d9dee5"/>'
        )
        title = f"<title>{escape(self.title)}</title>"
        return "\n".join([head, title, tip, paper, *self.elements, "</svg>"]) + "\n"


def _broken(text: str, letters_max: int) -> Iterable[str]:
    line = ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > letters_max:
            yield line
            line = word
        else:
            line = f"{line} {word}".strip()
    yield line


def main_path() -> list[Phase]:
    """The phases from the start of an epoch to its end, by the moves that only go forward."""
    path = [TABLE[Phase.IDLE, Move.BEGIN]]
    while path[-1] is not Phase.COMMITTED:
        forward = [
            after
            for (before, move), after in TABLE.items()
            if before is path[-1] and move not in {Move.ABORT, Move.FAIL}
        ]
        (following,) = forward
        path.append(following)
    return path


def _move_between(before: Phase, after: Phase) -> str:
    return next(move.value for (phase, move), to in TABLE.items() if (phase, to) == (before, after))


def _colours(phase: Phase) -> tuple[str, str]:
    if phase in DECIDED_PHASES:
        return _AFTER, _AFTER_LINE
    return _BEFORE, _BEFORE_LINE


# An epoch's timeline

LANES = ("Spark driver", "tasks, on executors", "epoch log", "targets")
STEPS: Mapping[Phase, Sequence[str]] = {
    Phase.ACTIVE: (
        "begin: only the last epoch again, or the next one",
        "",
        "the newest record is this driver's",
        "asked what they prove, compared with the log",
    ),
    Phase.PREPARING: (
        "starts a Spark job per sink",
        "write rows, prepare them, return a receipt per attempt",
        "",
        "rows are durable, no reader sees them",
    ),
    Phase.PREPARED: (
        "rehearses every sink, asks the gates",
        "",
        "",
        "the last chance to refuse: constraints, missing files",
    ),
    Phase.DECIDED: (
        "appends COMMIT with the receipts of one attempt per task",
        "",
        "one record, written once: the commit point",
        "",
    ),
    Phase.COMMITTING: (
        "commits every sink in parallel, retries",
        "",
        "sinks that are done, if another is late",
        "publish rows and their proof in one act",
    ),
    Phase.COMMITTED: (
        "returns to Spark, which records the batch",
        "",
        "settled: written with the next decision",
        "every row is visible once",
    ),
}
"""What each of LANES does in a phase; empty where it does nothing."""


def timeline() -> str:
    path = main_path()
    left, top, column, row = 108, 92, 150, 92
    drawing = Drawing(left + column * len(path) + 14, top + row * len(LANES) + 58, "An epoch")
    drawing.text(16, 30, "One epoch, from begin to committed", size=17, bold=True)
    for at, title in enumerate(LANES):
        y = top + at * row
        drawing.elements.append(
            f'<path d="M12 {y} H{drawing.width - 12}" stroke="#e4e8ee" stroke-width="1"/>'
        )
        for below, word in enumerate(_broken(title, 10)):
            drawing.text(16, y + 28 + below * 17, word, bold=True)
    for at, phase in enumerate(path):
        x = left + at * column
        fill, line = _colours(phase)
        drawing.box(x + 4, 46, column - 8, 32, fill=fill, line=line)
        drawing.text(x + column / 2, 67, phase.value, anchor="middle", size=14, bold=True)
        for lane, does in enumerate(STEPS[phase]):
            if does:
                y = top + lane * row
                is_decision = (phase, LANES[lane]) == (Phase.DECIDED, "epoch log")
                drawing.box(
                    x + 4,
                    y + 7,
                    column - 8,
                    row - 14,
                    fill=fill,
                    line=_DECISION if is_decision else line,
                )
                drawing.lines(x + 13, y + 27, column - 24, does)
    decided = left + path.index(Phase.DECIDED) * column
    bottom = top + row * len(LANES)
    drawing.elements.append(
        f'<path d="M{decided} 40 V{bottom + 8}" stroke="{_DECISION}" stroke-width="2.5"/>'
    )
    for middle, text, colour in (
        (left + (decided - left) / 2, "a crash here: everything is thrown away", _BEFORE_LINE),
        ((decided + drawing.width) / 2, "a crash here: everything is repeated", _AFTER_LINE),
    ):
        drawing.text(middle, bottom + 34, text, anchor="middle", size=14, colour=colour, bold=True)
    return drawing.svg()


# The phases and their moves

_PLACES: Mapping[Phase, tuple[int, int]] = {
    Phase.IDLE: (0, 0),
    Phase.ACTIVE: (1, 0),
    Phase.PREPARING: (2, 0),
    Phase.PREPARED: (3, 0),
    Phase.DECIDED: (4, 0),
    Phase.COMMITTING: (5, 0),
    Phase.COMMITTED: (6, 0),
    Phase.ABORTING: (2, 2),
    Phase.ABORTED: (1, 2),
    Phase.FAILED: (5, 2),
}
_CELL = (158, 84)
_BOX = (100, 36)


def _corner(phase: Phase) -> tuple[float, float]:
    column, row = _PLACES[phase]
    return 20 + column * _CELL[0], 84 + row * _CELL[1]


def phases() -> str:
    drawing = Drawing(7 * _CELL[0], 340, "The phases of an epoch")
    for (before, move), after in TABLE.items():
        _draw_move(drawing, before, move, after)
    for phase in Phase:
        x, y = _corner(phase)
        fill, line = (_PLAIN, _LINE) if phase is Phase.IDLE else _colours(phase)
        drawing.box(x, y, *_BOX, fill=fill, line=line)
        drawing.text(x + _BOX[0] / 2, y + 23, phase.value, anchor="middle", bold=True)
    for x, fill, line, text in (
        (20, _BEFORE, _BEFORE_LINE, "can be thrown away"),
        (200, _AFTER, _AFTER_LINE, "decided: can only be repeated"),
    ):
        drawing.box(x, 306, 16, 16, fill=fill, line=line)
        drawing.text(x + 24, 319, text, size=12)
    return drawing.svg()


def _draw_move(drawing: Drawing, before: Phase, move: Move, after: Phase) -> None:
    (x0, y0), (x1, y1) = _corner(before), _corner(after)
    width, height = _BOX
    if y0 == y1 and x1 - x0 == _CELL[0]:
        points = [(x0 + width, y0 + height / 2), (x1 - 2, y1 + height / 2)]
        label = ((x0 + width + x1) / 2, y0 + height / 2 - 7)
    elif y0 == y1 and x0 - x1 == _CELL[0]:
        points = [(x0, y0 + height / 2), (x1 + width + 2, y1 + height / 2)]
        label = ((x0 + x1 + width) / 2, y0 + height / 2 - 7)
    elif y0 == y1:
        # Over the boxes between the two, the longer the higher.
        up = y0 - (44 if abs(x1 - x0) > 4 * _CELL[0] else 18)
        start, end = x0 + width / 2, x1 + width / 2
        points = [(start, y0), (start, up), (end, up), (end, y1 - 2)]
        label = ((start + end) / 2, up - 5)
    elif move is Move.ABORT:
        aim = x1 + width / 2 + (x0 - x1) / 5
        bend = y0 + height + 34
        points = [(x0 + width / 2, y0 + height), (x0 + width / 2, bend), (aim, bend), (aim, y1 - 2)]
        label = (x0 + width / 2 + 24, y0 + height + 22)
    else:
        is_left = move is not Move.COMMIT
        x = x0 + width / 2 + (-24 if is_left else 24)
        points = [(x, y0 + height), (x, y1 - 2)] if y1 > y0 else [(x, y0), (x, y1 + height + 2)]
        label = (x + (-22 if is_left else 30), (y0 + y1 + height) / 2 + 4)
    drawing.arrow(*points)
    drawing.text(*label, move.value, anchor="middle", size=11, colour=_FAINT)


# Who talks to whom

PROCESSES: Mapping[str, tuple[str, Sequence[str]]] = {
    "driver": ("Spark driver, or a Session", ("spark/", "session.py", "coordinator/", "protocol/")),
    "tasks": (
        "tasks, on executors",
        ("sinks/", "kit/", "kafka/", "arrow_values.py", "row_hash.py"),
    ),
    "log": ("epoch log", ("logs.py", "storage/")),
    "operators": ("operators", ("cli/", "console/", "reports/", "telemetry/")),
    "servers": ("our own servers", ("broker/", "receiver/")),
}
"""The processes of a picture, with the packages that work in them."""
EVERYWHERE = ("registry.py", "config/", "contract.py", "errors.py", "terms.py", "clock.py")
BESIDE = ("testing/", "demo/")
"""Packages that no pipeline runs."""


def who_talks_to_whom(packages: Sequence[str]) -> str:
    placed = [
        *EVERYWHERE,
        *BESIDE,
        *(package for _, inside in PROCESSES.values() for package in inside),
    ]
    if sorted(placed) != sorted(packages):
        lost = ", ".join(sorted(set(packages) ^ set(placed)))
        raise SystemExit(
            f"architecture_pictures: a package without a place, or the reverse: {lost}"
        )
    drawing = Drawing(960, 500, "Who talks to whom")
    drawing.text(16, 30, "Who talks to whom", size=17, bold=True)
    corners = {
        "driver": (330, 60, 270, 118),
        "tasks": (330, 270, 270, 118),
        "log": (34, 60, 190, 118),
        "operators": (34, 270, 190, 118),
        "targets": (706, 170, 220, 118),
        "servers": (706, 356, 220, 92),
    }
    for name, (x, y, width, height) in corners.items():
        title, inside = PROCESSES.get(
            name, ("targets", ("files, object stores, Kafka,", "databases, lakes, HTTP"))
        )
        drawing.box(x, y, width, height, fill=_AFTER if name == "log" else _PLAIN)
        drawing.text(x + 14, y + 26, title, size=14, bold=True)
        joiner = " " if name == "targets" else ", "
        for at, line in enumerate(_broken(joiner.join(inside), int((width - 24) / 7))):
            drawing.text(x + 14, y + 50 + at * 18, line, size=12, colour=_FAINT)
    drawing.arrow((328, 100), (228, 100), colour=_DECISION)
    drawing.text(278, 90, "1 claim, 5 decide", anchor="middle", size=11)
    drawing.arrow((420, 180), (420, 266))
    drawing.text(410, 226, "2 run the batch's rows", anchor="end", size=11)
    drawing.arrow((500, 268), (500, 182))
    drawing.text(510, 226, "4 receipts", size=11)
    drawing.arrow((602, 300), (630, 300), (702, 226))
    drawing.text(610, 322, "3 write,", size=11)
    drawing.text(610, 337, "prepare", size=11)
    drawing.arrow((602, 110), (640, 110), (702, 200))
    drawing.text(612, 92, "5 rehearse  6 commit, prove, abort", size=11)
    drawing.arrow((129, 268), (129, 182), dash=True)
    drawing.text(140, 226, "read; recover, resolve", size=11)
    drawing.arrow((129, 390), (129, 470), (680, 470), (680, 268), (702, 268), dash=True)
    drawing.text(240, 462, "doctor, verify, recover: with the credentials of the pipeline", size=11)
    drawing.arrow((816, 354), (816, 292))
    drawing.text(826, 328, "may be a target", size=11)
    return drawing.svg()


# What a crash leaves behind

LEFT_BEHIND: Mapping[Phase, tuple[str, str, str]] = {
    Phase.ACTIVE: ("nothing", "no", "nothing"),
    Phase.PREPARING: ("of some tasks", "no", "nothing"),
    Phase.PREPARED: ("of all tasks", "no", "nothing"),
    Phase.DECIDED: ("of all tasks", "yes", "nothing yet"),
    Phase.COMMITTING: ("of all tasks", "yes", "some sinks, whole"),
    Phase.COMMITTED: ("none left", "yes", "every sink"),
}
"""Prepared rows, the decision and visible rows, when the driver dies in a phase."""


def crash() -> str:
    path = main_path()
    heads = (
        "the driver dies in",
        "prepared rows",
        "decision in the log",
        "readers see",
        "next start",
    )
    widths = (150, 150, 160, 150, 330)
    drawing = Drawing(sum(widths) + 32, 96 + 44 * len(path), "What a crash leaves behind")
    drawing.text(16, 30, "What a crash leaves behind", size=17, bold=True)
    for head, x in zip(heads, _starts(widths), strict=True):
        drawing.text(x + 10, 62, head, size=12, colour=_FAINT, bold=True)
    for at, phase in enumerate(path):
        y = 74 + at * 44
        fill, line = _colours(phase)
        cells = (phase.value, *LEFT_BEHIND[phase], _next_start(phase))
        drawing.box(16, y, sum(widths), 38, fill=fill, line=line)
        for number, (cell, x) in enumerate(zip(cells, _starts(widths), strict=True)):
            drawing.text(x + 10, y + 24, cell, bold=number == 0)
    return drawing.svg()


def _starts(widths: Sequence[int]) -> list[int]:
    return [16 + sum(widths[:at]) for at in range(len(widths))]


def _next_start(phase: Phase) -> str:
    if LEFT_BEHIND[phase][0] == "nothing":
        return "runs the epoch again"
    if phase not in DECIDED_PHASES:
        return "aborts what is prepared, runs the epoch again"
    if phase is Phase.COMMITTED:
        return "Spark replays the epoch; it is not written again"
    return "commits every sink that has no proof of it yet"


def pictures(packages: Sequence[str]) -> dict[str, str]:
    """Every picture by the name of its file."""
    return {
        "epoch-timeline.svg": timeline(),
        "epoch-phases.svg": phases(),
        "who-talks-to-whom.svg": who_talks_to_whom(packages),
        "crash.svg": crash(),
    }
