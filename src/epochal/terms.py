"""The terms that all packages share, as frozen values.

A handle names one attempt of one task for one sink in one epoch (I6). Its written form is what a
target lists when it is asked what is in doubt: a gid, an XID, a folder, an object key. It is plain
ASCII and short, as an XID ends at 64 bytes; a long sink name is therefore carried as a tag.

A handle also holds the claim of the driver that made it: a token that every start draws anew and
writes into its claim record. Where a machine or a volume is cloned, two drivers have the same log,
uid and generation, and decide the same epoch; by the claim their handles still differ, and each
finds in a target's ledger whether an epoch was committed under handles of its own log.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import NewType, TypeAlias

Uid = NewType("Uid", str)
"""Who a pipeline is: twelve characters of lower-case base32, minted at the first start."""
EpochNumber = NewType("EpochNumber", int)
"""One micro-batch of a pipeline: Spark's batch id."""
Generation = NewType("Generation", int)
"""Which driver may decide; a lower one is fenced."""
SinkName: TypeAlias = str
"""A name that users choose: plain text, so that they need no constructor for it."""
Claim = NewType("Claim", str)
"""Drawn by every start, eight characters of lower-case base32: forty bits that no copy shares."""
SinkTag = NewType("SinkTag", str)
"""Eight hex digits that stand for a sink's name wherever a target limits the length of names."""

Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_HANDLE = re.compile(
    r"epochal-(?P<uid>[a-z2-7]{12})-g(?P<generation>\d{1,10})-c(?P<claim>[a-z2-7]{8})"
    r"-e(?P<epoch>\d{1,14})-s(?P<sink>[0-9a-f]{8})-p(?P<partition>\d{1,7})-t(?P<attempt>\d{1,14})"
)
JOB_PARTITION = 8_999_999
"""In the place of a partition in the handle of a whole job; above all partitions of an engine."""
DRIVER_ATTEMPTS = 10**13
"""Attempts that the driver makes in the place of a task count from here, above all of an engine."""
UNCLAIMED = Claim("a" * 8)
"""The claim of tools and checks, which claim nothing."""
FINGERPRINT_MODULUS = 1 << 64
ROW_HASH_ALGORITHM = 1
"""The number of the algorithm in `row_hash`: every change of a row's hash takes a new number."""
REJECTED_ROW_HASH_ALGORITHM = 2
"""The same over the column `row` of rejected rows alone: the reasons beside it may change."""


class Outcome(Enum):
    """What one call to a target amounts to, for the caller's next step."""

    OK = "ok"
    RETRYABLE = "retryable"
    FATAL = "fatal"


class Proof(Enum):
    """What a target can show about one receipt. UNKNOWN is neither failed nor done (I9)."""

    COMMITTED = "committed"
    ABORTED = "aborted"
    UNKNOWN = "unknown"


def sink_tag(name: SinkName) -> SinkTag:
    return SinkTag(hashlib.sha256(name.encode()).hexdigest()[:8])


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Handle:
    """
    One attempt of one task for one sink, or one job of the engine's own writer: whose prepared work
    this is (I6).
    """

    uid: Uid
    generation: Generation
    claim: Claim
    epoch: EpochNumber
    sink: SinkTag
    partition: int
    attempt: int
    """
    Unique among all attempts of one driver: Spark's task attempt id, not its attempt number. Of a
    job, a number that its driver gives once.
    """

    def __str__(self) -> str:
        return (
            f"{handle_prefix(self.uid)}g{self.generation}-c{self.claim}-e{self.epoch}"
            f"-s{self.sink}-p{self.partition}-t{self.attempt}"
        )

    @classmethod
    def parse(cls, text: str) -> Handle | None:
        """The handle written in `text`, or None where `text` is not one."""
        found = _HANDLE.fullmatch(text)
        if found is None:
            return None
        return cls(
            uid=Uid(found["uid"]),
            generation=Generation(int(found["generation"])),
            claim=Claim(found["claim"]),
            epoch=EpochNumber(int(found["epoch"])),
            sink=SinkTag(found["sink"]),
            partition=int(found["partition"]),
            attempt=int(found["attempt"]),
        )


