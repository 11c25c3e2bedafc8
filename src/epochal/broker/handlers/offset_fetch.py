"""OffsetFetch: how far a group has read."""

from __future__ import annotations

from collections.abc import Iterable

from epochal.broker.broker import Call
from epochal.broker.core.offsets import Committed
from epochal.kafka.codes import Code
from epochal.kafka.messages.offset_fetch import (
    OffsetFetchRequest,
    OffsetFetchRequestGroup,
    OffsetFetchResponse,
    OffsetFetchResponseGroup,
    OffsetFetchResponsePartition,
    OffsetFetchResponsePartitions,
    OffsetFetchResponseTopic,
    OffsetFetchResponseTopics,
)

VERSIONS = range(1, 10)
_MANY_GROUPS_FROM = 8
_NOTHING = Committed(-1, -1, "", -1)


def handle(call: Call, request: OffsetFetchRequest) -> OffsetFetchResponse:
    is_stable = request.require_stable
    if call.version >= _MANY_GROUPS_FROM:
        groups = [_group(call, group, is_stable=is_stable) for group in request.groups]
        return OffsetFetchResponse(groups=groups)
    wanted = None
    if request.topics is not None:
        wanted = [(topic.name, topic.partition_indexes) for topic in request.topics]
    return OffsetFetchResponse(
        topics=[
            OffsetFetchResponseTopic(
                name=name,
                partitions=[
                    OffsetFetchResponsePartition(
                        partition_index=index,
                        committed_offset=row.offset,
                        committed_leader_epoch=row.leader_epoch if call.version >= 5 else -1,
                        metadata=row.metadata,
                        error_code=code,
                    )
                    for index, row, code in rows
                ],
            )
            for name, rows in _rows(call, request.group_id, wanted, is_stable=is_stable)
        ]
    )


def _group(
    call: Call, group: OffsetFetchRequestGroup, *, is_stable: bool
) -> OffsetFetchResponseGroup:
    consumers = call.broker.state.groups.consumers
    code = consumers.check_fetch(group.group_id, group.member_id, group.member_epoch)
    if code is not Code.NONE:
        return OffsetFetchResponseGroup(group_id=group.group_id, error_code=code)
    wanted = None
    if group.topics is not None:
        wanted = [(topic.name, topic.partition_indexes) for topic in group.topics]
    return OffsetFetchResponseGroup(
        group_id=group.group_id,
        topics=[
            OffsetFetchResponseTopics(
                name=name,
                partitions=[
                    OffsetFetchResponsePartitions(
                        partition_index=index,
                        committed_offset=row.offset,
                        committed_leader_epoch=row.leader_epoch,
                        metadata=row.metadata,
                        error_code=code,
                    )
                    for index, row, code in rows
                ],
            )
            for name, rows in _rows(call, group.group_id, wanted, is_stable=is_stable)
        ],
    )


def _rows(
    call: Call, group: str, wanted: Iterable[tuple[str, list[int]]] | None, *, is_stable: bool
) -> list[tuple[str, list[tuple[int, Committed, Code]]]]:
    """The partitions asked for, or all, by topic."""
    offsets = call.broker.state.offsets
    known = offsets.groups.get(group, {})
    if wanted is None:
        listed: dict[str, list[int]] = {}
        for topic, index in sorted(known):
            listed.setdefault(topic, []).append(index)
        wanted = listed.items()
    found: list[tuple[str, list[tuple[int, Committed, Code]]]] = []
    for topic, indexes in wanted:
        rows: list[tuple[int, Committed, Code]] = []
        for index in indexes:
            place = (topic, index)
            if is_stable and offsets.is_unstable(group, place):
                rows.append((index, _NOTHING, Code.UNSTABLE_OFFSET_COMMIT))
            else:
                rows.append((index, known.get(place, _NOTHING), Code.NONE))
        found.append((topic, rows))
    return found
