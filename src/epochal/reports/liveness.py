"""
Liveness of a driver: whether one is running, for commands that would fence it.

The log does not show it: an idle driver writes no record for hours. The evidence is the heartbeat
that a driver puts beside the log every few seconds and, on the driver's own machine, whether its
process exists. Correctness does not depend on the answer, because a driver that is taken over is
fenced (I7); a wrong answer only stops a healthy pipeline.
"""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

from epochal.config.resolve_target import OpenedTarget
from epochal.coordinator import this_driver
from epochal.coordinator.journal import EpochLog
from epochal.errors import Refused
from epochal.logs import StoredLog
from epochal.protocol.state import State
from epochal.reports.model import DriverReport
from epochal.storage.leases import KeptLease, Lease, lease_at
from epochal.telemetry.health import Liveness
from epochal.telemetry.history import Live
from epochal.telemetry.standby import Member, present_at

P = ParamSpec("P")
T = TypeVar("T")
Change = Callable[Concatenate[OpenedTarget, P], T]

_HOST_AND_PID = re.compile(r"(?P<host>\S+) pid (?P<pid>\d+)( machine \w+)?")
_OVERDUE_FACTOR = 6
_OVERDUE_MIN_S = 30.0
_LEASE_WAIT_S = 3.0


def driver_report(state: State, live: Live | None, *, now: float) -> DriverReport:
    """Report the driver of the newest generation."""
    own = live if live is not None and live.generation == state.generation else None
    liveness, because = _judge(state, own, now)
    return DriverReport(
        name=state.driver,
        generation=state.generation,
        liveness=liveness,
        because=because,
        seen_at=None if own is None else own.at,
    )


def _judge(state: State, live: Live | None, now: float) -> tuple[Liveness, str]:
    if state.is_stopped:
        return Liveness.STOPPED, "the last driver stopped cleanly"
    is_here = _is_process_here(state.driver)
    if is_here is False:
        return Liveness.GONE, f"{state.driver}: this machine has no such process"
    if live is not None:
        judged = _by_heartbeat(state.driver, live, now - live.at)
        if judged is not None:
            return judged
    if is_here:
        return Liveness.ALIVE, f"{state.driver}: the process exists"
    if live is not None:
        return Liveness.SILENT, f"{state.driver}: the last heartbeat was {now - live.at:.0f} s ago"
    return Liveness.UNKNOWN, f"{state.driver} is on another machine and has no heartbeat"


def _by_heartbeat(driver: str, live: Live, age_s: float) -> tuple[Liveness, str] | None:
    if live.every_s == 0.0:
        return Liveness.GONE, f"{driver} ended {age_s:.0f} s ago and did not stop cleanly"
    if age_s < max(_OVERDUE_MIN_S, _OVERDUE_FACTOR * live.every_s):
        return Liveness.ALIVE, f"{driver}: the last heartbeat was {max(0.0, age_s):.0f} s ago"
    return None


def _is_process_here(driver: str) -> bool | None:
    """Return None if the driver is on another machine, or its name is of another form."""
    found = _HOST_AND_PID.fullmatch(driver)
    if found is None or found["host"] != socket.gethostname():
        return None
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def require_no_driver(driver: DriverReport, *, take_over: bool, doing: str) -> None:
    """Raise `Refused` if a driver may be running, unless a person takes over."""
    if take_over or driver.liveness in {Liveness.STOPPED, Liveness.GONE, Liveness.SILENT}:
        return
    raise Refused(
        f"generation {driver.generation} seems to be running ({driver.because}); to {doing} would "
        "fence it",
        "stop that driver first; if it is certainly dead, or is to be fenced: --take-over",
    )


@contextmanager
def lease_for_tool(log: EpochLog, *, doing: str, take_over: bool = False) -> Iterator[None]:
    """
    Hold the pipeline's lease while a command claims, so that no standby takes the pipeline from it.

    Where nobody runs as a standby there is nothing to hold. Raises `Refused` with who has it where
    the lease is not to be had, unless a person takes over: then the command claims all the same,
    and a standby may claim after it.
    """
    present = present_at(log)
    if not present or take_over or not isinstance(log, StoredLog):
        yield
        return
    lease = lease_at(log.store)
    try:
        if {one.lease for one in present} != {lease.location} or not _acquired(lease):
            raise _held(present, doing)
        kept = KeptLease(lease, this_driver())
        try:
            yield
        finally:
            kept.release()
    finally:
        lease.close()


def under_lease(doing: str) -> Callable[[Change[P, T]], Change[P, T]]:
    """Let a change of a pipeline by hand hold its lease; not a dry run, which claims nothing."""

    def wrap(change: Change[P, T]) -> Change[P, T]:
        @wraps(change)
        def run(opened: OpenedTarget, /, *arguments: P.args, **named: P.kwargs) -> T:
            if named.get("dry_run", False):
                return change(opened, *arguments, **named)
            take_over = bool(named.get("take_over", False))
            with lease_for_tool(opened.require_log(), doing=doing, take_over=take_over):
                return change(opened, *arguments, **named)

        return run

    return wrap


def _acquired(lease: Lease) -> bool:
    deadline = time.monotonic() + _LEASE_WAIT_S
    while not lease.acquire(f"{this_driver()} (a command)"):
        if time.monotonic() > deadline:
            return False
        time.sleep(lease.look_every_s / 2)
    return True


def _held(present: list[Member], doing: str) -> Refused:
    who = "; ".join(f"{one.driver}: {one.role}" for one in present)
    return Refused(
        f"standby drivers are at work, and to {doing} would get into their way: {who}",
        "hold them back: `epochal pause PIPELINE --because …` (and `resume` afterwards); or "
        "--take-over",
    )
