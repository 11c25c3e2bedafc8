"""The status of pipelines, from their logs and histories: no target is queried."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, replace

from epochal.coordinator.journal import EpochLog, Numbered, newest_record
from epochal.errors import EpochalError, Refused
from epochal.logs import checkpoint_of
from epochal.protocol.receipts import sum_of
from epochal.protocol.state import RecordKind, State
from epochal.reports.discover import find_logs
from epochal.reports.liveness import driver_report
from epochal.reports.model import (
    AcceptedReport,
    DoubtCount,
    DriverReport,
    GivenUpReport,
    PendingSink,
    PipelineReport,
    RetryReport,
    SinkReport,
    StandbyReport,
    StatusReport,
    UnreadableReport,
    UnsettledReport,
)
from epochal.storage import open_store
from epochal.telemetry.health import MEANINGS, Facts, Liveness, Pending, health_of
from epochal.telemetry.history import Live, history_of
from epochal.telemetry.standby import present_at
from epochal.terms import is_same_place

_BY_HAND = frozenset({RecordKind.ACCEPTED, RecordKind.GAVE_UP, RecordKind.RESOLVED})
_SPARKS_METADATA = "metadata"
"""The file with a query's id in every checkpoint of Spark."""


def status(root: str, *, now: float | None = None) -> StatusReport:
    """Report every pipeline below a root. An unreadable log does not hide the others."""
    pipelines: list[PipelineReport] = []
    unreadable: list[UnreadableReport] = []
    for log in find_logs(root):
        try:
            pipelines.append(pipeline_status(log, now=now))
        except Refused:
            continue  # an empty log: nothing has been started
        except (EpochalError, OSError) as error:
            unreadable.append(unreadable_report(log, error))
        finally:
            log.close()
    if not pipelines and not unreadable:
        raise no_log(root)
    return StatusReport(root=root, pipelines=sorted(pipelines, key=urgency), unreadable=unreadable)


def pipeline_status(log: EpochLog, *, now: float | None = None) -> PipelineReport:
    """Report one pipeline. Raises if its log is empty or can't be read."""
    newest = require_record(log)
    state = newest.record.state
    now = time.time() if now is None else now
    live = live_of(log)
    driver = driver_report(state, live, now=now)
    own = live if live is not None and live.generation == state.generation else None
    own = None if own is None else _before_the_person(newest, own)
    current = None if own is None or _is_behind(own, state) else own
    unsettled = unsettled_report(state, now=now)
    sources = None if own is None else own.sources
    found = health_of(_facts(log, newest, driver, own), now=now)
    last = state.last
    return PipelineReport(
        location=state.location,
        log=log.place,
        pipeline=state.pipeline,
        uid=state.uid,
        run=state.run,
        query_id=state.query_id,
        health=found.health,
        because=found.because,
        since=found.since,
        blocks=MEANINGS[found.health].blocks,
        to_do=MEANINGS[found.health].to_do,
        driver=driver,
        standbys=standby_reports(log),
        last_epoch=None if last is None else last.epoch,
        decided_at=None if last is None else last.decided_at,
        epoch=_epoch(state, current),
        phase=_phase(state, current),
        phase_since=None if current is None else current.entered_at,
        phase_seconds={} if current is None else current.seconds,
        rows_per_s=_while_alive(driver, 0.0 if own is None else own.rows_per_s),
        epochs_per_minute=_while_alive(driver, 0.0 if own is None else own.epochs_per_minute),
        unsettled=unsettled,
        input_rows_per_s=_while_alive(driver, 0.0 if sources is None else sources.rows_per_s),
        behind={} if sources is None else sources.behind,
        retrying=[] if own is None else list(_retries(own)),
        trouble=None if own is None or own.trouble is None else asdict(own.trouble),
        in_doubt=[] if own is None else list(_doubts(own, now)),
        sinks=sink_reports(state),
        given_up=[GivenUpReport(**asdict(one)) for one in state.given_up],
        accepted=[AcceptedReport(**asdict(one)) for one in state.accepted],
        pause=None if state.pause is None else str(state.pause),
        record=newest.number,
        written_at=newest.record.written_at,
    )


def urgency(one: PipelineReport) -> tuple[int, float, str]:
    """Sorts pipelines by what a person should look at first: proven loss, then by age."""
    # The age counts where somebody waits; healthy pipelines are found by name.
    return one.health.rank, (one.since or 0.0) if one.health.is_bad else 0.0, one.pipeline


def standby_reports(log: EpochLog) -> list[StandbyReport]:
    """Who runs as a standby, by the files that they keep beside the log."""
    return [
        StandbyReport(driver=one.driver, role=one.role, since=one.since, lease=one.lease)
        for one in present_at(log)
    ]


def require_record(log: EpochLog) -> Numbered:
    newest = newest_record(log)
    if newest is None:
        raise no_log(log.place)
    return newest


