"""Clearing up what no decision names, from what the targets themselves list (I5)."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from epochal.contract import Committer
from epochal.errors import Fenced, InvariantBroken
from epochal.protocol.invariants import require_unnamed
from epochal.protocol.recovery import Judgement, Verdict, judge
from epochal.protocol.state import State
from epochal.terms import NO_ROWS, EpochNumber, InDoubt, Receipt, SinkName

logger = logging.getLogger("epochal")


Note = Callable[[SinkName, Sequence[Judgement], int], None]
"""Told per sink what is in doubt, and how much of it is left for a person."""


def note_nothing(sink: SinkName, judged: Sequence[Judgement], left: int) -> None:
    """Nobody takes notes."""


def sweep(
    committers: Mapping[SinkName, Committer],
    state: State,
    *,
    alarm_s: float,
    note: Note = note_nothing,
) -> tuple[Judgement, ...]:
    """
    Abort what may be aborted; returns what is left for a person.

    The first error is raised once all were asked: what is prepared at one target, and in others'
    way there, does not wait until another one answers.
    """
    left: list[Judgement] = []
    errors: list[Exception] = []
    for sink, committer in committers.items():
        try:
            left += _sweep_one(sink, committer, state, alarm_s=alarm_s, note=note)
        except (Fenced, InvariantBroken):
            raise
        except Exception as error:  # noqa: BLE001  raised below, whatever it is
            errors.append(error)
    for one in left:
        logger.error("%s is left for a person: %s", one.found.name, one.because)
    if errors:
        raise errors[0]
    return tuple(left)


def _sweep_one(
    sink: SinkName, committer: Committer, state: State, *, alarm_s: float, note: Note
) -> list[Judgement]:
    judged = [judge(found, state) for found in committer.in_doubt()]
    _alarm(sink, judged, alarm_s)
    lasting = [one for one in judged if one.verdict is Verdict.LEAVE]
    # Before and after: where an abort fails, all that was found is in doubt still.
    note(sink, judged, len(lasting))
    abort_judged(committer, judged, state)
    note(sink, [one for one in judged if one.verdict is not Verdict.ABORT], len(lasting))
    return lasting


def abort_judged(committer: Committer, judged: Sequence[Judgement], state: State) -> None:
    """Abort those of the verdict ABORT, after one last look that no decision names them (I5)."""
    by_epoch: dict[EpochNumber, list[Receipt]] = defaultdict(list)
    for one in judged:
        handle = one.found.handle
        if one.verdict is not Verdict.ABORT or handle is None:
            continue
        require_unnamed(handle, state.generation, state.named)
        by_epoch[handle.epoch].append(_receipt(one.found))
    for epoch, receipts in by_epoch.items():
        logger.info("epoch %s: aborting %d attempts that no decision names", epoch, len(receipts))
        committer.abort(epoch, receipts)


def _receipt(found: InDoubt) -> Receipt:
    if found.receipt is not None:
        return found.receipt
    if found.handle is None:
        raise ValueError(f"{found.name} has no handle")
    return Receipt(handle=found.handle, fingerprint=NO_ROWS)


def _alarm(sink: SinkName, judged: list[Judgement], alarm_s: float) -> None:
    for one in judged:
        age_s = one.found.age_s
        if age_s is not None and age_s > alarm_s and one.verdict is not Verdict.COMMIT:
            logger.warning(
                "sink %s: %s has been prepared without a decision for %.0f minutes",
                sink,
                one.found.name,
                age_s / 60,
            )
