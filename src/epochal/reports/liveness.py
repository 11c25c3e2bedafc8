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

from epochal.errors import Refused
from epochal.protocol.state import State
from epochal.reports.model import DriverReport
from epochal.telemetry.health import Liveness
from epochal.telemetry.history import Live

_HOST_AND_PID = re.compile(r"(?P<host>\S+) pid (?P<pid>\d+)( machine \w+)?")
_OVERDUE_FACTOR = 6
_OVERDUE_MIN_S = 30.0


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