def require_original(log: EpochLog, state: State, *, doing: str, option: str) -> None:
    """
    Refuse to act at targets by the log of a copied checkpoint: it has the uid of the original and
    lacks its later decisions, so that prepared rows of these would count as undecided. `option` is
    that of a person who knows better: a folder may have another path on another machine.
    """
    bound_to = copied_from(log, state)
    if bound_to:
        here = checkpoint_of(log.place)
        raise Refused(
            f"{here} seems to be a copy, as its log is bound to {bound_to}: to {doing} by it could "
            "discard what the original has decided",
            f"name the original; after a move first `epochal adopt {here}`; if it is the same "
            f"folder under another path, {option}. A copy that is not needed is a folder to delete",
        )


def no_log(place: str) -> Refused:
    return Refused(
        f"{place} holds no epoch log",
        "give the checkpoint of a pipeline that was started with epochal before, or a folder "
        "above it",
    )


def live_of(log: EpochLog) -> Live | None:
    """Return the last heartbeat of a driver; None if there is none or it can't be read."""
    try:
        history = history_of(log)
        return None if history is None else history.live()
    except Exception:  # noqa: BLE001  storages raise anything, and a heartbeat is optional
        return None


def unsettled_report(state: State, *, now: float) -> UnsettledReport | None:
    decision = state.unsettled
    if decision is None:
        return None
    return UnsettledReport(
        epoch=decision.epoch,
        decided_at=decision.decided_at,
        age_s=max(0.0, now - decision.decided_at),
        sinks=[
            PendingSink(
                sink=sink,
                receipts=len(some),
                rows=sum_of(some).fingerprint.rows,
                is_done=sink in state.done,
            )
            for sink, some in decision.receipts.items()
        ],
    )


def sink_reports(state: State) -> list[SinkReport]:
    rows = {} if state.last is None else state.last.rows
    reports = []
    for name, described in state.sinks.items():
        counted = state.totals.get(name)
        hashed = None if counted is None else counted.fingerprint.hash_sum
        reports.append(
            SinkReport(
                name=name,
                described=described,
                last_rows=rows.get(name),
                rows=None if counted is None else counted.fingerprint.rows,
                bytes=None if counted is None else counted.bytes,
                hash_sum=hash_hex(hashed),
                since=None if counted is None else counted.since,
            )
        )
    return reports


def hash_hex(hash_sum: int | None) -> str | None:
    return None if hash_sum is None else f"{hash_sum:016x}"


def _facts(
    log: EpochLog,
    newest: Numbered,
    driver: DriverReport,
    live: Live | None,
) -> Facts:
    state = newest.record.state
    decision = state.unsettled
    pending = None
    if decision is not None:
        pending = Pending(
            epoch=decision.epoch, decided_at=decision.decided_at, sinks=tuple(state.pending)
        )
    return Facts(
        liveness=driver.liveness,
        driver=driver.because,
        live=live,
        pending=pending,
        copied_from=copied_from(log, state),
        pause="" if state.pause is None else str(state.pause),
    )


def _before_the_person(newest: Numbered, live: Live) -> Live:
    """The heartbeat without what a person has settled since."""
    if newest.record.kind in _BY_HAND and newest.record.written_at > live.at:
        return replace(live, trouble=None, lost=(), in_doubt={})
    return live


def copied_from(log: EpochLog, state: State) -> str:
    """
    The place that a log in a checkpoint is bound to, where that is not its own; else empty.

    A log may be kept apart from its checkpoint, at any place: only one that lies in a checkpoint,
    beside Spark's own files, was copied with it.
    """
    folder = checkpoint_of(log.place)
    if folder is None or any(is_same_place(state.location, one) for one in (folder, log.place)):
        return ""
    try:
        names = open_store(folder).names()
    except (EpochalError, OSError):
        return ""
    return state.location if _SPARKS_METADATA in names else ""


def _is_behind(live: Live, state: State) -> bool:
    """Whether the driver has decided a later epoch since this heartbeat."""
    return live.epoch is not None and state.last is not None and live.epoch < state.last.epoch


def _epoch(state: State, live: Live | None) -> int | None:
    if live is not None and live.epoch is not None:
        return live.epoch
    return None if state.last is None else state.last.epoch


def _phase(state: State, live: Live | None) -> str:
    """Return the phase in the heartbeat; the log knows only whether the epoch is settled."""
    if live is not None and live.epoch is not None:
        return live.phase
    if state.last is None:
        return "idle"
    return "committed" if state.unsettled is None else "decided"


def _while_alive(driver: DriverReport, rate: float) -> float:
    return rate if driver.liveness is Liveness.ALIVE else 0.0


def _retries(live: Live) -> Iterator[RetryReport]:
    for sink, one in live.retrying.items():
        yield RetryReport(
            sink=sink,
            attempts=one.attempts,
            since=one.since,
            gives_up_at=one.until,
            code=one.trouble.code,
            message=one.trouble.message,
            hint=one.trouble.hint,
        )


def _doubts(live: Live, now: float) -> Iterator[DoubtCount]:
    for sink, one in live.in_doubt.items():
        since = one.oldest_since
        yield DoubtCount(
            sink=sink,
            count=one.count,
            oldest_age_s=None if since is None else max(0.0, now - since),
            left=one.left,
        )


def unreadable_report(log: EpochLog, error: Exception) -> UnreadableReport:
    return UnreadableReport(
        location=log.place,
        code=getattr(error, "code", type(error).__name__),
        message=getattr(error, "message", str(error)),
        hint=getattr(error, "hint", ""),
    )
