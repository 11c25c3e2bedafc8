"""Answers for Kubernetes' probes: what the pipelines of this process are doing, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable
from enum import Enum


class Activity(Enum):
    """What a pipeline of this process is doing."""

    WARMING = "warming up"
    WAITING = "waiting"
    """A standby whose turn has not come. Ready: it can take over at any moment."""
    WORKING = "working"
    STOPPED = "stopped"
    FAILED = "failed"


_READY = frozenset({Activity.WAITING, Activity.WORKING})
_guard = threading.Lock()
_activities: dict[str, Callable[[], Activity]] = {}


def show_activity(pipeline: str, activity: Callable[[], Activity]) -> None:
    """Ask this function from now on what a pipeline is doing."""
    with _guard:
        _activities[pipeline] = activity


def activities() -> dict[str, Activity]:
    """Of every pipeline that this process has started."""
    with _guard:
        asked = dict(_activities)
    return {pipeline: activity() for pipeline, activity in asked.items()}


def is_live() -> bool:
    """False where a pipeline has failed: only a restart of the process helps."""
    return Activity.FAILED not in activities().values()


def is_ready() -> bool:
    """Every pipeline works, or waits as a standby. False as long as none has been started."""
    found = activities()
    return bool(found) and all(one in _READY for one in found.values())