def handle_prefix(uid: Uid) -> str:
    """How every handle of a pipeline begins: what a target is asked to list."""
    return f"epochal-{uid}-"


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """
    An order-free sum over rows: equal rows in any order and any split give equal sums.

    Sums of different algorithms can't be compared, nor added: what is left is the number of rows.
    """

    rows: int
    hash_sum: int | None = None
    """The sum of 64-bit row hashes, modulo 2^64; None where rows were not hashed."""
    algorithm: int = ROW_HASH_ALGORITHM
    """How the rows were hashed."""

    def is_comparable_to(self, other: Fingerprint) -> bool:
        """Whether sums can be compared, beyond the number of rows."""
        is_hashed = self.hash_sum is not None and other.hash_sum is not None
        return is_hashed and self.algorithm == other.algorithm

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return self._joined(other, 1) if self.rows or not other.rows else other

    def __sub__(self, other: Fingerprint) -> Fingerprint:
        return self._joined(other, -1)

    def _joined(self, other: Fingerprint, sign: int) -> Fingerprint:
        if not other.rows:
            return self
        rows = self.rows + sign * other.rows
        if self.hash_sum is None or other.hash_sum is None or self.algorithm != other.algorithm:
            return Fingerprint(rows)
        total = (self.hash_sum + sign * other.hash_sum) % FINGERPRINT_MODULUS
        return Fingerprint(rows, total, self.algorithm)


NO_ROWS = Fingerprint(0, 0)


