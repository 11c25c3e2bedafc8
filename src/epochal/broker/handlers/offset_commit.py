"""OffsetCommit: keep how far a group has read."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.broker.core.entries import OffsetRow
from epochal.broker.core.group_members import Sender
from epochal.kafka.codes import Code
from epochal.kafka.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitRequestPartition,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from epochal.kafka.messages.txn_offset_commit import TxnOffsetCommitRequestPartition

VERSIONS = range(2, 10)
_EPOCHS_FROM = 9


def handle(call: Call, request: OffsetCommitRequest) -> OffsetCommitResponse:
    broker = call.broker
    sender = Sender(
        request.member_id, request.group_instance_id, request.generation_id_or_member_epoch
    )
    groups = broker.state.groups
    is_versioned = call.version >= _EPOCHS_FROM
    code, but_for = groups.check_commit(
        request.group_id, sender, is_transactional=False, is_versioned=is_versioned
    )
    if code is Code.ILLEGAL_GENERATION and is_versioned and request.group_id not in groups:
        code = Code.GROUP_ID_NOT_FOUND
    rows: list[OffsetRow] = []
    topics: list[OffsetCommitResponseTopic] = []
    for topic in request.topics:
        result: list[OffsetCommitResponsePartition] = []
        for part in topic.partitions:
            is_exempt = (topic.name, part.partition_index) in but_for
            here, row = checked_offset(call, Code.NONE if is_exempt else code, topic.name, part)
            rows += row
            result.append(
                OffsetCommitResponsePartition(partition_index=part.partition_index, error_code=here)
            )
        topics.append(OffsetCommitResponseTopic(name=topic.name, partitions=result))
    if code is Code.NONE:
        groups.classic.heard(request.group_id, request.member_id, broker.now_ms)
        groups.ensure(request.group_id, broker.now_ms)
    broker.state.offsets.commit(request.group_id, rows)
    return OffsetCommitResponse(topics=topics)


def checked_offset(
    call: Call,
    code: Code,
    topic: str,
    part: OffsetCommitRequestPartition | TxnOffsetCommitRequestPartition,
) -> tuple[Code, list[OffsetRow]]:
    """Whether the offset of one partition may be kept, and if so the row that keeps it."""
    place, metadata = (topic, part.partition_index), part.committed_metadata or ""
    code = code or _check(call, place, metadata)
    if code != Code.NONE:
        return code, []
    epoch = part.committed_leader_epoch
    return code, [(*place, part.committed_offset, epoch, metadata, call.broker.now_ms)]


def _check(call: Call, place: tuple[str, int], metadata: str) -> Code:
    if call.broker.partition(*place) is None:
        return Code.UNKNOWN_TOPIC_OR_PARTITION
    if len(metadata.encode()) > call.broker.settings.offset_metadata_bytes_max:
        return Code.OFFSET_METADATA_TOO_LARGE
    return Code.NONE
