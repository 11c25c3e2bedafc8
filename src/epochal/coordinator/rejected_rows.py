"""
`RejectedRows`: rows that one target rejects, prepared at another sink of the same epoch.

They are few, and known only once the rejecting sink was rehearsed, so the driver itself writes
them, as one more task of the sink that gets them (`Sink.rejects_to`). Their partition number stands
for the sink that rejected them, and is above all partition numbers of an engine. The fingerprint of
their receipt is of the rejected rows alone: after rows were written again, a rehearsal must reject
the same ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from epochal.contract import Committer, Rejecting, Sink, Task, prepare_rows
from epochal.coordinator.environment import Environment
from epochal.coordinator.retry import prepare_on_driver
from epochal.errors import Unsettled
from epochal.protocol.invariants import broken
from epochal.protocol.recovery import give_up_command
from epochal.terms import (
    NO_ROWS,
    REJECTED_ROW_HASH_ALGORITHM,
    Decision,
    EpochNumber,
    Fingerprint,
    Identity,
    Json,
    Limits,
    Receipt,
    SinkName,
    sink_tag,
)

if TYPE_CHECKING:
    import pyarrow as pa

FIRST_PARTITION = 9_000_000
_PARTITIONS = 999_999
"""All below the one that stands for files of the driver, where rows are merged into a table."""


def partition_of(rejecting: SinkName) -> int:
    return FIRST_PARTITION + int(sink_tag(rejecting), 16) % _PARTITIONS


def reject_sinks(sinks: Mapping[SinkName, Sink]) -> frozenset[SinkName]:
    """The sinks that get nothing but rows that others reject."""
    return frozenset(sink.rejects_to.name for sink in sinks.values() if sink.rejects_to is not None)


def _rejecting(name: SinkName, committer: Committer) -> Rejecting:
    if not isinstance(committer, Rejecting):
        raise broken("I3", f"{name} has rejects_to and can't say which rows its target rejects")
    return committer


def check_schemas(
    sinks: Mapping[SinkName, Sink],
    committers: Mapping[SinkName, Committer],
    schemas: Mapping[SinkName, pa.Schema],
) -> Mapping[SinkName, pa.Schema]:
    """The schema of the rows that each sink gets, that of rejected rows included."""
    rejected = {
        sink.rejects_to.name: _rejecting(name, committers[name]).rejected_schema
        for name, sink in sinks.items()
        if sink.rejects_to is not None
    }
    return {**schemas, **rejected}


class RejectedRows:
    """Prepares the rejected rows of one epoch after the other."""

    def __init__(
        self,
        sinks: Mapping[SinkName, Sink],
        *,
        limits: Limits,
        environment: Environment,
        note_late: Callable[[], None],
    ) -> None:
        """`note_late` is called where a prepare was not answered, and rows may still arrive."""
        self._sinks = sinks
        self._note_late = note_late
        self._limits = limits
        self._environment = environment
        self._attempts = 0
        self.reject_sinks = reject_sinks(sinks)
        self.receipts: dict[SinkName, tuple[Receipt, ...]] = {}
        """Of the open epoch: of every reject sink, also where nothing was rejected (I8)."""

    def begin(self) -> None:
        self.receipts = dict.fromkeys(self.reject_sinks, ())

    def deliver(
        self,
        epoch: EpochNumber,
        sink: SinkName,
        committer: Committer,
        *,
        identity: Callable[[SinkName], Identity],
        handout: Callable[[SinkName], Json],
    ) -> None:
        """Prepare what a sink has just rejected at the sink that `rejects_to` names."""
        named = self._sinks[sink].rejects_to
        rows = None if named is None else _rejecting(sink, committer).rejected(epoch)
        if named is None or rows is None:
            return
        to = self._sinks[named.name]

        def prepare(_is_first: bool) -> Receipt:
            self._attempts += 1
            handle = identity(to.name).handle(
                epoch, partition=partition_of(sink), attempt=self._attempts
            )
            task = Task(
                handle=handle, schema=rows.schema, handout=handout(to.name), limits=self._limits
            )
            batches = rows.to_batches(max_chunksize=self._limits.buffer_rows)
            return prepare_rows(to, task, batches)

        receipt = prepare_on_driver(
            prepare,
            limits=self._limits,
            clock=self._environment.clock,
            random=self._environment.random,
            note_late=self._note_late,
        )
        self.receipts[to.name] += (replace(receipt, fingerprint=fingerprint_of(rows)),)


def fingerprint_of(rows: pa.Table | None) -> Fingerprint:
    """Of the rows as they were given to the sink; the reasons are the target's and may change."""
    from epochal import row_hash  # noqa: PLC0415  loads Arrow, and few targets reject rows

    if rows is None:
        return NO_ROWS
    given = rows.select(["row"]).to_batches()
    return replace(row_hash.fingerprint_of(given), algorithm=REJECTED_ROW_HASH_ALGORITHM)


def require_same(sink: Sink, committer: Committer, decision: Decision) -> None:
    """
    After rows were written again, the same ones must be rejected as when the epoch was decided: the
    decision brought these, and no others, to the other sink.
    """
    if sink.rejects_to is None:
        return
    now = fingerprint_of(_rejecting(sink.name, committer).rejected(decision.epoch))
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
            f"epoch {decision.epoch}: {sink.name} lost its prepared rows, and rejects {now.rows} "
            f"of them now that they are written again; {decided.rows} were rejected and brought to "
            f"{sink.rejects_to.name} when the epoch was decided, and they are not the same",
            "the table has changed since: change it back so that it takes the same rows, and start "
            "again; or bring the rows there by hand and record it: "
            f"{give_up_command(sink.name, decision.epoch)}",
        )