def total(fingerprints: Iterable[Fingerprint]) -> Fingerprint:
    return sum(fingerprints, start=NO_ROWS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """What a prepared task hands back: all that commits or aborts it from another machine."""

    handle: Handle
    fingerprint: Fingerprint
    bytes: int = 0
    token: Mapping[str, Json] = field(default_factory=dict)
    """What the sink itself needs: paths, part tags, producer ids. JSON, without secrets."""
    replaces: tuple[Claim, ...] = ()
    """
    Where rows were written again after the decision: the claims under which the same epoch was to
    be carried out before, by the same log.
    """

    @property
    def rows(self) -> int:
        return self.fingerprint.rows

    def __hash__(self) -> int:
        return hash(self.handle)


def claims_of(receipts: Iterable[Receipt]) -> frozenset[Claim]:
    """
    The claims under which an epoch log decided an epoch, now or before rows were written again. An
    epoch that a target has under another claim was not committed from this decision.
    """
    listed = list(receipts)
    replaced = {claim for receipt in listed for claim in receipt.replaces}
    return frozenset(replaced | {receipt.handle.claim for receipt in listed})


def owner_of(receipts: Sequence[Receipt], identity: Identity) -> Claim:
    """The claim that stands for these receipts where a target keeps one: that of the newest."""
    handles = [receipt.handle for receipt in receipts]
    return max(handles, key=lambda handle: handle.generation, default=identity).claim


Receipts: TypeAlias = Mapping[SinkName, Sequence[Receipt]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Offsets:
    """Where in its sources an epoch begins and ends, as the engine wrote it down (I10)."""

    digest: str
    """SHA-256 over everything that says which rows these are."""
    text: str = ""
    """The same for people, cut to a bounded length."""
    sources: tuple[str, ...] = field(default=(), compare=False, repr=False)
    """Each source's end, whole, as the engine writes it: kept in the log for the newest epochs."""


NO_OFFSETS = Offsets(digest="")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """COMMIT of an epoch: written once, durable, never changed (I2)."""

    epoch: EpochNumber
    generation: Generation
    offsets: Offsets
    receipts: Receipts
    decided_at: float
    """Seconds since 1970 by the deciding driver's clock: for people, never compared."""

    @cached_property
    def handles(self) -> frozenset[Handle]:
        """Every handle that it names: there may be many, and each one in doubt is looked up."""
        return frozenset(one.handle for some in self.receipts.values() for one in some)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The name under which a sink works at its target."""

    pipeline: str
    uid: Uid
    sink: SinkName
    generation: Generation
    claim: Claim = UNCLAIMED
    run: str | None = None
    location: str | None = None
    """The pipeline's own place: its checkpoint, or a session's log. None where nothing runs yet."""
    committed: EpochNumber | None = field(default=None, compare=False)
    """
    The newest epoch that was committed at this sink when its committer was made: a decision that is
    carried out before the first `Committer.begin` comes after it. See `Begin.newest_committed`.
    """

    @property
    def tag(self) -> SinkTag:
        return sink_tag(self.sink)

    def handle(self, epoch: EpochNumber, *, partition: int, attempt: int) -> Handle:
        return Handle(
            uid=self.uid,
            generation=self.generation,
            claim=self.claim,
            epoch=epoch,
            sink=self.tag,
            partition=partition,
            attempt=attempt,
        )

    def job_handle(self, epoch: EpochNumber, number: int) -> Handle:
        return self.handle(epoch, partition=JOB_PARTITION, attempt=number)


@dataclass(frozen=True, slots=True, kw_only=True)
class InDoubt:
    """Something prepared that a target lists under our prefix."""

    name: str
    """As the target lists it."""
    handle: Handle | None
    """None where the listed name can't be read: that is left for a person."""
    age_s: float | None = None
    receipt: Receipt | None = None
    """Enough of a receipt to abort it; None where the name alone does."""
    blocks: str = ""
    """What it blocks at the target as long as it is there; empty where nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """The newest epoch of one pipeline that a target proves committed."""

    uid: Uid
    epoch: EpochNumber
    run: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Ability:
    """Something a target can or can't do, found by asking it."""

    name: str
    granted: bool
    because: str


def quantity(number: int, noun: str, plural: str | None = None) -> str:
    """`1 row`, `2,000 rows`: how messages and tables show a number of things."""
    return f"{number:,} {noun if number == 1 else plural or f'{noun}s'}"


_SCHEMES = {"s3a": "s3", "abfs": "abfss"}
"""By the other name of the same store."""


def is_same_place(one: str, other: str) -> bool:
    """Whether two locations are one folder: Spark calls `s3a:` what most others call `s3:`."""
    return _with_one_scheme(one) == _with_one_scheme(other)


def _with_one_scheme(location: str) -> str:
    scheme, mark, rest = location.partition("://")
    return f"{_SCHEMES.get(scheme, scheme)}{mark}{rest}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every limit of an epoch, with its unit."""

    commit_timeout_s: float = 30.0
    """How long one attempt to commit one sink may take before it is reported as slow."""
    commit_retry_max_s: float = 300.0
    """How long a decided epoch is retried before the query stops, the epoch still decided."""
    commit_retries_max: int | None = None
    """How often at most, within that time; None: as often as the waits between them allow."""
    abort_timeout_s: float = 10.0
    """How long an abort is waited for; what it leaves is cleared later."""
    decide_retry_max_s: float = 60.0
    """How long an unanswered write of a decision is asked after before the query stops."""
    retry_backoff_ms: tuple[int, ...] = (100, 500, 2000)
    """Waits between attempts, each with jitter; the last one repeats."""
    buffer_rows: int = 100_000
    """Rows a writer holds before it flushes them inside the transaction."""
    driver_rows_max: int = 2_000
    """
    Rows of one sink that the driver writes itself, where the epoch before had no more: a task in
    Python takes longer than so few rows. 0 leaves all rows to tasks.
    """
    in_doubt_alarm_s: float = 3600.0
    """Prepared work without a decision that is older than this is reported loudly."""
    sweep_every_s: float = 60.0
    """How often, between epochs, targets are asked for what late attempts left behind (I5)."""
    receipts_inline_bytes: int = 65_536
    """Receipts that a record of the epoch log holds itself; more lie in lists beside the log."""
    log_records_kept: int = 32
    """Records of the epoch log kept below the newest, for people; none is ever needed."""
    history_epochs_kept: int = 100_000
    """Epochs whose figures are kept beside the log, for people; 0 keeps no history."""
    fence_on_start: bool = True
    """Take over from a driver that did not stop cleanly; False refuses to start instead."""


DEFAULT_LIMITS = Limits()
