"""The read model: plain values, one class a thing that an operator asks for."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from epochal.terms import Ability, Json

VERSION = 1
_WORD = re.compile(r"(?<=[a-z])(?=[A-Z])")
_AS_IT_IS = frozenset({str, int, float, bool, type(None)})


class Liveness(Enum):
    """Whether a driver works on a pipeline, as far as can be known from here."""

    STOPPED = "stopped"
    """The last driver left in good order."""
    ALIVE = "alive"
    """A driver has spoken within the last seconds, or its process is there."""
    GONE = "gone"
    """Its process is not there any more, or has said goodbye in disorder."""
    SILENT = "silent"
    """It has not spoken for much longer than it should."""
    UNKNOWN = "unknown"
    """It runs elsewhere, and nothing tells whether it still does."""


class Health(Enum):
    OK = "ok"
    WORKING = "working"
    """An epoch is decided and being carried out by a driver that is alive."""
    IN_DOUBT = "in doubt"
    """An epoch is decided and not carried out, and nobody is at it; or a person is needed."""
    DOWN = "down"
    """Nothing is in doubt, and the driver did not leave in good order."""
    UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True, kw_only=True)
class DriverReport:
    told: str
    """Host and process, as the driver called itself."""
    generation: int
    liveness: Liveness
    because: str
    seen_at: float | None
    """When it last said something, by its own clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingSink:
    """One sink of a decided epoch."""

    sink: str
    receipts: int
    rows: int
    is_done: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsettledReport:
    """An epoch that is decided and not known to be carried out everywhere."""

    epoch: int
    decided_at: float
    age_s: float
    sinks: Sequence[PendingSink]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoubtCount:
    """What the driver's last sweep left in doubt at one sink."""

    sink: str
    count: int
    oldest_age_s: float | None
    left: int
    """For a person: what no driver may touch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkReport:
    name: str
    described: Mapping[str, Json]
    last_rows: int | None
    """In the newest decided epoch; None where this sink was not in it."""
    rows: int | None
    """Decided since the epoch `since`, less what was given up; None where nobody counted."""
    bytes: int | None
    hash_sum: str | None
    """The sum of all row hashes modulo 2^64, in hex; None where rows are not hashed."""
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
class PipelineReport:
    """One pipeline, from its log and its history alone."""

    location: str
    log: str
    pipeline: str
    uid: str
    run: str | None
    query_id: str | None
    health: Health
    because: str
    driver: DriverReport
    last_epoch: int | None
    decided_at: float | None
    epoch: int | None
    """What the driver works on, or worked on last."""
    phase: str
    phase_seconds: Mapping[str, float]
    rows_per_s: float
    epochs_per_minute: float
    unsettled: UnsettledReport | None
    in_doubt: Sequence[DoubtCount]
    sinks: Sequence[SinkReport]
    given_up: Sequence[GivenUpReport]
    record: int
    written_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableReport:
    """A log that is there and can't be read."""

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
    """committed, aborted, failed; decided where only the log knows of it."""
    opened_at: float | None
    finished_at: float | None
    rows: int
    bytes: int
    seconds: Mapping[str, float]
    """By phase; empty where no driver told."""
    sinks: Mapping[str, Mapping[str, Any]]
    """Rows, bytes and seconds by phase, by sink."""
    trouble: Mapping[str, str] | None
    told_by: str
    """history, or log where the history lacks it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochsReport:
    """A page of history, newest first."""

    location: str
    pipeline: str
    epochs: Sequence[EpochReport]
    cursor: str | None
    """Give it to get the page after; None where there is nothing older."""
    because: str
    """Why there may be less than there was; empty where there is nothing to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReceiptReport:
    handle: str
    rows: int
    bytes: int
    proof: str
    """committed, aborted, unknown; not asked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundReport:
    """Something that a target holds prepared."""

    sink: str
    name: str
    epoch: int | None
    generation: int | None
    age_s: float | None
    verdict: str
    """commit, abort, leave for a person."""
    because: str
    blocks: str
    """What waits for it at the target; empty where nothing does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSurvey:
    """What one target answered."""

    sink: str
    is_reached: bool
    error: str
    """Why it was not reached."""
    is_pending: bool
    """The decided epoch waits to be carried out here."""
    receipts: Sequence[ReceiptReport]
    found: Sequence[FoundReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryReport:
    """What recovery would do, or did."""

    location: str
    pipeline: str
    is_dry_run: bool
    driver: DriverReport
    epoch: int | None
    """The decided epoch that is not settled; None where all is."""
    sinks: Sequence[SinkSurvey]
    steps: Sequence[str]
    """In order, one sentence each."""
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
    """What would be done, or was."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GrantsReport:
    pipeline: str
    sinks: Mapping[str, Sequence[str]]
    """Statements, ACLs or policies, in the target's own words."""
    unknown: Mapping[str, str]
    """Sinks that have none to tell, with what to do instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DropReport:
    location: str
    pipeline: str
    is_dry_run: bool
    sinks: Mapping[str, Sequence[str]]
    """What goes, in words, by sink."""
    left: Mapping[str, str]
    """What stays, and why, by sink."""
    log: Sequence[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkDiagnosis:
    sink: str
    described: Mapping[str, Json]
    is_reached: bool
    error: str
    hint: str
    abilities: Sequence[Ability]
    newest: str
    """The newest epoch that the target proves, against the log's."""
    clock_skew_s: float | None
    """Target's clock minus this machine's; None where the target does not tell."""
    found: Sequence[FoundReport]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorReport:
    target: str
    pipeline: str
    log: str
    """What became of reading the log."""
    driver: DriverReport | None
    sinks: Sequence[SinkDiagnosis]
    problems: Sequence[str]
    """What needs somebody; none where all is well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkAudit:
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
class SourceAudit:
    """What a sink was given, against what the source gives now."""

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
class AuditReport:
    location: str
    pipeline: str
    up_to: int | None
    """The newest epoch that was counted in."""
    sinks: Sequence[SinkAudit]
    source: str
    """What was compared with the source, or why nothing was."""
    sources: Sequence[SourceAudit] = ()
    """Where the source was read again: one a sink."""

    @property
    def differs(self) -> bool:
        verdicts = [sink.verdict for sink in self.sinks] + [one.verdict for one in self.sources]
        return "differs" in verdicts


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportReport:
    location: str
    records: Sequence[Mapping[str, Any]] = field(default_factory=tuple)


def to_json(report: object) -> dict[str, Any]:
    """A report as JSON: its name, its version, its values."""
    name = _WORD.sub("-", type(report).__name__.removesuffix("Report")).lower()
    return {"report": name, "version": VERSION, **_plain_fields(report)}


def _plain_fields(value: Any) -> dict[str, Any]:
    return {each.name: _plain(getattr(value, each.name)) for each in fields(value)}


def _plain(value: Any) -> Any:
    # First, as nearly all of a thousand pipelines' values are: the other questions cost more.
    if type(value) in _AS_IT_IS:
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
