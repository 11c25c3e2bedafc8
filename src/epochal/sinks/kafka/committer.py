"""Carries decisions out: ends the transactions that tasks left open, and proves how they ended.

    EndTxn answers NONE                     committed, now or by an earlier call
    anything else                           ask for proof (I9)
    proven aborted                          sent again from the spool, or `PreparedLost`
    neither proven                          `OutcomeUnknown`: asked again

How transactions stand, what lists them and what aborts them are rooms of their own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import pyarrow as pa

from epochal.contract import Begin, Deadline, Dropped, Limits, Operable, Recount
from epochal.errors import EpochalError, Misconfigured, OutcomeUnknown, PreparedLost
from epochal.kafka import faults
from epochal.kafka.client import Client
from epochal.kafka.cluster import Leader
from epochal.kafka.codes import Code
from epochal.kit.spool import require_seen
from epochal.sinks.kafka import (
    aborting,
    dropping,
    ending,
    facts,
    listing,
    proof,
    recounting,
    rights,
    standing,
)
from epochal.sinks.kafka.again import Resending
from epochal.sinks.kafka.ledger import Ledger, word
from epochal.sinks.kafka.names import Names, Slot
from epochal.sinks.kafka.pool import Pool
from epochal.sinks.kafka.shaping import value_type
from epochal.sinks.kafka.source_offsets import group_offsets
from epochal.sinks.kafka.tokens import Handout, Open, open_in
from epochal.terms import (
    Ability,
    EpochNumber,
    Handle,
    Identity,
    InDoubt,
    Json,
    Mark,
    Offsets,
    Proof,
    Receipt,
    quantity,
)

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka

_LANES = 8
"""Connections to a broker, which works on one request of each at a time."""
_FACTS_AGE_MAX_S = 300.0
"""As often as other clients look: partitions may have been added."""


class KafkaCommitter(Operable):
    def __init__(self, sink: Kafka, identity: Identity, limits: Limits) -> None:
        self._sink = sink
        self._identity = identity
        self._limits = limits
        self._names = Names(sink.transactional_id_prefix, identity)
        self._ledger = Ledger(self._names, sink.topic)
        self._pool = Pool(self._names)
        self._spool = sink.row_spool(identity.location)
        self._value_type: pa.DataType | None = None
        self._kept: Client | None = None
        self._facts: facts.Facts | None = None
        self._asked_s = 0.0
        self._epoch: EpochNumber | None = None
        self._began_s: float | None = None
        self._prepared_s = 0.0
        self._held: dict[tuple[str, int, int], Handle] = {}
        """Transactions of the epoch at hand: not to be touched before it is known how they end."""
        self._source: Offsets | None = None
        self.pinned_s = 0.0
        """How long the last epoch's transactions held readers back, about."""

    # Before the decision

    def check(self, schema: pa.Schema | None) -> Sequence[Ability]:
        found = facts.check(self._client, self._sink, self._names, self._ledger, schema)
        if schema is not None:
            self._value_type = value_type(self._sink, schema)
            self._sink.made_of.ready(self._sink.topic, self._value_type, is_trial=True)
        if self._spool is not None:
            self._spool.place.files("rows")
        return found

    def begin(self, begin: Begin) -> Json:
        if self._sink.spool and self._spool is None:
            raise Misconfigured(
                "Kafka(spool=True): this pipeline has no place of its own to keep rows in",
                "name one that driver and executors share: spool=…",
            )
        if time.monotonic() - self._asked_s > _FACTS_AGE_MAX_S:
            self._facts = None
            self._client.forget(Leader(self._sink.topic, 0))
        known = self._known()
        held = {name for name, _, _ in self._held}
        slots = self._pool.ready(self._client, timeout_ms=known.timeout_ms, held=held)
        self._epoch, self._began_s = begin.epoch, time.monotonic()
        self._source = begin.offsets
        return replace(self._handout(slots), value=self._value()).to_json()

    def _value(self) -> Json:
        if self._value_type is None:
            return None
        return self._sink.made_of.ready(self._sink.topic, self._value_type)

    def rehearse(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> Deadline | None:
        """All rows are acknowledged: what is asked is whether the transactions are still open."""
        self._prepared_s = time.monotonic()
        opened = self._opened(receipts)
        self._hold(opened)
        self._pool.fit(receipts)
        if self._spool is not None:
            require_seen(self._spool, epoch, receipts)
        standing.require_open(self._client, epoch, [txn for _, txn in opened])
        extra = self._extra()
        if extra and opened:
            for group, offsets in extra:
                ending.add_offsets(self._client, opened[0][1], group, offsets)
        return self._deadline(epoch, [txn for _, txn in opened])

    def _deadline(self, epoch: EpochNumber, opened: Sequence[Open]) -> Deadline | None:
        """When the first of these transactions may time out: none is older than this epoch."""
        if not opened or self._began_s is None or self._epoch != epoch:
            return None
        kept_s = min(txn.timeout_ms for txn in opened) / 1000
        return Deadline(
            at_s=self._began_s + kept_s,
            kept_s=kept_s,
            hint="smaller epochs, or a longer transaction_timeout_s (transaction.max.timeout.ms)",
        )

    # After it

    def commit(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:
        opened = self._opened(receipts)
        self._hold(opened)
        self._pool.fit(receipts)
        lost = self._end(epoch, opened)
        if lost:
            self._write_again(epoch, lost)
        elif not opened:
            self._ledger.record(self._client, epoch, self._extra())
        else:
            standing.await_visible(self._client, [txn for _, txn in opened])
            self.pinned_s = (
                max(txn.open_s for _, txn in opened) + time.monotonic() - self._prepared_s
                if self._prepared_s
                else 0.0
            )
        self._held.clear()
        if self._spool is not None:
            self._spool.remove(receipt.handle for receipt in receipts)

    def abort(self, epoch: EpochNumber, receipts: Sequence[Receipt]) -> None:  # noqa: ARG002
        self._pool.forget()
        opened = self._opened(receipts)
        for _, txn in opened:
            self._held.pop(_key(txn), None)
        if opened:
            aborting.abort(self._client, [txn for _, txn in opened], self._known().timeout_ms)
        if self._spool is not None:
            self._spool.remove(receipt.handle for receipt in receipts)

    # What is there

    def in_doubt(self) -> Sequence[InDoubt]:
        found = listing.listed(self._client, self._names, self._whose)
        if self._spool is None:
            return found
        known = {one.handle for one in found}
        kept = self._spool.listed(self._identity.uid, self._identity.tag)
        return [*found, *(one for one in kept if one.handle not in known)]

    def outcome(self, epoch: EpochNumber, receipt: Receipt) -> Proof:
        txn = open_in(receipt)
        if txn is None:
            proven = self._ledger.own(self._client)
            is_proven = proven is not None and proven >= epoch
            return Proof.COMMITTED if is_proven else Proof.UNKNOWN
        self._require_cluster(txn)
        return self._proof(epoch, receipt, txn)

    def newest(self) -> Sequence[Mark] | None:
        """
        None where no ledger is found at all: a pipeline that is new, or one whose ledger the
        brokers have forgotten, which must not pass for a topic that was emptied.
        """
        return self._ledger.newest(self._client) or None

    def prune(self, below: EpochNumber) -> None:
        """There is one number, the newest."""

    def recount(self) -> Recount:
        return recounting.recount(self._client, self._sink.topic, self._names)

    def drop(self, *, is_dry_run: bool) -> Dropped:
        if self._spool is not None and not is_dry_run:
            self._spool.forget(self._identity.uid, self._identity.tag)
        return dropping.drop(self._client, self._names, is_dry_run=is_dry_run)

    def close(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    # Asking

    @property
    def _client(self) -> Client:
        if self._kept is None:
            self._kept = self._sink.server.client(
                lanes=_LANES, patience_s=self._limits.commit_timeout_s
            )
        return self._kept

    def _known(self) -> facts.Facts:
        if self._facts is None:
            self._facts = facts.gather(self._client, self._sink)
            self._asked_s = time.monotonic()
        return self._facts

    def _handout(self, slots: Mapping[int, tuple[int, int]] | None = None) -> Handout:
        known = self._known()
        return Handout(
            cluster=known.cluster,
            group=self._names.group,
            word=word(self._identity.run),
            timeout_ms=known.timeout_ms,
            is_v2=self._client.transaction_version() >= 2,
            batch_bytes_max=known.batch_bytes_max,
            partitions=known.partitions,
            slots=slots or {},
            location=self._identity.location,
        )

    def _extra(self) -> Sequence[tuple[str, ending.Offsets]]:
        """The source's offsets for the group that was asked for."""
        if self._sink.commit_offsets is None or self._source is None:
            return ()
        offsets = group_offsets(self._source)
        return [(self._sink.commit_offsets, offsets)] if offsets else ()

    def _opened(self, receipts: Sequence[Receipt]) -> list[tuple[Receipt, Open]]:
        found = []
        for receipt in receipts:
            txn = open_in(receipt)
            if txn is not None:
                self._require_cluster(txn)
                found.append((receipt, txn))
        return found

    def _require_cluster(self, txn: Open) -> None:
        here = self._known().cluster
        if txn.cluster and here and txn.cluster != here:
            raise Misconfigured(
                f"{txn.transactional_id} was prepared in the cluster {txn.cluster}, and "
                f"{self._sink.server.place} is the cluster {here}",
                "point the sink to the cluster that holds the prepared rows",
            )

    def _hold(self, opened: Sequence[tuple[Receipt, Open]]) -> None:
        self._held = {_key(txn): receipt.handle for receipt, txn in opened}

    # Ending

    def _end(
        self, epoch: EpochNumber, opened: Sequence[tuple[Receipt, Open]]
    ) -> list[tuple[Receipt, Open]]:
        """Commit all; returns those that are proven aborted."""
        answers = ending.end(self._client, [txn for _, txn in opened], is_commit=True)
        lost: list[tuple[Receipt, Open]] = []
        unclear: list[str] = []
        for (receipt, txn), answer in zip(opened, answers, strict=True):
            if isinstance(answer, Misconfigured):
                raise answer
            code = -1 if isinstance(answer, EpochalError) else answer.error_code
            rights.require(code, transactional_id=("Write", txn.transactional_id))
            if not isinstance(answer, EpochalError) and code == Code.NONE:
                self._pool.ended(txn, answer)
                continue
            found = self._proof(epoch, receipt, txn)
            if found is Proof.ABORTED:
                lost.append((receipt, txn))
            elif found is Proof.UNKNOWN:
                said = answer.message if isinstance(answer, EpochalError) else faults.name_of(code)
                unclear.append(f"{txn.transactional_id}: {said}")
        if unclear:
            raise OutcomeUnknown(
                f"epoch {epoch}: {len(unclear)} of {len(opened)} transactions are neither proven "
                f"committed nor aborted; {unclear[0]}",
                "they are asked for again; `kafka-transactions.sh describe` shows how they stand",
            )
        return lost

    def _proof(self, epoch: EpochNumber, receipt: Receipt, txn: Open) -> Proof:
        found = proof.proof_of(self._client, txn)
        if found is Proof.ABORTED and self._resending is not None and txn.spooled:
            is_done = self._resending.is_done(self._client, epoch, receipt)
            return Proof.COMMITTED if is_done else Proof.ABORTED
        if found is Proof.UNKNOWN and not standing.is_open(self._client, txn):
            proven = self._ledger.own(self._client)
            return Proof.COMMITTED if proven is not None and proven > epoch else found
        return found

    @property
    def _resending(self) -> Resending | None:
        if self._spool is None:
            return None
        return Resending(self._sink, self._names, self._ledger, self._spool)

    def _write_again(self, epoch: EpochNumber, lost: Sequence[tuple[Receipt, Open]]) -> None:
        if self._resending is not None and all(txn.spooled for _, txn in lost):
            for receipt, _ in lost:
                self._resending.send(self._client, epoch, receipt, self._handout())
            return
        handles = tuple(str(receipt.handle) for receipt, _ in lost)
        raise PreparedLost(
            f"epoch {epoch}: the brokers aborted {quantity(len(lost), 'decided transaction')}, "
            f"{lost[0][1].transactional_id} among them",
            f"they were kept for {lost[0][1].timeout_ms / 1000:.0f} s: the driver was away longer; "
            "spool=… keeps rows so that they can be sent again without a replay",
            handles=handles,
        )

    def _whose(self, name: str, txn: Open) -> Handle:
        """
        Whose an open transaction is. A slot does not name the attempt: where this driver was not
        told of it, by `rehearse` or `commit`, no decision that stands names it either.
        """
        named = self._names.parse(name)
        if isinstance(named, Handle):
            return named
        known = self._held.get(_key(txn))
        if known is not None:
            return known
        slot = named if isinstance(named, Slot) else Slot(self._identity.generation, 0)
        is_mine = slot.generation == self._identity.generation and self._epoch is not None
        return Handle(
            uid=self._identity.uid,
            generation=slot.generation,
            epoch=EpochNumber(self._epoch or 0) if is_mine else EpochNumber(0),
            sink=self._identity.tag,
            partition=slot.number,
            attempt=0,
        )


def _key(txn: Open) -> tuple[str, int, int]:
    return txn.transactional_id, txn.producer_id, txn.producer_epoch
