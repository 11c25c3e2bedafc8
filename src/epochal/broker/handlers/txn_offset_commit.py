"""TxnOffsetCommit: offsets that become a group's if the transaction commits."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.entries import OffsetRow
from epochal.broker.core.group_members import CommitCheck, Sender
from epochal.broker.handlers.offset_commit import checked_offset
from epochal.kafka.codes import Code
from epochal.kafka.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)

VERSIONS = range(6)
NEWER_FROM = 5
_ABORTABLE_FROM = 4


def handle(call: Call, request: TxnOffsetCommitRequest) -> TxnOffsetCommitResponse:
    broker = call.broker
    code, but_for = _check(call, request)
    rows: list[OffsetRow] = []
    topics: list[TxnOffsetCommitResponseTopic] = []
    for topic in request.topics:
        result: list[TxnOffsetCommitResponsePartition] = []
        for part in topic.partitions:
            is_exempt = (topic.name, part.partition_index) in but_for
            here, row = checked_offset(call, Code.NONE if is_exempt else code, topic.name, part)
            rows += row
            result.append(
                TxnOffsetCommitResponsePartition(
                    partition_index=part.partition_index, error_code=here
                )
            )
        topics.append(TxnOffsetCommitResponseTopic(name=topic.name, partitions=result))
    if code is Code.NONE:
        broker.state.groups.ensure(request.group_id, broker.now_ms)
    broker.state.offsets.commit_later(request.group_id, request.producer_id, rows)
    return TxnOffsetCommitResponse(topics=topics)


def _check(call: Call, request: TxnOffsetCommitRequest) -> CommitCheck:
    if not request.group_id:
        return CommitCheck(Code.INVALID_GROUP_ID)
    who = (request.transactional_id, request.producer_id, request.producer_epoch)
    transactions = call.broker.state.transactions
    if call.version >= NEWER_FROM:
        code = transactions.add(who, (), (request.group_id,), call.broker.now_ms)
    else:
        code = transactions.verify(who, group=request.group_id)
    if code is Code.PRODUCER_FENCED:
        code = Code.INVALID_PRODUCER_EPOCH
    if code is Code.TRANSACTION_ABORTABLE and call.version < _ABORTABLE_FROM:
        code = Code.INVALID_TXN_STATE
    if code is not Code.NONE:
        return CommitCheck(code)
    sender = Sender(request.member_id, request.group_instance_id, request.generation_id)
    groups = call.broker.state.groups
    return groups.check_commit(request.group_id, sender, is_transactional=True)
