"""Carries out what the protocol asks: begin, gather, gate, decide, commit, settle, recover."""

from epochal.coordinator.coordinator import Coordinator
from epochal.coordinator.gates import Gate, PreparedEpoch
from epochal.coordinator.reading import read_state
from epochal.coordinator.surroundings import Surroundings, this_driver
from epochal.coordinator.tracker import (
    EpochFigures,
    InDoubtFigures,
    Latency,
    Listener,
    Metrics,
    SinkFigures,
    Tracker,
    Trouble,
)

__all__ = [
    "Coordinator",
    "EpochFigures",
    "Gate",
    "InDoubtFigures",
    "Latency",
    "Listener",
    "Metrics",
    "PreparedEpoch",
    "SinkFigures",
    "Surroundings",
    "Tracker",
    "Trouble",
    "read_state",
    "this_driver",
]
