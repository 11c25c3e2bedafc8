"""
The doctor: queries the log, the driver and every target, and lists problems.

For each target: its abilities, its clock, the handles it holds of this pipeline, their age and what
they block. Changes nothing that readers see. Also the privileges that sinks need (`grants`), and
the tables that somebody else makes for them (`staging`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from epochal.config.resolve_target import OpenedTarget
from epochal.contract import Committer, Identified, Sink
from epochal.coordinator.environment import new_uid
from epochal.coordinator.rejected_rows import check_schemas
from epochal.coordinator.targets import by_name
from epochal.errors import EpochalError, Misconfigured, Refused
from epochal.kit.sink_base import Operable
from epochal.kit.sql.table_sink import TableSink
from epochal.logs import StoredLog
from epochal.protocol.admission import is_back, lost_epochs, own_epoch
from epochal.protocol.recovery import Verdict
from epochal.protocol.state import State
from epochal.reports.inspect import (
    AFTER_COMMIT,
    HELD,
    committer_of,
    error_text,
    is_pending_at,
    list_found,
)
from epochal.reports.liveness import driver_report
from epochal.reports.model import (
    DoctorReport,
    DriverReport,
    FoundReport,
    GrantsReport,
    SinkDiagnosis,
    StagingReport,
)
from epochal.reports.status import live_of, require_record, standby_reports
from epochal.spark.projection import arrow_schema, empty_like, project
from epochal.storage import ServedStore
from epochal.telemetry.health import Liveness
from epochal.terms import Ability, Limits, Mark, SinkName, quantity

if TYPE_CHECKING:
    import pyarrow as pa

CLOCK_SKEW_MAX_S = 5.0


def diagnose(opened: OpenedTarget, *, now: float | None = None) -> DoctorReport:
    """Diagnose every sink. A target that fails does not keep the others from being queried."""
    now = time.time() if now is None else now
    state, log_text, log_problems = _log(opened)
    servers = _log_servers(opened)
    driver = None
    if state is not None:
        driver = driver_report(state, live_of(opened.require_log()), now=now)
    identity = state or State(uid=new_uid(), pipeline=opened.pipeline or "", location="")
    sinks = [] if opened.sinks is None else list(by_name(opened.sinks).values())
    is_running = driver is not None and driver.liveness is Liveness.ALIVE
    diagnoses = [_diagnose(sink, identity, state, opened.limits, is_running) for sink in sinks]
    problems = [
        *log_problems,
        *_unsettled(state, driver, diagnoses, now),
        *(f"{one.name}: {one.because}" for one in servers if not one.granted),
        *(problem for one in diagnoses for problem in _problems(one, is_running, opened.limits)),
    ]
    return DoctorReport(
        target=opened.target,
        pipeline=identity.pipeline,
        log=log_text,
        log_servers=servers,
        driver=driver,
        standbys=[] if opened.log is None else standby_reports(opened.log),
        sinks=diagnoses,
        problems=problems,
    )


def _log(opened: OpenedTarget) -> tuple[State | None, str, list[str]]:
    if opened.log is None:
        return None, "not read: no checkpoint is named (--checkpoint)", []
    try:
        newest = require_record(opened.log)
    except Refused as error:
        absent = f"{error.message}: nothing was started there; relative paths begin at {Path.cwd()}"
        return None, error.message, [f"the epoch log: {absent}"]
    except (EpochalError, OSError) as error:
        return None, error_text(error), [f"the epoch log: {error_text(error)}"]
    return newest.record.state, f"{opened.log.place}: record {newest.number} is readable", []


def _unsettled(
    state: State | None,
    driver: DriverReport | None,
    diagnoses: Sequence[SinkDiagnosis],
    now: float,
) -> list[str]:
    """A decided epoch that no driver commits, with the sinks that don't prove it."""
    if state is None or state.unsettled is None or driver is None:
        return []
    proven = {one.sink for one in diagnoses if not one.is_pending}
    waiting = [name for name in state.pending if name not in proven]
    if not waiting or driver.liveness is Liveness.ALIVE:
        return []
    age_s = now - state.unsettled.decided_at
    return [
        f"epoch {state.unsettled.epoch} is decided and not settled on {', '.join(waiting)}, "
        f"for {age_s:.0f} s"
    ]


