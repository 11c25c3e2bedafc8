"""
The definitions of all metrics: name, kind, labels, description. Names and labels are stable.

No label holds an epoch, so the number of series does not grow over time. The label `sink` is empty
for a phase of the whole epoch. The dashboard and the alert rules in this folder use only these.
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
    description: str


INSTRUMENTS: Mapping[str, Instrument] = MappingProxyType(
    {
        "epochal_epochs_total": Instrument(
            kind=Kind.COUNTER,
            labels=("pipeline", "outcome"),
            description="Ended epochs by outcome: committed, aborted (tried again), failed (the "
            "next start commits it).",
        ),
        "epochal_phase_seconds": Instrument(
            kind=Kind.HISTOGRAM,
            labels=("pipeline", "sink", "phase"),
            description="Duration of a phase of an epoch; with a sink, the duration at that sink.",
        ),
        "epochal_rows_total": Instrument(
            kind=Kind.COUNTER, labels=("pipeline", "sink"), description="Rows committed."
        ),
        "epochal_bytes_total": Instrument(
            kind=Kind.COUNTER, labels=("pipeline", "sink"), description="Bytes committed."
        ),
        "epochal_errors_total": Instrument(
            kind=Kind.COUNTER,
            labels=("pipeline", "code"),
            description="Errors by code: fenced, gate-refused, unsettled …",
        ),
        "epochal_health": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "health"),
            description="1 for the health of the pipeline, 0 for every other: ok, working, "
            "retrying, in doubt, lost, gone …",
        ),
        "epochal_heartbeat_timestamp_seconds": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline",),
            description="When the driver was last seen, in seconds since 1970.",
        ),
        "epochal_last_decided_timestamp_seconds": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline",),
            description="When the newest epoch was decided, in seconds since 1970; 0 before the "
            "first.",
        ),
        "epochal_phase_age_seconds": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "phase"),
            description="How long the epoch has been in this phase; 0 for every other phase, and "
            "at rest.",
        ),
        "epochal_retries_total": Instrument(
            kind=Kind.COUNTER,
            labels=("pipeline", "sink", "code"),
            description="Attempts to commit a decided epoch at a sink that failed and were "
            "repeated, by the code of the error.",
        ),
        "epochal_retrying_seconds": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            description="How long a sink has not taken a decided epoch; 0 if it takes them.",
        ),
        "epochal_rejected_rows_total": Instrument(
            kind=Kind.COUNTER,
            labels=("pipeline", "sink"),
            description="Rows that a target rejected, committed at this sink instead.",
        ),
        "epochal_given_up_epochs": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            description="Epochs that a person gave up at this sink.",
        ),
        "epochal_unreadable_logs": Instrument(
            kind=Kind.GAUGE,
            labels=("location",),
            description="1 for an epoch log that exists and can't be read. From the console only.",
        ),
        "epochal_in_doubt": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            description="Prepared handles that the last clean-up left at the target.",
        ),
        "epochal_oldest_in_doubt_seconds": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            description="Age of the oldest of them; 0 if there is none.",
        ),
        "epochal_input_rows_per_second": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline",),
            description="Rows per second that arrived at the sources, by Spark's last progress.",
        ),
        "epochal_source_behind": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline",),
            description="Records of Kafka, or files, that are at the sources and not read yet, by "
            "Spark's last progress; 0 where a source can't tell.",
        ),
        "epochal_kept": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "place"),
            description="Records of the epoch log (place log), segments of the history (place "
            "history); from drivers only.",
        ),
        "epochal_kept_limit": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "place"),
            description="How many of them are kept while old ones can be deleted.",
        ),
        "epochal_staging_bytes": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            description="Size of the staging tables of a PostgreSQL table, by the last clean-up.",
        ),
        "epochal_staging_bytes_max": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            description="`staging_bytes_max`, beyond which an attempt waits for room.",
        ),
        "epochal_spool_bytes": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            description="Size of the rows that wait in the spool of Http, Callback or Kafka, by "
            "the last clean-up.",
        ),
        "epochal_decided_unsettled": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline",),
            description="1 while an epoch is decided and not committed on every sink.",
        ),
        "epochal_generation": Instrument(
            kind=Kind.GAUGE, labels=("pipeline",), description="Generation of the driver."
        ),
        "epochal_last_epoch": Instrument(
            kind=Kind.GAUGE, labels=("pipeline",), description="The newest epoch that has begun."
        ),
        "epochal_standby_waiting": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline",),
            description="1 while this process is a standby that waits for the lease.",
        ),
        "epochal_standby_working": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline",),
            description="1 while this process is a standby that holds the lease and works.",
        ),
        "epochal_kafka_lso_pinned_seconds": Instrument(
            kind=Kind.GAUGE,
            labels=("pipeline", "sink"),
            description="How long an open transaction of a Kafka sink has blocked read_committed "
            "consumers.",
        ),
    }
)


class Meters(Protocol):
    """A backend that receives measurements. Labels are in the order of the instrument."""

    def add(self, name: str, labels: tuple[str, ...], amount: float) -> None: ...

    def observe(self, name: str, labels: tuple[str, ...], seconds: float) -> None: ...

    def watch(self, name: str, labels: tuple[str, ...], read: Callable[[], float]) -> None:
        """From now on, the value of a gauge is the result of `read` at each scrape."""

    def unwatch(self, name: str, labels: tuple[str, ...]) -> None: ...
