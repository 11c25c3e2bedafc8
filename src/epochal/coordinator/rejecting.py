"""
Rows that a target refuses, on their way to another sink of the same epoch.

They are few and known only once the refusing sink was rehearsed, so the driver itself writes them,
as one more task of the sink that gets them. Their partition stands for the sink that refused them;
it lies above all that an engine counts up to. The receipt's fingerprint is of the refused rows
alone, so that a rehearsal of rows that were written again can be held against it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from epochal.contract import Committer, Limits, Rejecting, Sink, Task, prepare_rows
from epochal.coordinator.surroundings import Surroundings
from epochal.coordinator.waiting import backoff
from epochal.errors import OutcomeUnknown, TryAgain, Unsettled
from epochal.protocol.invariants import broken
from epochal.terms import (
    FINGERPRINT_MODULUS,
    NO_ROWS,
    Decision,
    EpochNumber,
    Fingerprint,
    Identity,
    Json,
    Receipt,
    SinkName,
    sink_tag,
)

if TYPE_CHECKING:
    import pyarrow as pa

FIRST_PARTITION = 9_000_000
_PARTITIONS = 1_000_000


def partition_of(refusing: SinkName) -> int:
    return FIRST_PARTITION + int(sink_tag(refusing), 16) % _PARTITIONS


def takers(sinks: Mapping[SinkName, Sink]) -> frozenset[SinkName]:
    """The sinks that get nothing but what others refuse."""
    return frozenset(sink.rejects_to.name for sink in sinks.values() if sink.rejects_to is not None)


def rejecting(name: SinkName, committer: Committer) -> Rejecting:
    if not isinstance(committer, Rejecting):
        raise broken("I3", f"{name} has rejects_to and can't say which rows its target refuses")
    return committer


def check_schemas(
    sinks: Mapping[SinkName, Sink],
    committers: Mapping[SinkName, Committer],
    schemas: Mapping[SinkName, pa.Schema],
) -> Mapping[SinkName, pa.Schema]:
    """What each sink is to be checked with: those that get refused rows, with how they are told."""
    told = {
        sink.rejects_to.name: rejecting(name, committers[name]).rejected_schema
        for name, sink in sinks.items()
        if sink.rejects_to is not None
    }
    return {**schemas, **told}


class Deliveries:
    """What the sinks of one epoch refuse, prepared at the sinks that get it."""

    def __init__(
        self, sinks: Mapping[SinkName, Sink], *, limits: Limits, around: Surroundings
    ) -> None:
        self._sinks = sinks
        self._limits = limits
        self._around = around
        self._attempts = 0
        self.takers = takers(sinks)
        self.receipts: dict[SinkName, tuple[Receipt, ...]] = {}
        """Of the open epoch: of every taker, also where nothing was refused (I8)."""

    def begin(self) -> None:
        self.receipts = dict.fromkeys(self.takers, ())

    def deliver(
        self,
        epoch: EpochNumber,
        sink: SinkName,
        committer: Committer,
        *,
        identity: Callable[[SinkName], Identity],
        handout: Callable[[SinkName], Json],
    ) -> None:
        """Take what a sink has just refused to the one that it names."""
        named = self._sinks[sink].rejects_to
        rows = None if named is None else rejecting(sink, committer).rejected(epoch)
        if named is None or rows is None:
            return
        to = self._sinks[named.name]
        waits = backoff(self._limits.retry_backoff_ms, self._around.chance)
        for attempts_left in reversed(range(len(self._limits.retry_backoff_ms) + 1)):
            handle = identity(to.name).handle(
                epoch, partition=partition_of(sink), attempt=self._next_attempt()
            )
            task = Task(
                handle=handle, schema=rows.schema, handout=handout(to.name), limits=self._limits
            )
            try:
                batches = rows.to_batches(max_chunksize=self._limits.buffer_rows)
                receipt = prepare_rows(to, task, batches)
            except (TryAgain, OutcomeUnknown, OSError):
                # What a lost attempt left is cleared like that of any other task (I5).
                if not attempts_left:
                    raise
                self._around.clock.sleep(next(waits))
            else:
                self.receipts[to.name] += (replace(receipt, fingerprint=fingerprint_of(rows)),)
                return

    def _next_attempt(self) -> int:
        """No two of one driver are equal; another process of it began when the clock was lower."""
        self._attempts = max(self._attempts + 1, int(self._around.clock.now() * 1000))
        return self._attempts


def fingerprint_of(rows: pa.Table | None) -> Fingerprint:
    """Of the rows as they were given to the sink; reasons are worded by the target."""
    if rows is None:
        return NO_ROWS
    texts = rows.column("row").to_pylist()
    hashes = (hashlib.blake2b(text.encode(), digest_size=8).digest() for text in texts)
    return Fingerprint(len(texts), sum(int.from_bytes(one) for one in hashes) % FINGERPRINT_MODULUS)


def require_same(sink: Sink, committer: Committer, decision: Decision) -> None:
    """
    Rows that are written again are refused as they were when the epoch was decided: those that the
    decision took to the other sink must be left out, and no other ones.
    """
    if sink.rejects_to is None:
        return
    now = fingerprint_of(rejecting(sink.name, committer).rejected(decision.epoch))
    decided = sum(
        (
            receipt.fingerprint
            for receipt in decision.receipts.get(sink.rejects_to.name, ())
            if receipt.handle.partition == partition_of(sink.name)
        ),
        start=NO_ROWS,
    )
    if now != decided:
        raise Unsettled(
            f"epoch {decision.epoch}: {sink.name} lost its prepared rows, and refuses {now.rows} "
            f"of them now that they are written again; {decided.rows} were refused and taken to "
            f"{sink.rejects_to.name} when the epoch was decided, and they are not the same",
            "the table has changed since: mend it so that it takes what it took then, and start "
            "again",
        )
