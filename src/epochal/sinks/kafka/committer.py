"""`KafkaCommitter`: ends the transactions that tasks left open, and proves how they ended.

EndTxn answers NONE                     committed, by this call or an earlier one
any other answer, or none               ask for proof (I9)
proven aborted                          sent again from the spool, or `PreparedLost`
neither proven                          `OutcomeUnknown`: asked again
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, TypeAlias

import pyarrow as pa

from epochal.contract import Begin, Deadline, Room, Task
from epochal.errors import (
    EpochalError,
    Misconfigured,
    OutcomeUnknown,
    PreparedLost,
    copy_at_work,
    require_still_committed,
)
from epochal.kafka.client import Client
from epochal.kafka.cluster import Leader
from epochal.kafka.codes import Code
from epochal.kafka.errors import code_name
from epochal.kit.sink_base import Dropped, Operable, Recount
from epochal.kit.spool.committer import require_seen
from epochal.kit.spool.rows import RowSpool
from epochal.sinks.kafka import operate, transaction_status, transactions
from epochal.sinks.kafka.check import ClusterLimits, check, read_limits
from epochal.sinks.kafka.errors import require_rights
from epochal.sinks.kafka.ledger import Ledger, ledger_entry, ledger_metadata
from epochal.sinks.kafka.proof import proof_of
from epochal.sinks.kafka.receipts import Handout, OpenTransaction, transaction_of
from epochal.sinks.kafka.records import value_type
from epochal.sinks.kafka.transactional_ids import Slot, SlotPool, TransactionalIds
from epochal.sinks.kafka.transactions import add_offsets, commit_one, start_one
from epochal.sinks.kafka.writer import KafkaWriter
from epochal.terms import (
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Limits,
    Mark,
    Offsets,
    Proof,
    Receipt,
    claims_of,
    quantity,
)

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka

_LANES = 8
"""Connections to each broker, which works on one request per connection at a time."""
_LIMITS_AGE_MAX_S = 300.0
"""As often as other clients refresh their metadata: partitions may have been added."""
_PROVEN_WITHIN_S = 2.0
"""How long a group may show an older number after a transaction was committed."""
_LOOK_EVERY_S = 0.02

Prepared: TypeAlias = tuple[Receipt, OpenTransaction]


class KafkaCommitter(Operable):
    def __init__(self, sink: Kafka, identity: Identity, limits: Limits) -> None:
        self._sink = sink
        self._identity = identity
        self._limits = limits
        self._ids = TransactionalIds(sink.transactional_id_prefix, identity)
        self._ledger = Ledger(self._ids, sink.topic)
        self._pool = SlotPool(self._ids)
        self._spool = sink.row_spool(identity.location)
        self._value_type: pa.DataType | None = None
        self._kept: Client | None = None
        self._cluster_limits: ClusterLimits | None = None
        self._limits_read_s = 0.0
        self._epoch: EpochNumber | None = None
        self._began_s: float | None = None
        self._held: dict[tuple[str, int, int], Handle] = {}
        """Transactions of the current epoch: their ids are not started again before they ended."""
        self._opened_s = 0.0
        """When the oldest of them was opened, by `time.monotonic`."""
        self._source_offsets: Offsets | None = None
        self._committed: EpochNumber | None = None
        """The last epoch that this committer has committed: the ledger shows it soon."""
        self.pinned_s = 0.0
        """About how long the transactions of the last epoch made readers wait."""

    # Before the decision

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        found = check(self._client, self._sink, self._ids, self._ledger, schema)
        if schema is not None:
            self._value_type = value_type(self._sink, schema)
            self._sink.encoding.ready(self._sink.topic, self._value_type, is_trial=True)
        if self._spool is not None:
            self._spool.store.names("rows")
        return found

    def begin(self, begin: Begin) -> Json:
        if self._sink.spool and self._spool is None:
            raise Misconfigured(
                "Kafka(spool=True): this pipeline has no folder of its own to keep rows in",
                "name one that driver and executors share: spool=…",
            )
        self._require_not_back(begin.newest_committed)
        if time.monotonic() - self._limits_read_s > _LIMITS_AGE_MAX_S:
            self._cluster_limits = None
            self._client.forget(Leader(self._sink.topic, 0))
        known = self._known_limits()
        held = {name for name, _, _ in self._held}
        slots = self._pool.ready(self._client, timeout_ms=known.timeout_ms, held=held)
        self._epoch, self._began_s = begin.epoch, time.monotonic()
        self._source_offsets = begin.offsets
        return replace(self._handout(slots), value=self._value()).to_json()

    def _require_not_back(self, committed: EpochNumber | None) -> None:
        """A ledger that brokers have forgotten is no sign of it."""
        proven = committed if committed is None else self._proven_epoch(committed)
        if proven is not None:
            require_still_committed(self._identity.sink, committed, proven=proven)

    def _proven_epoch(self, awaited: EpochNumber) -> EpochNumber | None:
        """The epoch in the ledger; asked again for a while, as commits show some time later."""
        deadline_s = time.monotonic() + _PROVEN_WITHIN_S
        while True:
            found = self._ledger.at(self._client, self._ids.group)
            if found is None or found >= awaited or time.monotonic() > deadline_s:
                return found
            time.sleep(_LOOK_EVERY_S)

    def _value(self) -> Json:
        if self._value_type is None:
            return None
        return self._sink.encoding.ready(self._sink.topic, self._value_type)

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Deadline | None:
        """All rows are acknowledged already; the transactions must still be open."""
        opened = self._opened(receipts)
        self._hold(opened)
        self._pool.fit(receipts)
        if self._spool is not None:
            require_seen(self._spool, epoch, receipts)
        # Where rows of a decided epoch are written again, the others were committed before.
        generation = self._identity.generation
        undecided = [txn for receipt, txn in opened if receipt.handle.generation == generation]
        transaction_status.require_open(self._client, epoch, undecided)
        if undecided:
            for group, offsets in self._other_groups():
                add_offsets(self._client, undecided[0], group, offsets)
        self._ledger.ready(self._client, self._known_limits().own_timeout_ms)
        return self._deadline(undecided)

    def _deadline(self, opened: Sequence[OpenTransaction]) -> Deadline | None:
        """
        When the first of these transactions may time out. Each is as old as its first record: the
        time that workers take to start, and other sinks to prepare, does not count.
        """
        now_s, now_at_s = time.monotonic(), time.time()
        since_begin_s = float("inf") if self._began_s is None else now_s - self._began_s
        ends = [
            (txn.timeout_ms / 1000 - txn.age_s(now_at_s, since_begin_s), txn.timeout_ms / 1000)
            for txn in opened
        ]
        if not ends:
            return None
        left_s, kept_s = min(ends)
        self._opened_s = now_s + left_s - kept_s
        return Deadline(
            at_s=now_s + left_s,
            kept_s=kept_s,
            hint="smaller epochs, or a longer transaction_timeout_s (transaction.max.timeout.ms); "
            "the time counts from the first record of an epoch's first task",
        )

    # After the decision

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        opened = self._opened(receipts)
        self._hold(opened)
        self._pool.fit(receipts)
        if not self._claim(epoch, receipts, is_empty=not opened):
            self._require_committed(epoch, opened)
            opened = []
        lost = self._end(epoch, opened)
        if lost:
            self._send_again(epoch, lost)
        elif opened:
            transaction_status.await_visible(self._client, [txn for _, txn in opened])
            self.pinned_s = time.monotonic() - self._opened_s if self._opened_s else 0.0
        self._held.clear()
        self._committed = epoch
        if self._spool is not None:
            self._spool.remove(receipt.handle for receipt in receipts)

    def _claim(self, epoch: EpochNumber, receipts: Sequence[Receipt], *, is_empty: bool) -> bool:
        metadata = ledger_metadata(self._identity.run)
        proof = (self._ids.group, ledger_entry(self._sink.topic, epoch, metadata))
        proves = [proof, *self._other_groups()] if is_empty else []
        timeout_ms = self._known_limits().own_timeout_ms
        return self._ledger.claim(self._client, epoch, receipts, proves, timeout_ms=timeout_ms)

    def _require_committed(self, epoch: EpochNumber, opened: Sequence[Prepared]) -> None:
        """Of an epoch that is not this driver's to end any more: these very transactions."""
        if any(self._proof(epoch, *one) is not Proof.COMMITTED for one in opened):
            raise copy_at_work(
                f"sink {self._identity.sink!r}: epoch {epoch} of topic {self._sink.topic}, or a "
                "later one, is claimed for transactions that this log did not decide"
            )

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        self._pool.forget()
        opened = self._opened(receipts)
        for _, txn in opened:
            self._held.pop(_key(txn), None)
        if opened:
            transaction_status.abort(
                self._client, [txn for _, txn in opened], self._known_limits().own_timeout_ms
            )
        if self._spool is not None:
            self._spool.remove(receipt.handle for receipt in receipts)

    # Listing and proof

    def in_doubt(self) -> Sequence[InDoubt]:
        found = transaction_status.list_open(self._client, self._ids, self._handle_of)
        if self._spool is None:
            return found
        known = {one.handle for one in found}
        kept = self._spool.listed(self._identity.uid, self._identity.tag)
        return [*found, *(one for one in kept if one.handle not in known)]

    def room(self) -> Room | None:
        """Of the spool, where there is one."""
        if self._spool is None:
            return None
        return Room(used_bytes=self._spool.size(self._identity.uid, self._identity.tag))

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        txn = transaction_of(receipt)
        if txn is None:
            is_proven = self._ledger.owner(self._client, epoch) in claims_of([receipt])
            return Proof.COMMITTED if is_proven else Proof.UNKNOWN
        self._require_cluster(txn)
        return self._proof(epoch, receipt, txn)

    def newest(self) -> Sequence[Mark] | None:
        """
        None where no ledger is found: the pipeline is new, or the brokers have forgotten its
        ledger, and that must not look like a topic that was emptied.
        """
        if self._committed is not None:
            self._proven_epoch(self._committed)
        return self._ledger.newest(self._client) or None

    def prune(self, below: EpochNumber) -> None:
        """The ledger is one number, the newest."""

    def recount(self) -> Recount:
        if self._sink.topic_from is not None:
            return Recount(rows=None, because="topic_from= may send rows to any topic")
        return operate.recount(self._client, self._sink.topic, self._ids)

    def drop(self, *, is_dry_run: bool) -> Dropped:
        if self._spool is not None and not is_dry_run:
            self._spool.forget(self._identity.uid, self._identity.tag)
        return operate.drop(self._client, self._ids, is_dry_run=is_dry_run)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    # The cluster

    @property
    def _client(self) -> Client:
        if self._kept is None:
            self._kept = self._sink.server.client(
                lanes=_LANES, patience_s=self._limits.commit_timeout_s
            )
        return self._kept

    def _known_limits(self) -> ClusterLimits:
        if self._cluster_limits is None:
            self._cluster_limits = read_limits(self._client, self._sink)
            self._limits_read_s = time.monotonic()
        return self._cluster_limits

    def _handout(self, slots: Mapping[int, tuple[int, int]] | None = None) -> Handout:
        known = self._known_limits()
        return Handout(
            cluster=known.cluster,
            group=self._ids.group,
            metadata=ledger_metadata(self._identity.run),
            timeout_ms=known.timeout_ms,
            is_v2=self._client.transaction_version() >= 2,
            batch_bytes_max=known.batch_bytes_max,
            partitions=known.partitions,
            slots=slots or {},
            location=self._identity.location,
        )

    def _other_groups(self) -> Sequence[tuple[str, transactions.GroupOffsets]]:
        """The group of `commit_offsets`, with the offsets of the epoch's Kafka sources."""
        if self._sink.commit_offsets is None or self._source_offsets is None:
            return ()
        offsets = _kafka_source_offsets(self._source_offsets)
        return [(self._sink.commit_offsets, offsets)] if offsets else ()

    def _opened(self, receipts: Sequence[Receipt]) -> list[Prepared]:
        found = []
        for receipt in receipts:
            txn = transaction_of(receipt)
            if txn is not None:
                self._require_cluster(txn)
                found.append((receipt, txn))
        return found

    def _require_cluster(self, txn: OpenTransaction) -> None:
        here = self._known_limits().cluster
        if txn.cluster and here and txn.cluster != here:
            raise Misconfigured(
                f"{txn.transactional_id} was prepared in the cluster {txn.cluster}, and "
                f"{self._sink.bootstrap} is the cluster {here}",
                "point the sink to the cluster that holds the prepared rows",
            )

    def _hold(self, opened: Sequence[Prepared]) -> None:
        self._held = {_key(txn): receipt.handle for receipt, txn in opened}

    # Ending transactions

    def _end(self, epoch: EpochNumber, opened: Sequence[Prepared]) -> list[Prepared]:
        """Commit all; return those that are proven aborted."""
        answers = transactions.end_transactions(
            self._client, [txn for _, txn in opened], is_commit=True
        )
        lost: list[Prepared] = []
        unclear: list[str] = []
        for (receipt, txn), answer in zip(opened, answers, strict=True):
            if isinstance(answer, Misconfigured):
                raise answer
            code = -1 if isinstance(answer, EpochalError) else answer.error_code
            require_rights(code, transactional_id=("Write", txn.transactional_id))
            if not isinstance(answer, EpochalError) and code == Code.NONE:
                self._pool.ended(txn, answer)
                continue
            found = self._proof(epoch, receipt, txn)
            if found is Proof.ABORTED:
                lost.append((receipt, txn))
            elif found is Proof.UNKNOWN:
                reason = answer.message if isinstance(answer, EpochalError) else code_name(code)
                unclear.append(f"{txn.transactional_id}: {reason}")
        if unclear:
            raise OutcomeUnknown(
                f"epoch {epoch}: {len(unclear)} of {len(opened)} transactions are neither proven "
                f"committed nor aborted; {unclear[0]}",
                "they are asked for again; `kafka-transactions.sh describe` shows their state",
            )
        return lost

    def _proof(self, epoch: EpochNumber, receipt: Receipt, txn: OpenTransaction) -> Proof:
        found = proof_of(self._client, txn)
        if found is Proof.ABORTED and self._resend is not None and txn.spooled:
            is_done = self._resend.is_done(self._client, epoch, receipt)
            return Proof.COMMITTED if is_done else Proof.ABORTED
        return found

    @property
    def _resend(self) -> Resend | None:
        if self._spool is None:
            return None
        return Resend(self._sink, self._ids, self._ledger, self._spool)

    def _send_again(self, epoch: EpochNumber, lost: Sequence[Prepared]) -> None:
        if self._resend is not None and all(txn.spooled for _, txn in lost):
            for receipt, _ in lost:
                self._resend.send(self._client, epoch, receipt, self._handout())
            return
        handles = tuple(str(receipt.handle) for receipt, _ in lost)
        raise PreparedLost(
            f"epoch {epoch}: the brokers aborted {quantity(len(lost), 'decided transaction')}, "
            f"{lost[0][1].transactional_id} among them",
            f"they were kept for {lost[0][1].timeout_ms / 1000:.0f} s: the driver was away longer; "
            "spool=… keeps rows so that they can be sent again without a replay",
            handles=handles,
        )

    def _handle_of(self, name: str, txn: OpenTransaction) -> Handle:
        """
        The attempt that left a transaction open. A slot's id does not name it: then it is known
        from `rehearse` or `commit`, or else no unsettled decision names the transaction.
        """
        named = self._ids.parse(name)
        if isinstance(named, Handle):
            return named
        known = self._held.get(_key(txn))
        if known is not None:
            return known
        mine = self._identity
        slot = named if isinstance(named, Slot) else Slot(mine.generation, mine.claim, 0)
        is_mine = slot.claim == mine.claim and self._epoch is not None
        return Handle(
            uid=self._identity.uid,
            generation=slot.generation,
            claim=slot.claim,
            epoch=EpochNumber(self._epoch or 0) if is_mine else EpochNumber(0),
            sink=self._identity.tag,
            partition=slot.number,
            attempt=0,
        )


