"""
Every metric by its name, which stays: what it counts, in which unit, by which labels.

No label holds an epoch: series must not grow with time. `sink` is empty where a phase is the whole
epoch's. Dashboards and alert rules beside this file name only what is listed here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Protocol

PHASE_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)


class Kind(Enum):
    COUNTER = "counter"
    HISTOGRAM = "histogram"
    GAUGE = "gauge"


@dataclass(frozen=True, slots=True, kw_only=True)
class Instrument:
    kind: Kind
    labels: tuple[str, ...]
    told: str


INSTRUMENTS: Mapping[str, Instrument] = MappingProxyType(
    {
        "epochal_epochs_total": Instrument(
            kind=Kind.COUNTER,
            labels=("pipeline", "outcome"),
            told="Epochs that came to rest: committed, aborted (tried again), failed (goes on at "
            "the next start).",
        ),
        "epochal_phase_seconds": Instrument(
            kind=Kind.HISTOGRAM,
            labels=("pipeline", "sink", "phase"),
            told="Seconds that an epoch spent in a phase; with a sink, what that sink alone took.",
        ),
        "epochal_rows_total": Instrument(
            kind=Kind.COUNTER, labels=("pipeline", "sink"), told="Rows committed."
        ),
        "epochal_bytes_total": Instrument(
            kind=Kind.COUNTER, labels=("pipeline", "sink"), told="Bytes committed."
        ),
        "epochal_errors_total": Instrument(
            kind=Kind.COUNTER,
            labels=("pipeline", "code"),
            told="Errors by their code: fenced, gate-refused, unsettled …",
        ),
        "epochal_in_doubt": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            told="Prepared things that the last sweep found at the target and could not clear.",
        ),
        "epochal_oldest_in_doubt_seconds": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            told="Age of the oldest of them; 0 where there is none.",
        ),
        "epochal_decided_unsettled": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline",),
            told="1 while an epoch is decided and not carried out everywhere.",
        ),
        "epochal_generation": Instrument(
            kind=Kind.GAUGE, labels=("pipeline",), told="Which driver may speak."
        ),
        "epochal_last_epoch": Instrument(
            kind=Kind.GAUGE, labels=("pipeline",), told="The newest epoch that was begun."
        ),
        "epochal_kafka_lso_pinned_seconds": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            told="How long readers with read_committed have waited for an open transaction of a "
            "Kafka sink.",
        ),
    }
)


class Meters(Protocol):
    """Where measurements go. Labels are given in the order of the instrument."""

    def add(self, name: str, labels: tuple[str, ...], amount: float) -> None: ...

    def observe(self, name: str, labels: tuple[str, ...], seconds: float) -> None: ...

    def watch(self, name: str, labels: tuple[str, ...], ask: Callable[[], float]) -> None:
        """From here on a gauge is what `ask` says whenever somebody looks."""

    def unwatch(self, name: str, labels: tuple[str, ...]) -> None: ...
