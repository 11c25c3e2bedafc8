"""Requests on a transaction by its id: InitProducerId, AddOffsetsToTxn, TxnOffsetCommit, EndTxn.

Tasks and driver both send them. Each may be repeated: a request names the transaction by producer
id and producer epoch, and never reaches another one (`transactional_ids` has the reasons).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epochal.errors import EpochalError, Misconfigured
from epochal.kafka.client import Ask, Client, group_coordinator
from epochal.kafka.cluster import Coordinator
from epochal.kafka.codes import Code
from epochal.kafka.errors import require_ok
from epochal.kafka.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from epochal.kafka.messages.end_txn import EndTxnRequest, EndTxnResponse
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from epochal.kafka.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from epochal.sinks.kafka.errors import ENDED, TransactionEnded, require_ongoing, require_rights
from epochal.sinks.kafka.receipts import OpenTransaction

_V1_END_TXN_MAX = 4
_V1_TXN_OFFSET_COMMIT_MAX = 4
"""The highest versions of requests that belong to the older transaction protocol."""
_ANY_PRODUCER = (-1, -1)

GroupOffsets = Mapping[str, Mapping[int, tuple[int, str]]]
"""Topic → partition → offset and its metadata."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProducerStart:
    """A transactional id to run InitProducerId on."""

    transactional_id: str
    timeout_ms: int
    expected: tuple[int, int] = _ANY_PRODUCER
    """Only if this producer id and epoch are still the newest; otherwise nothing changes."""


def start_producers(
    client: Client, starts: Sequence[ProducerStart]
) -> list[InitProducerIdResponse | EpochalError]:
    """Get new producer epochs, many at once. Transactions open under these ids are aborted."""
    client.locate([Coordinator(one.transactional_id) for one in starts])
    return client.ask_all(
        [
            Ask(
                request=InitProducerIdRequest(
                    transactional_id=one.transactional_id,
                    transaction_timeout_ms=one.timeout_ms,
                    producer_id=one.expected[0],
                    producer_epoch=one.expected[1],
                ),
                to=Coordinator(one.transactional_id),
                is_repeatable=True,
            )
            for one in starts
        ]
    )


def start_one(client: Client, transactional_id: str, timeout_ms: int) -> tuple[int, int]:
    """A new producer id and epoch of one transactional id."""
    (answer,) = start_producers(
        client, [ProducerStart(transactional_id=transactional_id, timeout_ms=timeout_ms)]
    )
    if isinstance(answer, EpochalError):
        raise answer
    code = answer.error_code
    if code == Code.INVALID_TRANSACTION_TIMEOUT:
        raise timeout_refused(timeout_ms)
    require_rights(code, transactional_id=("Write", transactional_id))
    if code in ENDED:
        raise TransactionEnded(
            f"another process is starting or ending a transaction of {transactional_id} now"
        )
    require_ok(code, f"starting {transactional_id}")
    return answer.producer_id, answer.producer_epoch


def timeout_refused(timeout_ms: float) -> Misconfigured:
    return Misconfigured(
        f"the brokers don't allow a transaction of {timeout_ms / 1000:.0f} s",
        "a shorter transaction_timeout_s, or transaction.max.timeout.ms of the brokers",
    )


def end_transactions(
    client: Client, txns: Sequence[OpenTransaction], *, is_commit: bool
) -> list[EndTxnResponse | EpochalError]:
    """Commit or abort many at once. May be repeated."""
    client.locate([Coordinator(txn.transactional_id) for txn in txns])
    return client.ask_all(
        [
            Ask(
                request=EndTxnRequest(
                    transactional_id=txn.transactional_id,
                    producer_id=txn.producer_id,
                    producer_epoch=txn.producer_epoch,
                    committed=is_commit,
                ),
                to=Coordinator(txn.transactional_id),
                is_repeatable=True,
                version_max=None if txn.is_v2 else _V1_END_TXN_MAX,
            )
            for txn in txns
        ]
    )


def commit_one(client: Client, txn: OpenTransaction, about: str) -> EndTxnResponse:
    """Commit one transaction or raise."""
    (answer,) = end_transactions(client, [txn], is_commit=True)
    if isinstance(answer, EpochalError):
        raise answer
    require_ongoing(answer.error_code, txn, about)
    return answer


def add_offsets(client: Client, txn: OpenTransaction, group: str, offsets: GroupOffsets) -> None:
    """Make offsets of a consumer group part of a transaction. May be repeated."""
    if not txn.is_v2:
        request = AddOffsetsToTxnRequest(
            transactional_id=txn.transactional_id,
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            group_id=group,
        )
        added = client.ask(request, Coordinator(txn.transactional_id), is_repeatable=True)
        require_rights(added.error_code, group=("Read", group))
        require_ongoing(added.error_code, txn, f"adding the group {group}")
    answer = client.ask(
        _offsets_request(txn, group, offsets),
        group_coordinator(group),
        is_repeatable=True,
        code_of=_first_error,
        version_max=None if txn.is_v2 else _V1_TXN_OFFSET_COMMIT_MAX,
    )
    code = _first_error(answer)
    require_rights(code, group=("Read", group), topic=("Read", ", ".join(offsets)))
    require_ongoing(code, txn, f"committing offsets of the group {group}")


def _offsets_request(
    txn: OpenTransaction, group: str, offsets: GroupOffsets
) -> TxnOffsetCommitRequest:
    return TxnOffsetCommitRequest(
        transactional_id=txn.transactional_id,
        group_id=group,
        producer_id=txn.producer_id,
        producer_epoch=txn.producer_epoch,
        topics=[
            TxnOffsetCommitRequestTopic(
                name=topic,
                partitions=[
                    TxnOffsetCommitRequestPartition(
                        partition_index=index, committed_offset=offset, committed_metadata=metadata
                    )
                    for index, (offset, metadata) in partitions.items()
                ],
            )
            for topic, partitions in offsets.items()
        ],
    )


def _first_error(answer: TxnOffsetCommitResponse) -> int:
    codes = (part.error_code for topic in answer.topics for part in topic.partitions)
    return next((code for code in codes if code != Code.NONE), Code.NONE)
