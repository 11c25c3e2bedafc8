"""
The health of a pipeline: one word with its cause, derived here and nowhere else.

`epochal status`, the console, the metrics of driver and console, alerts and exit codes all use it.
The facts come from the epoch log and the driver's heartbeat; no target is queried.

    the log has a decided epoch, some of its sinks are not known to be committed
        a driver that runs          no attempt failed            working
                                    one failed, or none answers  retrying
                                    it has given up              in doubt
        none runs                                                in doubt
    the target threw rows of it away, or has lost settled epochs  lost
    nothing is pending
        a driver that runs          in an epoch                  working
                                    between two                  ok
        none runs                   it was asked to stop         stopped
                                    it failed, or was killed     gone

The log alone does not show that the newest epoch is settled: that is written with the decision of
the next one. The heartbeat shows it, so that a driver which is killed while idle is `gone`, and
not `in doubt`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType

from epochal.coordinator import Trouble
from epochal.errors import PreparedLost, WentBack
from epochal.protocol.machine import Phase
from epochal.telemetry.history import Live
from epochal.terms import EpochNumber, SinkName, quantity

ANSWER_MAX_S = 30.0
"""A commit that has neither failed nor ended for so long is shown as retrying."""

_RESTING = frozenset({Phase.IDLE.value, Phase.COMMITTED.value, Phase.ABORTED.value})


class Liveness(Enum):
    """Whether a driver is running, as far as can be known from here."""

    STOPPED = "stopped"
    """The last driver stopped cleanly."""
    ALIVE = "alive"
    """Its heartbeat is seconds old, or its process exists."""
    GONE = "gone"
    """Its process does not exist any more, or it ended and did not stop cleanly."""
    SILENT = "silent"
    """Its heartbeat is overdue."""
    UNKNOWN = "unknown"
    """It was started on another machine, and there is no heartbeat."""


class Health(Enum):
    """In the order in which a person should look at them."""

    LOST = "lost"
    IN_DOUBT = "in doubt"
    RETRYING = "retrying"
    UNREADABLE = "unreadable"
    GONE = "gone"
    COPY = "copy"
    WORKING = "working"
    OK = "ok"
    STOPPED = "stopped"

    @property
    def rank(self) -> int:
        return list(Health).index(self)

    @property
    def is_bad(self) -> bool:
        """Somebody waits for something, and should know why."""
        return MEANINGS[self].exit_code != 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    means: str
    blocks: str = "nothing"
    to_do: str = "nothing"
    exit_code: int = 0
    """Of `epochal status`, where no pipeline has a higher one."""
    alert: str = ""
    """The rule in `alerts.yaml` that fires; empty where none does."""


MEANINGS: Mapping[Health, Meaning] = MappingProxyType(
    {
        Health.LOST: Meaning(
            means="a target proved that it no longer has rows which were decided, or even settled",
            blocks="no later epoch begins; readers of that target miss these rows",
            to_do="thrown away after the decision: start the pipeline, the epoch is replayed and "
            "written again if its rows are the same. Went back in time: `epochal repair`, or "
            "`epochal resolve accept`",
            exit_code=3,
            alert="EpochalRowsLost",
        ),
        Health.IN_DOUBT: Meaning(
            means="an epoch is decided, a sink is not known to have committed it, and no driver is "
            "at it; or a target holds prepared work that only a person may settle",
            blocks="no later epoch begins; open Kafka transactions hold read_committed consumers "
            "back, prepared database transactions hold locks (`epochal doctor` lists them)",
            to_do="start the pipeline, or `epochal recover`: either commits the epoch",
            exit_code=3,
            alert="EpochalInDoubt",
        ),
        Health.RETRYING: Meaning(
            means="an epoch is decided, and a target does not take it: the driver asks again until "
            "`commit_retry_max_s` is over",
            blocks="no later epoch begins; rows of this one are visible only at the sinks that are "
            "done",
            to_do="repair the target; the driver goes on by itself",
            exit_code=3,
            alert="EpochalRetrying",
        ),
        Health.UNREADABLE: Meaning(
            means="the epoch log, or a record in it, can't be read",
            blocks="no driver can start; one that runs may go on",
            to_do="follow the hint of the message: a right that is missing, a store that is away, "
            "a record to restore from a backup",
            exit_code=3,
            alert="EpochalLogUnreadable",
        ),
        Health.GONE: Meaning(
            means="the driver failed, was killed or is silent; everything decided is visible",
            blocks="new rows wait in the source",
            to_do="remove the cause, then start the pipeline",
            exit_code=1,
            alert="EpochalDriverGone",
        ),
        Health.COPY: Meaning(
            means="this checkpoint was copied or moved: its log is bound to another place",
            blocks="a start from here is refused",
            to_do="a backup: nothing; after a move: `epochal adopt`; for a copy that lives on: "
            "`epochal fork`",
        ),
        Health.WORKING: Meaning(means="a driver is in the middle of an epoch"),
        Health.OK: Meaning(means="a driver runs, and everything decided is visible"),
        Health.STOPPED: Meaning(
            means="the driver was asked to stop, and everything decided is visible",
            blocks="new rows wait in the source",
            to_do="start the pipeline when it is wanted again; if it is paused, `epochal resume`",
        ),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Pending:
    """A decided epoch, and the sinks of it that the log does not show as committed."""

    epoch: EpochNumber
    decided_at: float
    sinks: Sequence[SinkName]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a pipeline without querying a target."""

    liveness: Liveness
    driver: str
    """The driver, and how its liveness is known."""
    live: Live | None
    """The last heartbeat of the newest generation."""
    pending: Pending | None = None
    copied_from: str = ""
    """The place that the log is bound to, where it was found at another one."""
    pause: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    health: Health
    because: str
    """The cause: where a target does not take rows, what it answered."""
    since: float | None = None


