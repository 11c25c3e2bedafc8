"""The coordinator: claims, rehearses, decides, commits, settles, recovers, as `protocol` asks.

`Coordinator.conclude` is the life of an epoch from its receipts to its commit; start reading there.
"""

from epochal.coordinator.coordinator import Coordinator
from epochal.coordinator.environment import Environment, this_driver
from epochal.coordinator.gates import Gate, PreparedEpoch
from epochal.coordinator.journal import read_state
from epochal.coordinator.tracker import (
    EpochFigures,
    InDoubtFigures,
    Latency,
    Listener,
    Metrics,
    Retry,
    SinkFigures,
    SourceFigures,
    Stopped,
    Tracker,
    Trouble,
)

__all__ = [
    "Coordinator",
    "Environment",
    "EpochFigures",
    "Gate",
    "InDoubtFigures",
    "Latency",
    "Listener",
    "Metrics",
    "PreparedEpoch",
    "Retry",
    "SinkFigures",
    "SourceFigures",
    "Stopped",
    "Tracker",
    "Trouble",
    "read_state",
    "this_driver",
]