def _served(opened: OpenedTarget) -> ServedStore | None:
    log = opened.log
    return log.store if isinstance(log, StoredLog) and isinstance(log.store, ServedStore) else None


def _log_servers(opened: OpenedTarget) -> Sequence[Ability]:
    store = _served(opened)
    try:
        return [] if store is None else store.check()
    except EpochalError as error:
        return [Ability(name="the store of the log", granted=False, because=error_text(error))]


def _diagnose(
    sink: Sink, identity: State, state: State | None, limits: Limits, is_running: bool
) -> SinkDiagnosis:
    try:
        with committer_of(sink, identity, limits) as committer:
            return _query(sink, committer, identity, state, is_running)
    except (EpochalError, OSError) as error:
        return SinkDiagnosis(
            sink=sink.name,
            described=sink.describe(),
            is_reached=False,
            error=error_text(error),
            hint=getattr(error, "hint", ""),
            abilities=[],
            newest="",
            is_pending=sink.name in identity.pending,
            lost="",
            server_change="",
            clock_skew_s=None,
            found=[],
        )


def _query(
    sink: Sink, committer: Committer, identity: State, state: State | None, is_running: bool
) -> SinkDiagnosis:
    abilities: Sequence[Ability] = committer.check(None)
    marks = committer.newest()
    is_pending = is_pending_at(sink.name, identity, committer)
    found = list_found(
        sink.name, committer.in_doubt(), identity, is_pending=is_pending, is_running=is_running
    )
    return SinkDiagnosis(
        sink=sink.name,
        described=sink.describe(),
        is_reached=True,
        error="",
        hint="",
        abilities=abilities,
        newest=_newest(marks, state, sink.name),
        is_pending=is_pending,
        lost=_lost(marks, state, sink.name),
        server_change=_server_change(committer, state, sink.name),
        clock_skew_s=_skew(committer),
        found=found,
    )


def _newest(marks: Sequence[Mark] | None, state: State | None, sink: str) -> str:
    if marks is None:
        return "no proof of epochs can be read here"
    if state is None:
        have = "has" if len(marks) == 1 else "have"
        return f"{quantity(len(marks), 'pipeline')} of this name {have} written here"
    own = own_epoch(state, marks)
    decided = None if state.last is None or sink not in state.last.rows else state.last.epoch
    proven = "no epoch" if own is None else f"epoch {own}"
    return f"proves {proven}; the log has decided {'none' if decided is None else decided}"


def _lost(marks: Sequence[Mark] | None, state: State | None, sink: str) -> str:
    if state is None or marks is None or not is_back(state, sink, marks):
        return ""
    return lost_epochs(state, sink, own_epoch(state, marks)).text


def _server_change(committer: Committer, state: State | None, sink: SinkName) -> str:
    """Against the last start; else what was found there, as long as no epoch came after it."""
    if state is None or not isinstance(committer, Identified):
        return ""
    known = state.sinks.get(sink, {})
    server = known.get("server")
    now = committer.server_change(server) if isinstance(server, Mapping) else ""
    return now or ("" if state.has_decided else str(known.get("server_change", "")))


def _skew(committer: Committer) -> float | None:
    if not isinstance(committer, Operable):
        return None
    before = time.time()
    there = committer.server_time()
    if there is None:
        return None
    return round(there - (before + time.time()) / 2, 3)


