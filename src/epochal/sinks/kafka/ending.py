"""What may be asked of a transaction by whoever knows its name: begin, describe, add to, end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.kafka import faults
from epochal.kafka.client import Ask, Client, group_coordinator
from epochal.kafka.cluster import Coordinator
from epochal.kafka.codes import Code
from epochal.kafka.messages.add_offsets_to_txn import AddOffsetsToTxnRequest
from epochal.kafka.messages.describe_transactions import (
    DescribeTransactionsRequest,
    DescribeTransactionsResponse,
    TransactionState,
)
from epochal.kafka.messages.end_txn import EndTxnRequest, EndTxnResponse
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from epochal.kafka.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
    TxnOffsetCommitResponse,
)
from epochal.sinks.kafka import rights
from epochal.sinks.kafka.tokens import Open

_OLDER_END = 4
_OLDER_OFFSETS = 4
_NOBODY = (-1, -1)

ENDED = frozenset(
    (
        Code.PRODUCER_FENCED,
        Code.INVALID_PRODUCER_EPOCH,
        Code.INVALID_PRODUCER_ID_MAPPING,
        Code.INVALID_TXN_STATE,
        Code.TRANSACTION_ABORTABLE,
        Code.OUT_OF_ORDER_SEQUENCE_NUMBER,
        Code.UNKNOWN_PRODUCER_ID,
    )
)
"""The transaction is no longer the asker's: it took too long, or somebody aborted it."""


class Ended(TryAgain):
    """
    A transaction was ended by somebody else before it was complete: nothing of it was shown.

    Never `Fenced`: a task is told of its own transaction only, not of its driver.
    """


def require_going_on(code: int, txn: Open, about: str) -> None:
    """Raise where a code says that a transaction is over, or that something else is wrong."""
    rights.require(code, transactional_id=("Write", txn.transactional_id))
    if code in ENDED:
        seconds = f"it has {txn.timeout_ms / 1000:.0f} s: " if txn.timeout_ms else ""
        raise Ended(
            f"{about}: {faults.name_of(code)}: the transaction {txn.transactional_id} was ended by "
            "somebody else",
            f"{seconds}a longer transaction_timeout_s, or smaller epochs",
        )
    faults.check(code, about)


Offsets = Mapping[str, Mapping[int, tuple[int, str]]]
"""Topic → partition → offset and the word beside it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """A transactional id to be made ready."""

    transactional_id: str
    timeout_ms: int
    expected: tuple[int, int] = _NOBODY
    """Only if this producer id and epoch are still the newest; else it is left alone."""


def start(client: Client, starts: Sequence[Start]) -> list[InitProducerIdResponse | EpochalError]:
    """Fresh producer epochs, many at once; what was open under these ids is aborted."""
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
    (answer,) = start(client, [Start(transactional_id=transactional_id, timeout_ms=timeout_ms)])
    return given(answer, transactional_id, timeout_ms)


def given(
    answer: InitProducerIdResponse | EpochalError, transactional_id: str, timeout_ms: int
) -> tuple[int, int]:
    if isinstance(answer, EpochalError):
        raise answer
    if answer.error_code == Code.INVALID_TRANSACTION_TIMEOUT:
        raise Misconfigured(
            f"the brokers don't allow a transaction of {timeout_ms / 1000:.0f} s",
            "a shorter transaction_timeout_s, or transaction.max.timeout.ms of the brokers",
        )
    rights.require(answer.error_code, transactional_id=("Write", transactional_id))
    if answer.error_code in ENDED:
        raise Ended(f"{transactional_id} is being begun or ended by somebody else just now")
    faults.check(answer.error_code, f"beginning {transactional_id}")
    return answer.producer_id, answer.producer_epoch


def describe(client: Client, ids: Sequence[str]) -> list[TransactionState | EpochalError]:
    """How each stands. Brokers before 3.0 can't say: `NotSpoken` for each of them."""
    client.locate([Coordinator(one) for one in ids])
    answers: list[DescribeTransactionsResponse | EpochalError] = client.ask_all(
        [
            Ask(
                request=DescribeTransactionsRequest(transactional_ids=[one]),
                to=Coordinator(one),
                code_of=lambda answer: answer.transaction_states[0].error_code,
            )
            for one in ids
        ]
    )
    return [
        answer if isinstance(answer, EpochalError) else _described(answer.transaction_states[0])
        for answer in answers
    ]


def _described(told: TransactionState) -> TransactionState | EpochalError:
    """One that may not be seen must not pass for one that is not open."""
    try:
        rights.require(told.error_code, transactional_id=("Describe", told.transactional_id))
    except Misconfigured as denied:
        return denied
    return told


def end(
    client: Client, txns: Sequence[Open], *, is_commit: bool
) -> list[EndTxnResponse | EpochalError]:
    """Commit or abort many at once. Producer id and epoch name one transaction: may be repeated."""
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
                version_max=None if txn.is_v2 else _OLDER_END,
            )
            for txn in txns
        ]
    )


def add_offsets(client: Client, txn: Open, group: str, offsets: Offsets) -> None:
    """Let a transaction commit offsets of a group as well. May be repeated."""
    if not txn.is_v2:
        request = AddOffsetsToTxnRequest(
            transactional_id=txn.transactional_id,
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            group_id=group,
        )
        answer = client.ask(request, Coordinator(txn.transactional_id), is_repeatable=True)
        rights.require(answer.error_code, group=("Read", group))
        require_going_on(answer.error_code, txn, f"adding the group {group}")
    told = client.ask(
        _offsets_request(txn, group, offsets),
        group_coordinator(group),
        is_repeatable=True,
        code_of=_worst,
        version_max=None if txn.is_v2 else _OLDER_OFFSETS,
    )
    rights.require(_worst(told), group=("Read", group), topic=("Read", ", ".join(offsets)))
    require_going_on(_worst(told), txn, f"committing offsets of the group {group}")


def _offsets_request(txn: Open, group: str, offsets: Offsets) -> TxnOffsetCommitRequest:
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
                        partition_index=index, committed_offset=offset, committed_metadata=word
                    )
                    for index, (offset, word) in partitions.items()
                ],
            )
            for topic, partitions in offsets.items()
        ],
    )


def _worst(answer: TxnOffsetCommitResponse) -> int:
    codes = (part.error_code for topic in answer.topics for part in topic.partitions)
    return next((code for code in codes if code != Code.NONE), Code.NONE)
