"""The read model: a frozen class per report, and its JSON form."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from epochal.telemetry.health import Health, Liveness
from epochal.terms import Ability, Json

VERSION = 1
_CAMEL = re.compile(r"(?<=[a-z])(?=[A-Z])")
_JSON_TYPES = frozenset({str, int, float, bool, type(None)})


NOT_QUERIED = "not queried"
"""The proof of a receipt whose target was not queried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    name: str
    """Host and process id, as in the log."""
    generation: int
    liveness: Liveness
    because: str
    seen_at: float | None
    """The time of its last heartbeat, by its own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StandbyReport:
    """A driver that runs as a standby, as it last described itself."""

    driver: str
    role: str
    """warming up, waiting, or working: then it holds the lease."""
    since: float
    """When it took on this role, by its own clock."""
    lease: str
    """Where the lease is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSink:
    """One sink of a decided epoch."""

    sink: str
    receipts: int
    rows: int
    is_done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsettledReport:
    """An epoch that is decided and not known to be committed on every sink."""

    epoch: int
    decided_at: float
    age_s: float
    sinks: Sequence[PendingSink]


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryReport:
    """A sink whose target does not take a decided epoch, and is asked again."""

    sink: str
    attempts: int
    since: float
    gives_up_at: float
    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtCount:
    """The number of handles that the driver's last clean-up left in doubt at one sink."""

    sink: str
    count: int
    oldest_age_s: float | None
    left: int
    """How many of them only a person may resolve."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReport:
    name: str
    described: Mapping[str, Json]
    last_rows: int | None
    """In the newest decided epoch; None if this sink was not in it."""
    rows: int | None
    """Decided from the epoch `since` on, without given-up ones; None if not counted."""
    bytes: int | None
    hash_sum: str | None
    """The sum of all row hashes modulo 2^64, in hex; None if rows are not hashed."""
    since: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUpReport:
    epoch: int
    sink: str
    kept_at: str
    by: str
    because: str
    evidence: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptedReport:
    """A target that went back in time, and is written to all the same."""

    sink: str
    after: int | None
    """The newest epoch that it still proved then."""
    since: int
    """The first that was missing."""
    through: int
    """The newest that was committed there: those since `since` were lost."""
    by: str
    because: str
    run: str | None
    """The load by which they were written again, if one was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineReport:
    """One pipeline, from its log and its history only."""

    location: str
    log: str
    pipeline: str
    uid: str
    run: str | None
    query_id: str | None
    health: Health
    because: str
    since: float | None
    """When this health began, as far as it is known."""
    blocks: str
    to_do: str
    driver: DriverReport
    standbys: Sequence[StandbyReport]
    """Drivers that run as standbys, the one that works first; empty where none does."""
    last_epoch: int | None
    decided_at: float | None
    epoch: int | None
    """The epoch in progress, or the last one."""
    phase: str
    phase_since: float | None
    phase_seconds: Mapping[str, float]
    rows_per_s: float
    epochs_per_minute: float
    unsettled: UnsettledReport | None
    input_rows_per_s: float
    behind: Mapping[str, int]
    """By source that can tell: records, or files, that are there and not read yet."""
    retrying: Sequence[RetryReport]
    trouble: Mapping[str, str] | None
    """The last error of the driver, until it commits an epoch."""
    in_doubt: Sequence[DoubtCount]
    sinks: Sequence[SinkReport]
    given_up: Sequence[GivenUpReport]
    accepted: Sequence[AcceptedReport]
    pause: str | None
    """By whom and why the pipeline is paused."""
    record: int
    written_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableReport:
    """A log that exists and can't be read."""

    location: str
    code: str
    message: str
    hint: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusReport:
    root: str
    pipelines: Sequence[PipelineReport]
    unreadable: Sequence[UnreadableReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochReport:
    """One attempt at one epoch."""

    epoch: int
    generation: int
    outcome: str
    """committed, aborted, failed; or decided, if it is in the log only."""
    opened_at: float | None
    finished_at: float | None
    rows: int
    bytes: int
    seconds: Mapping[str, float]
    """By phase; empty if unknown."""
    sinks: Mapping[str, Mapping[str, Any]]
    """Rows, bytes and seconds by phase, by sink."""
    trouble: Mapping[str, str] | None
    read_from: str
    """history, or log if the history lacks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsReport:
    """A page of the history, newest first."""

    location: str
    pipeline: str
    epochs: Sequence[EpochReport]
    cursor: str | None
    """The cursor of the next page; None if there is nothing older."""
    because: str
    """Why the page may be incomplete; empty if it is complete."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleSink:
    through: int | None
    """All rows of all epochs up to this one are visible at the target; None if none is yet."""
    pending: int | None
    """A decided epoch of which it is not known here whether it is visible."""
    because: str
    """Why that is not known, or why the target shows less than was committed there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisibleReport:
    location: str
    pipeline: str
    first: int
    """The epoch at which the log begins."""
    through: int | None
    """Every sink shows all epochs up to this one; None if a sink shows none yet."""
    decided: int | None
    """The newest decided epoch."""
    sinks: Mapping[str, VisibleSink]
    given_up: Mapping[str, Sequence[int]]
    """Epochs that a person gave up, by sink: their rows are kept elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptReport:
    handle: str
    rows: int
    bytes: int
    proof: str
    """committed, aborted, unknown; or not queried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundReport:
    """A prepared handle that a target holds."""

    sink: str
    name: str
    epoch: int | None
    generation: int | None
    age_s: float | None
    verdict: str
    """commit, abort, leave for a person."""
    because: str
    blocks: str
    """What it blocks at the target; empty if nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkInspection:
    """The answers of one target."""

    sink: str
    is_reached: bool
    error: str
    """Why it could not be queried."""
    is_pending: bool
    """Whether the decided epoch is not committed here yet."""
    receipts: Sequence[ReceiptReport]
    found: Sequence[FoundReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """The steps of a recovery: planned (`is_dry_run`) or done."""

    location: str
    pipeline: str
    is_dry_run: bool
    driver: DriverReport
    epoch: int | None
    """The decided epoch that is not settled; None if there is none."""
    sinks: Sequence[SinkInspection]
    steps: Sequence[str]
    """In order, each as a sentence."""
    needs_a_person: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolutionReport:
    location: str
    pipeline: str
    is_dry_run: bool
    action: str
    epoch: int | None
    sink: str
    evidence: Sequence[str]
    step: str
    """What would be done, or was done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantsReport:
    pipeline: str
    sinks: Mapping[str, Sequence[str]]
    """Statements, ACLs or policies, in the target's own syntax."""
    log: Sequence[str]
    """The same for the store of the epoch log, where that has users."""
    unknown: Mapping[str, str]
    """Sinks without any, with the reason or what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagingReport:
    pipeline: str
    sinks: Mapping[str, Sequence[str]]
    """The statements that a DBA has yet to run, of each sink whose staging is fixed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropReport:
    location: str
    pipeline: str
    is_dry_run: bool
    sinks: Mapping[str, Sequence[str]]
    """What is removed, by sink."""
    left: Mapping[str, str]
    """What is kept and why, by sink."""
    log: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkCompaction:
    files_before: int = 0
    files_after: int = 0
    is_failed: bool = False
    result: str
    """What was done, or why nothing was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompactReport:
    location: str
    pipeline: str
    is_dry_run: bool
    sinks: Mapping[str, SinkCompaction]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkDiagnosis:
    sink: str
    described: Mapping[str, Json]
    is_reached: bool
    error: str
    hint: str
    abilities: Sequence[Ability]
    newest: str
    """The newest epoch that the target proves, compared with the log."""
    is_pending: bool
    """Whether the decided epoch is not proven to be committed here."""
    lost: str
    """What was committed there and is gone, as the target went back in time; empty if nothing."""
    server_change: str
    """What it means that the server is another than at the last start; empty where it is not."""
    clock_skew_s: float | None
    """Target's clock minus this machine's; None if the target has no clock to query."""
    found: Sequence[FoundReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    target: str
    pipeline: str
    log: str
    """The newest record, or why the log could not be read."""
    log_servers: Sequence[Ability]
    """What the servers of the log's store answer, where it has some."""
    driver: DriverReport | None
    standbys: Sequence[StandbyReport]
    sinks: Sequence[SinkDiagnosis]
    problems: Sequence[str]
    """What a person should look at; empty if all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkVerification:
    sink: str
    verdict: str
    """agrees, differs, can't be recounted."""
    decided_rows: int | None
    visible_rows: int | None
    since: int | None
    decided_hash: str | None
    visible_hash: str | None
    epochs_compared: int
    differences: Sequence[str]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceVerification:
    """The rows decided for a sink, against the rows that the source returns now."""

    sink: str
    verdict: str
    """agrees, differs, can't be compared."""
    decided_rows: int | None
    source_rows: int | None
    since: int | None
    decided_hash: str | None
    source_hash: str | None
    differences: Sequence[str]
    because: str


@dataclass(frozen=True, slots=True, kw_only=True)
class VerificationReport:
    location: str
    pipeline: str
    up_to: int | None
    """The newest epoch in the count."""
    sinks: Sequence[SinkVerification]
    source: str
    """Whether the source was compared, or why not."""
    sources: Sequence[SourceVerification] = ()
    """One per sink, if the source was read again."""

    @property
    def differs(self) -> bool:
        verdicts = [sink.verdict for sink in self.sinks] + [one.verdict for one in self.sources]
        return "differs" in verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    location: str
    records: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


def to_json(report: object) -> dict[str, Any]:
    """Return a report as JSON: its name, its version, its values."""
    name = _CAMEL.sub("-", type(report).__name__.removesuffix("Report")).lower()
    return {"report": name, "version": VERSION, **_plain_fields(report)}


def _plain_fields(value: Any) -> dict[str, Any]:
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}


def _plain(value: Any) -> Any:
    # First, as nearly all values are of these types and the other checks cost more.
    if type(value) in _JSON_TYPES:
        return value
    if is_dataclass(value):
        return _plain_fields(value)
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(inner) for inner in value]
    return value
