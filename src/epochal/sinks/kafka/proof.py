"""The proof of how a transaction ended (I9): its coordinator, then markers in the topic.

1. The coordinator describes the newest transaction of an id. If that is still the one in question,
   its state is the proof.
2. If the id has gone on since, or the broker has forgotten it, the topic has the proof. The receipt
   names a few rows by their offsets (witnesses); the first marker of the same producer behind such
   a row ended the transaction of that row:

       offset   batch
       40       rows of producer 9          ← witness of the receipt
       43       rows of producer 11
       45       COMMIT marker, producer 9   ← the proof: epoch 7 was committed
       46       rows of producer 9, epoch 8
       48       ABORT marker, producer 9      a later transaction

If retention has removed that place, nothing proves it. The ledger does not: each transaction of an
epoch commits its number, so one of them may have and another not, and a number above it may be of a
driver that works with a copy of the epoch log.
"""

from __future__ import annotations

from epochal.errors import EpochalError
from epochal.kafka import batch_reader
from epochal.kafka.batches import Marker
from epochal.kafka.client import Client
from epochal.kafka.cluster import Leader
from epochal.kafka.codes import Code
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from epochal.kafka.messages.fetch import PartitionData as FetchedPartition
from epochal.kafka.versions import UnsupportedRequest
from epochal.sinks.kafka.errors import require_rights
from epochal.sinks.kafka.receipts import OpenTransaction, Witness
from epochal.sinks.kafka.transaction_status import describe, is_open
from epochal.terms import Proof

_COMMITTING = frozenset({"PrepareCommit", "CompleteCommit"})
_ABORTING = frozenset({"PrepareAbort", "CompleteAbort", "PrepareEpochFence"})
_PROOFS = {Marker.COMMIT: Proof.COMMITTED, Marker.ABORT: Proof.ABORTED}
_SCAN_FETCHES_MAX = 10_000
_FETCH_BYTES = 1 << 20


def proof_of(client: Client, txn: OpenTransaction) -> Proof:
    """COMMITTED or ABORTED where that is proven; UNKNOWN while it is open, or without proof."""
    found = _by_coordinator(client, txn)
    return _by_markers(client, txn) if found is None else found


def _by_coordinator(client: Client, txn: OpenTransaction) -> Proof | None:
    """None where the coordinator describes another transaction, or none."""
    (state,) = describe(client, [txn.transactional_id])
    if isinstance(state, UnsupportedRequest):
        return None
    if isinstance(state, EpochalError):
        raise state
    if state.error_code == Code.TRANSACTIONAL_ID_NOT_FOUND:
        return None
    if is_open(state, txn):
        return Proof.UNKNOWN
    # The newer protocol raises the producer epoch with every end. In the older one, an epoch above
    # could also be a later transaction that was aborted, so only the same epoch counts there.
    ended_epoch = txn.producer_epoch + (1 if txn.is_v2 else 0)
    if (state.producer_id, state.producer_epoch) != (txn.producer_id, ended_epoch):
        return None
    if state.transaction_state in _COMMITTING:
        return Proof.COMMITTED
    return Proof.ABORTED if state.transaction_state in _ABORTING else None


def _by_markers(client: Client, txn: OpenTransaction) -> Proof:
    for witness in txn.witnesses:
        found = _scan(client, witness, txn.producer_id)
        if found is not None:
            return found
    return Proof.UNKNOWN


def _scan(client: Client, witness: Witness, producer_id: int) -> Proof | None:
    """By the first marker of a producer behind a row of its own."""
    at, offset = Leader(witness.topic, witness.partition), witness.offset
    for _ in range(_SCAN_FETCHES_MAX):
        part = fetch(client, at, offset)
        require_rights(part.error_code, topic=("Read", at.topic))
        if part.error_code != Code.NONE:
            return None
        here = list(batch_reader.read(part.records or b""))
        for batch in here:
            marker = batch.marker() if batch.producer_id == producer_id else None
            if marker is not None and batch.base_offset > witness.offset:
                return _PROOFS[marker]
        if not here or here[-1].last_offset + 1 >= part.high_watermark:
            return None
        offset = here[-1].last_offset + 1
    return None


def fetch(client: Client, at: Leader, offset: int) -> FetchedPartition:
    """
    The batches of a partition from an offset on, uncommitted ones included: an open transaction of
    another producer must not hide what is behind it.
    """
    wanted = FetchPartition(
        partition=at.partition, fetch_offset=offset, partition_max_bytes=_FETCH_BYTES
    )
    request = FetchRequest(
        max_wait_ms=10,
        min_bytes=1,
        max_bytes=_FETCH_BYTES,
        isolation_level=0,
        topics=[FetchTopic(topic=at.topic, partitions=[wanted])],
    )
    answer: FetchResponse = client.ask(
        request, at, code_of=lambda response: response.responses[0].partitions[0].error_code
    )
    return answer.responses[0].partitions[0]
