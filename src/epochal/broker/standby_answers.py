"""What a standby answers to requests that only the active can carry out.

NOT_LEADER_OR_FOLLOWER or NOT_COORDINATOR: the client asks for metadata again, which names the
active. To be cut off means the same to most clients; some take it for a server that wants SASL.

Tools ask every broker for its own groups and transactions, and put the answers together: a standby
has none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from epochal.kafka.codes import Code
from epochal.kafka.messages.add_offsets_to_txn import (
    AddOffsetsToTxnRequest,
    AddOffsetsToTxnResponse,
)
from epochal.kafka.messages.add_partitions_to_txn import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnTopicResult,
)
from epochal.kafka.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    ConsumerGroupHeartbeatResponse,
)
from epochal.kafka.messages.end_txn import EndTxnRequest, EndTxnResponse
from epochal.kafka.messages.fetch import (
    FetchableTopicResponse,
    FetchRequest,
    FetchResponse,
    PartitionData,
)
from epochal.kafka.messages.heartbeat import HeartbeatRequest, HeartbeatResponse
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest, InitProducerIdResponse
from epochal.kafka.messages.join_group import JoinGroupRequest, JoinGroupResponse
from epochal.kafka.messages.leave_group import LeaveGroupRequest, LeaveGroupResponse
from epochal.kafka.messages.list_groups import ListGroupsRequest, ListGroupsResponse
from epochal.kafka.messages.list_offsets import (
    ListOffsetsPartitionResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from epochal.kafka.messages.list_transactions import (
    ListTransactionsRequest,
    ListTransactionsResponse,
)
from epochal.kafka.messages.offset_commit import (
    OffsetCommitRequest,
    OffsetCommitResponse,
    OffsetCommitResponsePartition,
    OffsetCommitResponseTopic,
)
from epochal.kafka.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
)
from epochal.kafka.messages.produce import (
    PartitionProduceResponse,
    ProduceRequest,
    ProduceResponse,
    TopicProduceResponse,
)
from epochal.kafka.messages.sync_group import SyncGroupRequest, SyncGroupResponse
from epochal.kafka.messages.txn_offset_commit import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitResponse,
    TxnOffsetCommitResponsePartition,
    TxnOffsetCommitResponseTopic,
)
from epochal.kafka.primitives import Message

_OFFSETS_CODE_FROM, _GROUPS_FROM = 2, 8
"""OffsetFetch: the first versions with a code for the whole answer, and with one for each group."""
_ADDED_CODE_FROM = 4
"""AddPartitionsToTxn: the first version with a code for the whole answer."""

_BY_CODE: Mapping[type[Message], Callable[..., Message]] = {
    AddOffsetsToTxnRequest: AddOffsetsToTxnResponse,
    ConsumerGroupHeartbeatRequest: ConsumerGroupHeartbeatResponse,
    EndTxnRequest: EndTxnResponse,
    HeartbeatRequest: HeartbeatResponse,
    InitProducerIdRequest: InitProducerIdResponse,
    JoinGroupRequest: JoinGroupResponse,
    LeaveGroupRequest: LeaveGroupResponse,
    SyncGroupRequest: SyncGroupResponse,
}


_EMPTY: Mapping[type[Message], Callable[[], Message]] = {
    ListGroupsRequest: ListGroupsResponse,
    ListTransactionsRequest: ListTransactionsResponse,
}


def refusal(request: Message, version: int) -> Message | None:
    """
    None: the request has no answer that says so, and its connection is cut. So is that of one for
    the id of a producer without transactions, which clients ask of any broker that they are
    connected to: with an answer they would ask this one for ever.
    """
    if isinstance(request, InitProducerIdRequest) and not request.transactional_id:
        return None
    empty = _EMPTY.get(type(request))
    if empty is not None:
        return empty()
    made = _BY_CODE.get(type(request))
    if made is not None:
        return made(error_code=Code.NOT_COORDINATOR)
    found = _BY_PART.get(type(request))
    return None if found is None else found(request, version)


def _produce(request: ProduceRequest, _: int) -> Message | None:
    if request.acks == 0:
        return None
    return ProduceResponse(
        responses=[
            TopicProduceResponse(
                name=topic.name,
                partition_responses=[
                    PartitionProduceResponse(
                        index=one.index, error_code=Code.NOT_LEADER_OR_FOLLOWER, base_offset=-1
                    )
                    for one in topic.partition_data
                ],
            )
            for topic in request.topic_data
        ]
    )


def _fetch(request: FetchRequest, _: int) -> Message:
    return FetchResponse(
        responses=[
            FetchableTopicResponse(
                topic=topic.topic,
                partitions=[
                    PartitionData(
                        partition_index=one.partition, error_code=Code.NOT_LEADER_OR_FOLLOWER
                    )
                    for one in topic.partitions
                ],
            )
            for topic in request.topics
        ]
    )


def _by_partition(
    answer: Callable[..., Message],
    topic_of: Callable[..., Any],
    partition_of: Callable[..., Any],
    code: Code,
) -> Callable[[Any, int], Message]:
    """Of requests whose topics and partitions have the same names in the answer."""

    def refuse(request: Any, _: int) -> Message:
        return answer(
            topics=[
                topic_of(
                    name=topic.name,
                    partitions=[
                        partition_of(partition_index=one.partition_index, error_code=code)
                        for one in topic.partitions
                    ],
                )
                for topic in request.topics
            ]
        )

    return refuse


def _offset_fetch(request: OffsetFetchRequest, version: int) -> Message | None:
    if version < _OFFSETS_CODE_FROM:
        return None
    if version < _GROUPS_FROM:
        return OffsetFetchResponse(error_code=Code.NOT_COORDINATOR)
    return OffsetFetchResponse(
        groups=[
            OffsetFetchResponseGroup(group_id=one.group_id, error_code=Code.NOT_COORDINATOR)
            for one in request.groups
        ]
    )


def _add_partitions(request: AddPartitionsToTxnRequest, version: int) -> Message:
    if version >= _ADDED_CODE_FROM:
        return AddPartitionsToTxnResponse(error_code=Code.NOT_COORDINATOR)
    return AddPartitionsToTxnResponse(
        results_by_topic_v3_and_below=[
            AddPartitionsToTxnTopicResult(
                name=topic.name,
                results_by_partition=[
                    AddPartitionsToTxnPartitionResult(
                        partition_index=index, partition_error_code=Code.NOT_COORDINATOR
                    )
                    for index in topic.partitions
                ],
            )
            for topic in request.v3_and_below_topics
        ]
    )


_BY_PART: Mapping[type[Message], Callable[[Any, int], Message | None]] = {
    AddPartitionsToTxnRequest: _add_partitions,
    FetchRequest: _fetch,
    ListOffsetsRequest: _by_partition(
        ListOffsetsResponse,
        ListOffsetsTopicResponse,
        ListOffsetsPartitionResponse,
        Code.NOT_LEADER_OR_FOLLOWER,
    ),
    OffsetCommitRequest: _by_partition(
        OffsetCommitResponse,
        OffsetCommitResponseTopic,
        OffsetCommitResponsePartition,
        Code.NOT_COORDINATOR,
    ),
    OffsetFetchRequest: _offset_fetch,
    ProduceRequest: _produce,
    TxnOffsetCommitRequest: _by_partition(
        TxnOffsetCommitResponse,
        TxnOffsetCommitResponseTopic,
        TxnOffsetCommitResponsePartition,
        Code.NOT_COORDINATOR,
    ),
}