def health_of(facts: Facts, *, now: float) -> Condition:
    if facts.copied_from:
        return Condition(
            health=Health.COPY, because=f"a copy: its log is bound to {facts.copied_from}"
        )
    live, pending = facts.live, _still_pending(facts)
    if live is not None:
        found = _lost(live, pending) or _left_for_a_person(live)
        if found is not None:
            return found
    if pending is not None:
        return _of_decided(pending, facts, now)
    return _of_settled(facts)


def _still_pending(facts: Facts) -> Pending | None:
    pending, live = facts.pending, facts.live
    if pending is None or not pending.sinks:
        return None
    if live is None or live.epoch is None:
        return pending
    # A driver begins no epoch before the one below is committed everywhere.
    is_later = live.epoch > pending.epoch
    is_done = live.epoch == pending.epoch and live.phase == Phase.COMMITTED.value
    return None if is_later or is_done else pending


def _lost(live: Live, pending: Pending | None) -> Condition | None:
    trouble = live.trouble
    if trouble is not None and trouble.code == WentBack.code:
        return Condition(
            health=Health.LOST, because=trouble.message, since=live.entered_at or live.at
        )
    thrown_away = tuple(live.lost) if pending is not None else ()
    if pending is None or not thrown_away:
        return None
    return Condition(
        health=Health.LOST,
        because=f"epoch {pending.epoch} is decided, and {', '.join(thrown_away)} threw its "
        f"prepared rows away [{PreparedLost.code}]",
        since=pending.decided_at,
    )


def _left_for_a_person(live: Live) -> Condition | None:
    left = {name: one for name, one in live.in_doubt.items() if one.left}
    if not left:
        return None
    ages = [one.oldest_since for one in left.values() if one.oldest_since is not None]
    return Condition(
        health=Health.IN_DOUBT,
        because=f"only a person may settle the prepared work at {', '.join(left)}",
        since=min(ages, default=None),
    )


def _of_decided(pending: Pending, facts: Facts, now: float) -> Condition:
    live, waits = facts.live, ", ".join(pending.sinks)
    decided = f"epoch {pending.epoch} is decided and not committed on {waits}"
    if facts.liveness is not Liveness.ALIVE or live is None or live.phase == Phase.FAILED.value:
        trouble = None if live is None else live.trouble
        because = f"{decided}: {facts.driver}" if trouble is None else _text(trouble)
        return Condition(health=Health.IN_DOUBT, because=because, since=pending.decided_at)
    if live.retrying:
        return _of_retries(live, now)
    waited_s = now - (live.entered_at or pending.decided_at)
    if waited_s >= ANSWER_MAX_S:
        return Condition(
            health=Health.RETRYING,
            because=f"{decided}: no answer for {waited_s:.0f} s",
            since=pending.decided_at,
        )
    return Condition(
        health=Health.WORKING,
        because=f"epoch {pending.epoch} is decided; the driver is committing it",
        since=pending.decided_at,
    )


def _of_retries(live: Live, now: float) -> Condition:
    sink, retry = min(live.retrying.items(), key=lambda pair: pair[1].since)
    others = len(live.retrying) - 1
    left_s = max(0.0, retry.until - now)
    return Condition(
        health=Health.RETRYING,
        because=f"sink {sink}{f' and {others} more' if others else ''}: {_text(retry.trouble)}; "
        f"epoch {live.epoch} is decided, {quantity(retry.attempts, 'attempt')} failed, the driver "
        f"gives up in {left_s:.0f} s",
        since=retry.since,
    )


def _of_settled(facts: Facts) -> Condition:
    live = facts.live
    has_ended = facts.liveness is Liveness.STOPPED or (live is not None and live.every_s == 0.0)
    if has_ended and live is not None and live.trouble is not None:
        return Condition(health=Health.GONE, because=_text(live.trouble), since=live.at)
    if facts.liveness is Liveness.STOPPED:
        because = facts.pause or facts.driver
        return Condition(health=Health.STOPPED, because=because, since=live.at if live else None)
    if facts.liveness in {Liveness.GONE, Liveness.SILENT}:
        return Condition(
            health=Health.GONE, because=facts.driver, since=None if live is None else live.at
        )
    if live is None or live.phase in _RESTING:
        return Condition(
            health=Health.OK, because=facts.driver, since=None if live is None else live.entered_at
        )
    return Condition(
        health=Health.WORKING,
        because=f"epoch {live.epoch}, {live.phase}",
        since=live.entered_at,
    )


def _text(trouble: Trouble) -> str:
    return f"{trouble.message} [{trouble.code}]"
