"""
Is a driver at work? A command that would push one aside must know, or be told to.

The log alone can't say: a driver that has nothing to do writes nothing for hours. What helps is the
word that a driver leaves beside the log every few seconds and, on the driver's own machine, whether
its process is there. Correctness never hangs on the answer, as a driver that is pushed aside is
fenced; it would only be a pity.
"""

from __future__ import annotations

import os
import re
import socket

from epochal.errors import Refused
from epochal.protocol.state import State
from epochal.reports.model import DriverReport, Liveness
from epochal.telemetry.history import Live

_HERE = re.compile(r"(?P<host>\S+) pid (?P<pid>\d+)")
_SILENCE_FACTOR = 6
_SILENCE_MIN_S = 30.0


def driver_report(state: State, live: Live | None, *, now: float) -> DriverReport:
    """What can be known about the driver of the newest generation."""
    own = live if live is not None and live.generation == state.generation else None
    liveness, because = _judge(state, own, now)
    return DriverReport(
        told=state.driver,
        generation=state.generation,
        liveness=liveness,
        because=because,
        seen_at=None if own is None else own.at,
    )


def _judge(state: State, live: Live | None, now: float) -> tuple[Liveness, str]:
    if state.is_stopped:
        return Liveness.STOPPED, "the last driver left in good order"
    is_here = _is_process_here(state.driver)
    if is_here is False:
        return Liveness.GONE, f"{state.driver}: there is no such process on this machine"
    if live is not None and (told := _by_its_word(state.driver, live, now - live.at)) is not None:
        return told
    if is_here:
        return Liveness.ALIVE, f"{state.driver}: the process is there"
    if live is not None:
        return Liveness.SILENT, f"{state.driver} has been silent for {now - live.at:.0f} s"
    return Liveness.UNKNOWN, f"{state.driver} runs elsewhere, if it still does"


def _by_its_word(driver: str, live: Live, silent_s: float) -> tuple[Liveness, str] | None:
    if live.every_s == 0.0:
        return Liveness.GONE, f"{driver} ended {silent_s:.0f} s ago, not in good order"
    if silent_s < max(_SILENCE_MIN_S, _SILENCE_FACTOR * live.every_s):
        return Liveness.ALIVE, f"{driver} spoke {max(0.0, silent_s):.0f} s ago"
    return None


def _is_process_here(driver: str) -> bool | None:
    """None where the driver is on another machine, or can't be told by its name."""
    found = _HERE.fullmatch(driver)
    if found is None or found["host"] != socket.gethostname():
        return None
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def require_nobody_at_work(driver: DriverReport, *, take_over: bool, doing: str) -> None:
    """Refuse to push a driver aside unless a person says so."""
    if take_over or driver.liveness in {Liveness.STOPPED, Liveness.GONE, Liveness.SILENT}:
        return
    raise Refused(
        f"generation {driver.generation} seems to be at work ({driver.because}); to {doing} would "
        "fence it",
        "stop that driver first; if it is dead for certain, or is to be pushed aside: --take-over",
    )
