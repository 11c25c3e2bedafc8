"""Answers for Kubernetes' probes: what the pipelines of this process are doing, by name."""

from __future__ import annotations

import threading
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
_activities: dict[str, Activity] = {}


def set_activity(pipeline: str, activity: Activity) -> None:
    with _guard:
        _activities[pipeline] = activity


def activities() -> dict[str, Activity]:
    """Of every pipeline that this process has started."""
    with _guard:
        return dict(_activities)


def is_live() -> bool:
    """False where a pipeline has failed: only a restart of the process helps."""
    return Activity.FAILED not in activities().values()


def is_ready() -> bool:
    """Every pipeline works, or waits as a standby. False as long as none has been started."""
    found = activities()
    return bool(found) and all(one in _READY for one in found.values())