def _problems(one: SinkDiagnosis, is_running: bool, limits: Limits) -> list[str]:
    if not one.is_reached:
        return [f"{one.sink}: {one.error}"]
    found = []
    if one.lost:
        found.append(f"{one.sink}: the target went back in time; missing there: {one.lost}")
    if one.server_change:
        found.append(f"{one.sink}: {one.server_change}")
    if one.clock_skew_s is not None and abs(one.clock_skew_s) > CLOCK_SKEW_MAX_S:
        found.append(f"{one.sink}: its clock differs from this machine's by {one.clock_skew_s} s")
    for each in one.found:
        if _is_lingering(each, is_running=is_running, alarm_s=limits.in_doubt_alarm_s):
            old = "" if each.age_s is None else f", {each.age_s:.0f} s old"
            blocks = f"; it blocks {each.blocks}" if each.blocks else ""
            found.append(f"{one.sink}: {each.name}{old}: {each.verdict}: {each.because}{blocks}")
    return found


def _is_lingering(found: FoundReport, *, is_running: bool, alarm_s: float) -> bool:
    """Handles of a running driver are expected until they are too old; others are a problem."""
    if found.verdict not in (Verdict.ABORT.value, Verdict.COMMIT.value, AFTER_COMMIT, HELD):
        return True
    return not is_running or (found.age_s or 0.0) > alarm_s


@runtime_checkable
class Granting(Protocol):
    """A sink that knows which privileges it needs."""

    def grants(self) -> Sequence[str] | str: ...


def grants(opened: OpenedTarget) -> GrantsReport:
    """Return the grants of every sink, and of the log's store. No target is queried."""
    statements: dict[str, Sequence[str]] = {}
    unknown: dict[str, str] = {}
    for name, sink in by_name(opened.require_sinks()).items():
        if not isinstance(sink, Granting):
            unknown[name] = (
                "no statement to print: what it needs are rights on files, at a catalog or at a "
                "service (least privileges, in the reference)"
            )
            continue
        try:
            found = sink.grants()
            end = ";" if isinstance(sink, TableSink) else ""
            given = [found] if isinstance(found, str) else found
            statements[name] = [f"{one}{end}" for one in given]
        except Misconfigured as error:
            unknown[name] = f"{error.message}; {error.hint}"
    store = _served(opened)
    return GrantsReport(
        pipeline=opened.pipeline or "",
        sinks=statements,
        log=[] if store is None else store.grants(),
        unknown=unknown,
    )


def staging(opened: OpenedTarget) -> StagingReport:
    """Return what a DBA has yet to make for sinks that make nothing. Starts Spark for the rows."""
    declared = by_name(opened.require_sinks())
    fixed = [sink for sink in declared.values() if getattr(sink, "is_fixed", False)]
    schemas = _schemas(opened, declared) if fixed else {}
    state = State(uid=new_uid(), pipeline=opened.pipeline or "", location="")
    statements: dict[str, Sequence[str]] = {}
    for sink in fixed:
        with committer_of(sink, state, opened.limits) as committer:
            if isinstance(committer, Operable):
                statements[sink.name] = committer.missing_ddl(schemas[sink.name])
    return StagingReport(pipeline=opened.pipeline or "", sinks=statements)


def _schemas(
    opened: OpenedTarget, declared: Mapping[SinkName, Sink]
) -> Mapping[SinkName, pa.Schema]:
    """The rows of each sink, as Spark analyses the query, and rejected ones."""
    streaming = opened.require_streaming()
    session = streaming.session()
    try:
        batch = empty_like(streaming.stream(session))
        schemas = {
            sink.name: arrow_schema(sink, project(sink, batch).schema)
            for sink in opened.require_sinks()
        }
    finally:
        session.stop()
    state = State(uid=new_uid(), pipeline=opened.pipeline or "", location="")
    with ExitStack() as stack:
        committers = {
            name: stack.enter_context(committer_of(sink, state, opened.limits))
            for name, sink in declared.items()
            if sink.rejects_to is not None
        }
        rejecting = {name: declared[name] for name in committers}
        return check_schemas(rejecting, committers, schemas)
