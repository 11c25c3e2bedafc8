"""One tree of errors, sorted by what the caller may do next.

An error states the fact with its values; its hint is the way out. Errors cross from executors to
the driver, as pickles or as one line of text in somebody else's traceback, and keep their class.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import ClassVar

from epochal.terms import Outcome

_WIRE_MARK = "epochal-error: "


class EpochalError(Exception):
    """The root: every error of this package has a code, a message and perhaps a hint."""

    code: ClassVar[str] = "epochal"
    outcome: ClassVar[Outcome] = Outcome.FATAL
    exit_code: ClassVar[int] = 1

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message, hint)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        text = f"{self.message} [{self.code}]"
        return f"{text}\nhint: {self.hint}" if self.hint else text

    def to_line(self) -> str:
        """This error as one line of text, for channels that carry nothing else."""
        return _WIRE_MARK + json.dumps([self.code, self.message, self.hint])


class TryAgain(EpochalError):
    """Nothing happened. The same call may be made again."""

    code = "try-again"
    outcome = Outcome.RETRYABLE


class Backpressure(TryAgain):
    """The target can't take more now. The epoch was given up; nothing of it became visible."""

    code = "backpressure"


class OutcomeUnknown(EpochalError):
    """It may or may not have happened. Ask for proof before anything that depends on it (I9)."""

    code = "outcome-unknown"
    outcome = Outcome.RETRYABLE
    exit_code = 3


class Unsettled(OutcomeUnknown):
    """An epoch is decided and not yet carried out everywhere. The next start goes on with it."""

    code = "unsettled"
    outcome = Outcome.FATAL


class PreparedLost(EpochalError):
    """
    The target proves that it threw prepared rows of a decided epoch away: write them again.

    `shows_none`: no row of the epoch is visible at the target, and what is left of it can't become
    visible without the lost part. All of it is then written again, in any partitions.
    """

    code = "prepared-lost"

    def __init__(
        self,
        message: str,
        hint: str = "",
        handles: tuple[str, ...] = (),
        shows_none: bool = False,
    ) -> None:
        super().__init__(message, hint)
        self.args = (message, hint, handles, shows_none)
        self.handles = handles
        self.shows_none = shows_none


class Fenced(EpochalError):
    """A newer driver has taken over. Stop, and don't restart this one."""

    code = "fenced"
    exit_code = 4


class Misconfigured(EpochalError):
    """A person must change something before this can work."""

    code = "misconfigured"


def not_installed(part: str, package: str | None, extra: str) -> Misconfigured:
    """The error of a part whose extra is not installed."""
    return Misconfigured(
        f"{part} can't run without {package}, which is not installed",
        f'pip install "epochal[{extra}]"',
    )


class Refused(Misconfigured):
    """A start that would lose, repeat or mix rows: the log and the start differ (I10)."""

    code = "refused"


class WentBack(Refused):
    """
    A target that has lost epochs which were committed there: it was restored, or a replica that
    lagged behind took over. Nothing is written or aborted there until a person has decided.
    """

    code = "went-back"

    def __init__(self, message: str, hint: str = "", sink: str = "") -> None:
        super().__init__(message, hint)
        self.args = (message, hint, sink)
        self.sink = sink


class GateRefused(Misconfigured):
    """A gate said no. The epoch was aborted and nothing became visible."""

    code = "gate-refused"


class RowRejected(Misconfigured):
    """The target will never take these rows as they are."""

    code = "row-rejected"


class TaskFailed(EpochalError):
    """A task failed by something that is not ours: the query's own code, a lost executor or JVM."""

    code = "task-failed"


class InvariantBroken(EpochalError):
    """Our bug, or a log that somebody else wrote to. Stop writing."""

    code = "invariant-broken"


class IllegalMove(InvariantBroken):
    """A phase was asked to change in a way that the transition table does not have."""

    code = "illegal-move"


class CorruptRecord(InvariantBroken):
    """A record of the epoch log is torn, truncated, foreign, or from a newer release."""

    code = "corrupt-record"


def copy_at_work(fact: str) -> Refused:
    """
    For a target whose ledger has an epoch under handles that the epoch log in use never made. To a
    driver that was superseded its successor looks the same: the coordinator asks the log.
    """
    return Refused(
        f"{fact}: a copy of this epoch log is at work at this target, or the log was restored from "
        "an old backup",
        "stop one of the two for good: `driver` in `epochal status` says where each runs. A copy "
        "that is to live on beside the original is moved to a path of its own and gets a uid of "
        "its own (`epochal fork`) before it starts. An epoch that is decided here is given up on "
        "this sink (`epochal resolve give-up`) if its rows are at the target",
    )


def require_still_committed(sink: str, committed: int | None, *, proven: int | None) -> None:
    """
    Raise `WentBack` where a target proves less than what was committed there, which is
    `Begin.newest_committed`. The coordinator adds what is missing and the ways out.
    """
    if committed is not None and (proven is None or proven < committed):
        raise WentBack(
            f"sink {sink!r} does not prove epoch {committed}, which was committed there",
            "the target was restored, or a replica that lagged behind took over",
            sink,
        )


@dataclass(slots=True)
class Problems:
    """Collects everything that is wrong, each with its way out, for one error."""

    facts: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    def add(self, fact: str, hint: str) -> None:
        self.facts.append(fact)
        if hint not in self.hints:
            self.hints.append(hint)

    def raise_if_any(self, where: str) -> None:
        if self.facts:
            raise Misconfigured(f"{where}: " + "; ".join(self.facts), "; ".join(self.hints))


def require_known_format(what: str, found: object, known: int) -> None:
    """Refuse what a newer release wrote, with its number, before anything in it is believed."""
    if isinstance(found, int) and 1 <= found <= known:
        return
    if isinstance(found, int) and found > known:
        raise CorruptRecord(
            f"{what}: format {found}, this release reads up to {known}",
            "a newer release of epochal wrote it: run that release or a later one",
        )
    raise CorruptRecord(
        f"{what}: {found!r} is not the number of a format",
        "it was cut short or changed by hand: restore it from a backup",
    )


def outcome_of(error: BaseException) -> Outcome:
    """How to go on after `error`. An `OSError` of a driver library may be transient."""
    if isinstance(error, EpochalError):
        return error.outcome
    return Outcome.RETRYABLE if isinstance(error, (OSError, TimeoutError)) else Outcome.FATAL


def from_text(text: str) -> EpochalError | None:
    """The first error of ours that a longer text (a traceback of a task, say) carries."""
    start = text.find(_WIRE_MARK)
    if start < 0:
        return None
    line = text[start + len(_WIRE_MARK) :].split("\n", 1)[0]
    try:
        (code, message, hint), _ = json.JSONDecoder().raw_decode(line)
    except (TypeError, ValueError):
        return None
    kind = next((known for known in error_classes() if known.code == code), EpochalError)
    return kind(message, hint)


def error_classes(root: type[EpochalError] = EpochalError) -> Iterator[type[EpochalError]]:
    """Every class of the tree, from its root down."""
    yield root
    for child in root.__subclasses__():
        yield from error_classes(child)