def _key(txn: OpenTransaction) -> tuple[str, int, int]:
    return txn.transactional_id, txn.producer_id, txn.producer_epoch


def _kafka_source_offsets(offsets: Offsets) -> transactions.GroupOffsets:
    """Where the epoch ends in its Kafka sources; sources of other kinds are left out."""
    found: dict[str, dict[int, tuple[int, str]]] = {}
    for line in offsets.sources:
        for topic, partitions in _kafka_source(line).items():
            ends = found.setdefault(topic, {})
            ends |= {partition: (offset, "") for partition, offset in partitions.items()}
    return found


def _kafka_source(line: str) -> dict[str, dict[int, int]]:
    """Spark's Kafka source writes {"topic": {"0": 17}}. Anything else is another source."""
    try:
        return {
            str(topic): {int(partition): int(end) for partition, end in ends.items()}
            for topic, ends in json.loads(line).items()
        }
    except (AttributeError, TypeError, ValueError):
        return {}


class Resend:
    """
    Rows sent again from the spool, where a broker aborted a decided transaction.

    They are sent under an id that epoch and partition determine, and InitProducerId on it fences
    every other driver that sends the same rows. A consumer group that only this id commits to, in
    the transaction that sends the rows, records whether that was done:

        driver 1: InitProducerId(resend-e7-0) → (30, 0); the group is empty; sends the rows; stalls
        driver 2: InitProducerId(resend-e7-0) → (30, 1), which aborts (30, 0); the group is empty;
                  sends the rows, commits rows and group together
        driver 1: EndTxn as (30, 0)                     PRODUCER_FENCED: the rows are there once
    """

    def __init__(self, sink: Kafka, ids: TransactionalIds, ledger: Ledger, spool: RowSpool) -> None:
        self._sink = sink
        self._ids = ids
        self._ledger = ledger
        self._spool = spool

    def is_done(self, client: Client, epoch: EpochNumber, receipt: Receipt) -> bool:
        """
        Whether the rows of a receipt were sent again and are visible. A later epoch proves it too:
        none begins before the one before it is settled.
        """
        proven = self._ledger.at(client, self._group(receipt))
        return proven is not None and proven >= epoch

    def send(self, client: Client, epoch: EpochNumber, receipt: Receipt, handout: Handout) -> None:
        """Send a receipt's rows again and commit them, unless that is done."""
        name = self._ids.resend(epoch, receipt.handle.partition)
        producer = start_one(client, name, handout.timeout_ms)
        if self.is_done(client, epoch, receipt):
            return
        known = transaction_of(receipt)
        rows = self._spool.read(receipt.handle, rows=0 if known is None else known.spooled)
        first = next(rows)
        task = Task(handle=receipt.handle, schema=first.schema, handout=handout.to_json())
        writer = KafkaWriter(self._sink, task, producer=(name, producer))
        for batch in chain([first], rows):
            writer.write(batch)
        txn = transaction_of(writer.prepare())
        if txn is None:
            return
        metadata = ledger_metadata(self._ids.identity.run)
        entry = ledger_entry(self._sink.topic, epoch, metadata)
        add_offsets(client, txn, self._group(receipt), entry)
        commit_one(client, txn, "committing rows that were sent again")

    def _group(self, receipt: Receipt) -> str:
        return self._ids.resend_group(receipt.handle.partition)
