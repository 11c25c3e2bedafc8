"""What became of a transaction, by proof (I9).

First its coordinator is asked how the id stands. Where others have used the id since, the answer is
in the topic: behind a row of the transaction, the first marker of its producer says how it ended.
What neither tells, for retention has taken the place away, a ledger that has gone on does: no epoch
begins before the one before it is settled.
"""

from __future__ import annotations

from epochal.errors import EpochalError
from epochal.kafka import batch_reader
from epochal.kafka.batches import Marker
from epochal.kafka.client import Client
from epochal.kafka.cluster import Leader
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_transactions import TransactionState
from epochal.kafka.versions import NotSpoken
from epochal.sinks.kafka import ending, rights
from epochal.sinks.kafka.fetching import fetch
from epochal.sinks.kafka.tokens import Open, Witness
from epochal.terms import Proof

ONGOING = "Ongoing"
COMMITTING = frozenset({"PrepareCommit", "CompleteCommit"})
COMPLETE = "CompleteCommit"
_ABORTING = frozenset({"PrepareAbort", "CompleteAbort", "PrepareEpochFence"})
_PROOFS = {Marker.COMMIT: Proof.COMMITTED, Marker.ABORT: Proof.ABORTED}
_SCAN_FETCHES_MAX = 10_000


def is_open(told: TransactionState, txn: Open) -> bool:
    return told.transaction_state == ONGOING and _names(told, txn, txn.producer_epoch)


def proof_of(client: Client, txn: Open) -> Proof:
    """COMMITTED or ABORTED where that is proven; UNKNOWN while it is open, or can't be told."""
    found = _by_coordinator(client, txn)
    return _by_markers(client, txn) if found is None else found


def _by_coordinator(client: Client, txn: Open) -> Proof | None:
    """None where the coordinator's word is about another transaction, or there is none."""
    (told,) = ending.describe(client, [txn.transactional_id])
    if isinstance(told, NotSpoken):
        return None
    if isinstance(told, EpochalError):
        raise told
    if told.error_code == Code.TRANSACTIONAL_ID_NOT_FOUND:
        return None
    if is_open(told, txn):
        return Proof.UNKNOWN
    # The newer protocol raises the epoch with every end; in the older, one above could also be a
    # later transaction that was aborted, so there only the very epoch counts.
    ended_as = txn.producer_epoch + (1 if txn.is_v2 else 0)
    if told.transaction_state in COMMITTING and _names(told, txn, ended_as):
        return Proof.COMMITTED
    if told.transaction_state in _ABORTING and _names(told, txn, ended_as):
        return Proof.ABORTED
    return None


def is_complete(told: TransactionState, txn: Open) -> bool:
    """Whether readers see it: its markers are written, or the id has gone on since."""
    return not (told.transaction_state == "PrepareCommit" and told.producer_id == txn.producer_id)


def _names(told: TransactionState, txn: Open, epoch: int) -> bool:
    return (told.producer_id, told.producer_epoch) == (txn.producer_id, epoch)


def _by_markers(client: Client, txn: Open) -> Proof:
    for witness in txn.witnesses:
        found = _scan(client, witness, txn.producer_id)
        if found is not None:
            return found
    return Proof.UNKNOWN


def _scan(client: Client, witness: Witness, producer_id: int) -> Proof | None:
    """The first marker of a producer behind a row of its own."""
    at, offset = Leader(witness.topic, witness.partition), witness.offset
    for _ in range(_SCAN_FETCHES_MAX):
        part = fetch(client, at, offset)
        rights.require(part.error_code, topic=("Read", at.topic))
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
