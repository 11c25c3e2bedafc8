"""Groups of both protocols: classic ones, and those of the newer consumer protocol.

A group is of one kind at a time. The first member of the newer protocol makes a classic group of
consumers one of the newer kind, and when the last of them goes, those that are left are a classic
group again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from epochal.broker.core.classic_groups import ClassicGroups
from epochal.broker.core.configs import GroupConfigs
from epochal.broker.core.consumer_groups import ConsumerGroups
from epochal.broker.core.consumer_members import Beat, BeatAnswer, ConsumerGroup
from epochal.broker.core.consumer_protocol import write_assignment
from epochal.broker.core.entries import Entry, GroupForgotten
from epochal.broker.core.group_members import (
    CONSUMER,
    CommitCheck,
    Group,
    GroupState,
    JoinAnswer,
    JoinRequest,
    Member,
    Sender,
    SyncAnswer,
    SyncRequest,
    Token,
    chosen,
    subscription,
)
from epochal.broker.core.settings import Settings
from epochal.broker.core.topics import Refused, Topics
from epochal.kafka.codes import Code


class Groups:
    def __init__(self, settings: Settings, topics: Topics, emit: Callable[[Entry], None]) -> None:
        self.configs = GroupConfigs(settings, emit)
        self.classic = ClassicGroups(settings, emit)
        self.consumers = ConsumerGroups(settings, topics, emit, self.configs)
        """Those of the newer protocol: a group is here or there."""
        self.answers = self.classic.answers
        """Answers to joins and syncs since the owner last took them."""
        self._settings = settings
        self._emit = emit

    def __contains__(self, group_id: str) -> bool:
        return group_id in self.classic.groups or group_id in self.consumers.groups

    def __len__(self) -> int:
        return len(self.classic.groups) + len(self.consumers.groups)

    def __iter__(self) -> Iterator[str]:
        yield from list(self.classic.groups)
        yield from list(self.consumers.groups)

    # Requests of members

    def join(self, wish: JoinRequest, token: Token, new_id: str, now_ms: int) -> None:
        """`new_id` is the id for a new member. The answer comes through `answers`."""
        code = self.classic.check_wish(wish)
        if code is not Code.NONE:
            self.classic.refuse_join(token, code, wish.member_id)
            return
        newer = self.consumers.groups.get(wish.group_id)
        if newer is not None and newer.members:
            self._join_newer(newer, wish, token, new_id, now_ms)
            return
        if newer is not None:
            self.forget(wish.group_id)
        self.classic.join(wish, token, new_id, now_ms)

    def _join_newer(
        self, group: ConsumerGroup, wish: JoinRequest, token: Token, new_id: str, now_ms: int
    ) -> None:
        try:
            answer = self.consumers.join(group, wish, new_id, now_ms)
        except Refused as refused:
            answer = JoinAnswer(refused.code, wish.member_id)
        self.answers.append((token, answer))
        self._make_classic_again(group, now_ms)

    def sync(self, request: SyncRequest, token: Token, now_ms: int) -> None:
        newer = self.consumers.groups.get(request.group_id)
        if newer is None:
            self.classic.sync(request, token, now_ms)
            return
        try:
            answer = self.consumers.sync(newer, request, now_ms)
        except Refused as refused:
            answer = SyncAnswer(refused.code)
        self.answers.append((token, answer))

    def heartbeat(self, group_id: str, sender: Sender, now_ms: int) -> Code:
        newer = self.consumers.groups.get(group_id)
        if newer is None:
            return self.classic.heartbeat(group_id, sender, now_ms)
        try:
            return self.consumers.classic_beat(newer, sender, now_ms)
        except Refused as refused:
            return refused.code

    def check_commit(
        self,
        group_id: str,
        sender: Sender,
        *,
        is_transactional: bool,
        is_versioned: bool = True,
    ) -> CommitCheck:
        """
        Whether this client may commit offsets: a member, or any client for a group without.

        `is_versioned`: the generation of the request may be a member epoch.
        """
        newer = self.consumers.groups.get(group_id)
        if newer is not None:
            is_versioned = is_versioned or is_transactional
            found = self.consumers.check_commit(newer, sender, is_versioned=is_versioned)
            is_stale = is_transactional and found.code is Code.STALE_MEMBER_EPOCH
            return found._replace(code=Code.ILLEGAL_GENERATION) if is_stale else found
        return CommitCheck(self.classic.check_commit(group_id, sender, is_transactional))

    def leave(self, group_id: str, member_id: str, instance_id: str | None, now_ms: int) -> Code:
        newer = self.consumers.groups.get(group_id)
        if newer is None:
            return self.classic.leave(group_id, member_id, instance_id, now_ms)
        try:
            self.consumers.leave(newer, member_id, instance_id, now_ms)
        except Refused as refused:
            return refused.code
        self._make_classic_again(newer, now_ms)
        return Code.NONE

    # Requests about groups

    def delete(self, group_id: str) -> Code:
        newer = self.consumers.groups.get(group_id)
        group = self.classic.groups.get(group_id)
        if group is None and newer is None:
            return Code.GROUP_ID_NOT_FOUND
        if (newer is not None and newer.members) or (
            group is not None and (group.members or group.invited)
        ):
            return Code.NON_EMPTY_GROUP
        self.forget(group_id)
        return Code.NONE

    def readers_of(self, group_id: str) -> tuple[Code, set[str]]:
        """The topics that members of a group read: their offsets are not deleted under them."""
        newer = self.consumers.groups.get(group_id)
        if newer is not None:
            subscribed = map(self.consumers.subscribed, newer.members.values())
            return Code.NONE, set().union(*subscribed)
        group = self.classic.groups.get(group_id)
        if group is None:
            return Code.GROUP_ID_NOT_FOUND, set()
        if not group.members:
            return Code.NONE, set()
        if group.protocol_type != CONSUMER:
            return Code.NON_EMPTY_GROUP, set()
        return Code.NONE, {topic for one in group.members.values() for topic in subscription(one)}

    def ensure(self, group_id: str, now_ms: int) -> None:
        """A group that only keeps offsets is a group too."""
        if group_id not in self:
            self.classic.add(Group(group_id, changed_ms=now_ms))

    def forget(self, group_id: str) -> None:
        entry = GroupForgotten(group_id)
        self.apply_forgotten(entry)
        self._emit(entry)

    def idle_since(self, group_id: str) -> int | None:
        """Since when a group has had no members; None where it has some."""
        newer, group = self.consumers.groups.get(group_id), self.classic.groups.get(group_id)
        if newer is not None:
            return None if newer.members else newer.changed_ms
        if group is not None:
            return None if group.members or group.invited else group.changed_ms
        return 0

    # The newer protocol

    def beat(self, beat: Beat, now_ms: int) -> BeatAnswer:
        """A heartbeat that `check_beat` has passed. Raises `Refused`."""
        group = self.classic.groups.get(beat.group_id)
        if group is not None:
            self._make_newer(group, beat, now_ms)
        answer = self.consumers.beat(beat, now_ms)
        self._make_classic_again(self.consumers.groups[beat.group_id], now_ms)
        return answer

    def _make_newer(self, group: Group, beat: Beat, now_ms: int) -> None:
        """Let a member of the newer protocol join a group that has been a classic one."""
        is_empty = not group.members
        is_fit = group.protocol_type == CONSUMER or is_empty
        if beat.epoch != 0 or not is_fit:
            raise Refused(
                Code.GROUP_ID_NOT_FOUND, f"Group {group.group_id} is not a consumer group."
            )
        if len(group.members) >= self._settings.group_members_max:
            raise Refused(Code.GROUP_MAX_SIZE_REACHED, "The group has reached its maximum size.")
        members = self.consumers.adopted(group)
        self.forget(group.group_id)
        if is_empty:
            return
        for member in group.members.values():
            if member.joining is not None:
                self.classic.refuse_join(
                    member.joining, Code.REBALANCE_IN_PROGRESS, member.member_id
                )
            if member.syncing is not None:
                self.answers.append((member.syncing, SyncAnswer(Code.REBALANCE_IN_PROGRESS)))
        self.consumers.adopt(group.group_id, group.generation, members, now_ms)

    def _make_classic_again(self, newer: ConsumerGroup, now_ms: int) -> None:
        """If all members that are left use the classic protocol, they join again as such."""
        if not newer.is_all_classic:
            return
        group = Group(newer.group_id, GroupState.STABLE, newer.epoch, CONSUMER, changed_ms=now_ms)
        for one in newer.members.values():
            group.members[one.member_id] = Member(
                one.member_id,
                one.instance_id,
                one.client_id,
                one.client_host,
                one.session_timeout_ms,
                one.rebalance_timeout_ms,
                list(one.protocols),
                session_until_ms=now_ms + one.session_timeout_ms,
            )
        group.static = dict(newer.static)
        group.leader = next(iter(group.members))
        group.protocol = chosen(group)
        for one in newer.members.values():
            member = group.members[one.member_id]
            places = self.consumers.by_name(one.target)
            member.assignment = write_assignment(places, member.metadata(group.protocol))
        self.forget(group.group_id)
        self.classic.add(group)
        self.classic.rebalance(group, now_ms)

    # Time

    def expire(self, now_ms: int) -> None:
        for newer in self.consumers.expire(now_ms):
            self._make_classic_again(newer, now_ms)
        self.classic.expire(now_ms)

    # Entries

    def apply_forgotten(self, entry: GroupForgotten) -> None:
        self.classic.groups.pop(entry.group, None)
        self.consumers.groups.pop(entry.group, None)

    def recovered(self, now_ms: int) -> None:
        self.consumers.recovered(now_ms)
        self.classic.recovered(now_ms)

    def known(self) -> Iterator[Entry]:
        yield from self.configs.known()
        yield from self.consumers.known()
        yield from self.classic.known()
