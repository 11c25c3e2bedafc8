"""ConsumerGroupDescribe: members, epochs and assignments of groups of the newer protocol."""

from __future__ import annotations

from epochal.broker.broker import AuthorizedOperations, Call
from epochal.broker.core.consumer_members import is_classic
from epochal.broker.core.entries import ConsumerMember, Places
from epochal.kafka.codes import Code
from epochal.kafka.messages.consumer_group_describe import (
    Assignment,
    ConsumerGroupDescribeRequest,
    ConsumerGroupDescribeResponse,
    DescribedGroup,
    Member,
    TopicPartitions,
)

VERSIONS = range(2)
_KINDS_FROM = 1
_CLASSIC, _CONSUMER = 0, 1


def handle(call: Call, request: ConsumerGroupDescribeRequest) -> ConsumerGroupDescribeResponse:
    answer = ConsumerGroupDescribeResponse(groups=[_group(call, one) for one in request.group_ids])
    if request.include_authorized_operations:
        for group in answer.groups:
            group.authorized_operations = AuthorizedOperations.GROUP
    return answer


def _group(call: Call, group_id: str) -> DescribedGroup:
    groups = call.broker.state.groups
    group = groups.consumers.groups.get(group_id)
    if group is None:
        what = "is not a consumer group" if group_id in groups.classic.groups else "not found"
        return DescribedGroup(
            group_id=group_id,
            error_code=Code.GROUP_ID_NOT_FOUND,
            error_message=f"Group {group_id} {what}.",
        )
    return DescribedGroup(
        group_id=group_id,
        group_state=group.state,
        group_epoch=group.epoch,
        assignment_epoch=group.assignment_epoch,
        assignor_name=group.assignor,
        members=[_member(call, one) for one in group.members.values()],
    )


def _member(call: Call, member: ConsumerMember) -> Member:
    result = Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=member.epoch,
        client_id=member.client_id,
        client_host=f"/{member.client_host}",
        subscribed_topic_names=list(member.topics),
        subscribed_topic_regex=member.pattern,
        assignment=_assignment(call, member.revoking.union(member.assigned)),
        target_assignment=_assignment(call, member.target),
    )
    if call.version >= _KINDS_FROM:
        result.member_type = _CLASSIC if is_classic(member) else _CONSUMER
    return result


def _assignment(call: Call, places: Places) -> Assignment:
    topics = call.broker.state.topics.by_name
    return Assignment(
        topic_partitions=[
            TopicPartitions(topic_id=topics[name].topic_id, topic_name=name, partitions=indexes)
            for name, indexes in call.broker.state.groups.consumers.by_name(places).items()
        ]
    )
