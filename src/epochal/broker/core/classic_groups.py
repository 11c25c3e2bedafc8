"""Classic groups: members that distribute the partitions among themselves.

    Empty ──► PreparingRebalance ──► CompletingRebalance ──► Stable
                ▲      │  ▲                 │                  │
                │      ▼  └─────────────────┴──────────────────┘  a member joined, left or changed
              (no member is left: Empty)

    PreparingRebalance    members must join again; it ends when all have, or time is up
    CompletingRebalance   a new generation began; its leader must send the assignment
    Stable                all members have an assignment

A join or a sync is answered later, when the group gets there: its token comes back with the answer
through `answers`, for the owner to call.

A *static* member has a name of its own (instance id). It may come back under a new member id
without a rebalance; the older process of the same name is then fenced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from epochal.broker.core.entries import Entry, GroupChanged
from epochal.broker.core.group_members import (
    Answer,
    Group,
    GroupState,
    JoinAnswer,
    JoinRequest,
    Member,
    Sender,
    SyncAnswer,
    SyncRequest,
    Token,
    can_agree,
    changed,
    check_member,
    chosen,
    synced,
    update,
)
from epochal.broker.core.settings import Settings
from epochal.kafka.codes import Code


class ClassicGroups:
    def __init__(self, settings: Settings, emit: Callable[[Entry], None]) -> None:
        self.groups: dict[str, Group] = {}
        self.answers: list[tuple[Token, Answer]] = []
        """Answers since the owner last took them."""
        self._settings = settings
        self._emit = emit

    def add(self, group: Group) -> None:
        self.groups[group.group_id] = group
        self._persist(group)

    # JoinRequest

    def join(self, wish: JoinRequest, token: Token, new_id: str, now_ms: int) -> None:
        """A wish that `check_wish` has passed, for a group that is a classic one or new."""
        group = self.groups.get(wish.group_id)
        if group is None:
            if wish.member_id:
                self.refuse_join(token, Code.UNKNOWN_MEMBER_ID, wish.member_id)
                return
            group = self.groups[wish.group_id] = Group(wish.group_id, changed_ms=now_ms)
        if not can_agree(group, wish):
            self.refuse_join(token, Code.INCONSISTENT_GROUP_PROTOCOL, wish.member_id)
        elif not wish.member_id:
            self._join_new(group, wish, token, new_id, now_ms)
        else:
            self._join_again(group, wish, token, now_ms)

    def check_wish(self, wish: JoinRequest) -> Code:
        limits = self._settings
        if not wish.group_id:
            return Code.INVALID_GROUP_ID
        low, high = limits.session_timeout_min_ms, limits.session_timeout_max_ms
        if not low <= wish.session_timeout_ms <= high:
            return Code.INVALID_SESSION_TIMEOUT
        if not wish.protocols or not wish.protocol_type:
            return Code.INCONSISTENT_GROUP_PROTOCOL
        return Code.NONE

    def refuse_join(self, token: Token, code: Code, member_id: str = "") -> None:
        self.answers.append((token, JoinAnswer(code, member_id)))

    def _join_new(
        self, group: Group, wish: JoinRequest, token: Token, new_id: str, now_ms: int
    ) -> None:
        if wish.instance_id is not None and wish.instance_id in group.static:
            self._replace_static(group, wish, token, new_id, now_ms)
            return
        if len(group.members) + len(group.invited) >= self._settings.group_members_max:
            self.refuse_join(token, Code.GROUP_MAX_SIZE_REACHED)
            return
        if wish.must_know_id and wish.instance_id is None:
            group.invited[new_id] = now_ms + wish.session_timeout_ms
            self.refuse_join(token, Code.MEMBER_ID_REQUIRED, new_id)
            return
        self._add(group, wish, token, new_id, now_ms)

    def _join_again(self, group: Group, wish: JoinRequest, token: Token, now_ms: int) -> None:
        if group.invited.pop(wish.member_id, None) is not None:
            self._add(group, wish, token, wish.member_id, now_ms)
            return
        code = check_member(group, wish.member_id, wish.instance_id)
        if code is not Code.NONE:
            self.refuse_join(token, code, wish.member_id)
            return
        member = group.members[wish.member_id]
        is_same = member.protocols == wish.protocols
        match group.state:
            case GroupState.COMPLETING if is_same:
                self._welcome(group, member, token, now_ms)
            case GroupState.STABLE if is_same and member.member_id != group.leader:
                self._welcome(group, member, token, now_ms)
            case _:
                update(member, wish, token)
                self.rebalance(group, now_ms)

    def _add(
        self, group: Group, wish: JoinRequest, token: Token, member_id: str, now_ms: int
    ) -> None:
        member = Member(
            member_id,
            wish.instance_id,
            wish.client_id,
            wish.client_host,
            wish.session_timeout_ms,
            wish.rebalance_timeout_ms,
            wish.protocols,
            joining=token,
        )
        if not group.members:
            group.protocol_type = wish.protocol_type
        group.members[member_id] = member
        if wish.instance_id is not None:
            group.static[wish.instance_id] = member_id
        if group.leader is None:
            group.leader = member_id
        self.rebalance(group, now_ms)

    def _replace_static(
        self, group: Group, wish: JoinRequest, token: Token, new_id: str, now_ms: int
    ) -> None:
        """The same member in a new process: the old one is fenced, the assignment stays."""
        old_id = group.static[wish.instance_id or ""]
        member = group.members.pop(old_id)
        self._fence(member)
        was_leader = group.leader == old_id
        is_same = member.metadata(group.protocol) == dict(wish.protocols).get(group.protocol or "")
        member.member_id = new_id
        group.members[new_id] = member
        group.static[wish.instance_id or ""] = new_id
        if was_leader:
            group.leader = new_id
        if group.state is not GroupState.STABLE or not is_same:
            update(member, wish, token)
            self.rebalance(group, now_ms)
            return
        update(member, wish, None)
        member.session_until_ms = now_ms + member.session_timeout_ms
        self._persist(group)
        shown = group.leader if not was_leader or wish.may_skip_assignment else old_id
        answer = self._joined(group, member)._replace(
            leader=shown or "",
            is_assignment_skipped=was_leader and wish.may_skip_assignment,
        )
        if not answer.is_assignment_skipped:
            answer = answer._replace(members=())
        self.answers.append((token, answer))

    def _fence(self, member: Member) -> None:
        if member.joining is not None:
            self.refuse_join(member.joining, Code.FENCED_INSTANCE_ID, member.member_id)
        if member.syncing is not None:
            self.answers.append((member.syncing, SyncAnswer(Code.FENCED_INSTANCE_ID)))
        member.joining = member.syncing = None

    def _welcome(self, group: Group, member: Member, token: Token, now_ms: int) -> None:
        member.session_until_ms = now_ms + member.session_timeout_ms
        self.answers.append((token, self._joined(group, member)))

    def _joined(self, group: Group, member: Member) -> JoinAnswer:
        is_leader = group.leader == member.member_id
        members = [
            (other.member_id, other.instance_id, other.metadata(group.protocol))
            for other in (group.members.values() if is_leader else ())
        ]
        return JoinAnswer(
            Code.NONE,
            member.member_id,
            group.generation,
            group.protocol_type,
            group.protocol,
            group.leader or "",
            members,
        )

    # Rebalances

    def rebalance(self, group: Group, now_ms: int) -> None:
        if group.state is not GroupState.PREPARING:
            is_first = group.state is GroupState.EMPTY
            for member in group.members.values():
                if member.syncing is not None:
                    answer = SyncAnswer(Code.REBALANCE_IN_PROGRESS)
                    self.answers.append((member.syncing, answer))
                    member.syncing = None
                    # It could send no heartbeat while it waited: its session starts again.
                    member.session_until_ms = now_ms + member.session_timeout_ms
            group.state = GroupState.PREPARING
            longest = max((m.rebalance_timeout_ms for m in group.members.values()), default=0)
            delay = self._settings.group_initial_delay_ms
            group.rebalance_until_ms = now_ms + (delay if is_first and delay else longest)
            if is_first and delay:
                return
        self._complete_if_all_joined(group, now_ms)

    def _complete_if_all_joined(self, group: Group, now_ms: int) -> None:
        is_waiting = any(member.joining is None for member in group.members.values())
        if not is_waiting and not group.invited:
            self._complete(group, now_ms)

    def _complete(self, group: Group, now_ms: int) -> None:
        """A new generation of those who are there."""
        for member in list(group.members.values()):
            if member.joining is None and member.instance_id is None:
                self._remove(group, member)
        group.invited.clear()
        group.generation += 1
        group.changed_ms = now_ms
        if not group.members:
            group.state = GroupState.EMPTY
            group.protocol = group.leader = None
            self._persist(group)
            return
        if group.leader is None or group.members[group.leader].joining is None:
            joined = (m.member_id for m in group.members.values() if m.joining is not None)
            group.leader = next(joined, next(iter(group.members)))
        group.protocol = chosen(group)
        group.state = GroupState.COMPLETING
        longest = max(member.rebalance_timeout_ms for member in group.members.values())
        group.rebalance_until_ms = now_ms + longest
        for member in group.members.values():
            member.assignment = b""
            if member.joining is not None:
                token, member.joining = member.joining, None
                self._welcome(group, member, token, now_ms)

    def _remove(self, group: Group, member: Member) -> None:
        for token in (member.joining, member.syncing):
            if token is not None:
                kind = JoinAnswer if token is member.joining else SyncAnswer
                self.answers.append((token, kind(Code.UNKNOWN_MEMBER_ID)))
        del group.members[member.member_id]
        if member.instance_id is not None:
            group.static.pop(member.instance_id, None)
        if group.leader == member.member_id:
            group.leader = next(iter(group.members), None)

    def _left(self, group: Group, now_ms: int) -> None:
        if group.state in (GroupState.STABLE, GroupState.COMPLETING):
            self.rebalance(group, now_ms)
        elif group.state is GroupState.PREPARING:
            self._complete_if_all_joined(group, now_ms)

    # The other requests of members

    def sync(self, request: SyncRequest, token: Token, now_ms: int) -> None:
        group = self.groups.get(request.group_id)
        code = self.check_member(request.group_id, request.sender)
        if code is Code.NONE and group is not None:
            if (request.protocol_type or group.protocol_type) != group.protocol_type or (
                request.protocol or group.protocol
            ) != group.protocol:
                code = Code.INCONSISTENT_GROUP_PROTOCOL
            elif group.state is GroupState.PREPARING:
                code = Code.REBALANCE_IN_PROGRESS
        if code is not Code.NONE or group is None:
            self.answers.append((token, SyncAnswer(code)))
            return
        member = group.members[request.sender.member_id]
        member.session_until_ms = now_ms + member.session_timeout_ms
        if group.state is GroupState.STABLE:
            self.answers.append((token, synced(group, member)))
            return
        member.syncing = token
        if group.leader == member.member_id:
            self._stabilize(group, request.assignments, now_ms)

    def _stabilize(self, group: Group, assignments: dict[str, bytes], now_ms: int) -> None:
        group.state = GroupState.STABLE
        for member in group.members.values():
            member.assignment = assignments.get(member.member_id, b"")
            member.session_until_ms = now_ms + member.session_timeout_ms
            if member.syncing is not None:
                self.answers.append((member.syncing, synced(group, member)))
                member.syncing = None
        self._persist(group)

    def heartbeat(self, group_id: str, sender: Sender, now_ms: int) -> Code:
        code = self.check_member(group_id, sender)
        if code is not Code.NONE:
            return code
        group = self.groups[group_id]
        member = group.members[sender.member_id]
        member.session_until_ms = now_ms + member.session_timeout_ms
        is_rebalancing = group.state is GroupState.PREPARING
        return Code.REBALANCE_IN_PROGRESS if is_rebalancing else Code.NONE

    def check_member(self, group_id: str, sender: Sender) -> Code:
        """Whether this is a member of the group as it is now."""
        if not group_id:
            return Code.INVALID_GROUP_ID
        group = self.groups.get(group_id)
        if group is None:
            return Code.UNKNOWN_MEMBER_ID
        code = check_member(group, sender.member_id, sender.instance_id)
        if code is Code.NONE and sender.generation != group.generation:
            return Code.ILLEGAL_GENERATION
        return code

    def check_commit(self, group_id: str, sender: Sender, is_transactional: bool) -> Code:
        member_id, instance_id, generation = sender
        group = self.groups.get(group_id)
        if group is None:
            return Code.NONE if generation < 0 else Code.ILLEGAL_GENERATION
        is_free = group.state is GroupState.EMPTY
        is_nobody = not member_id and instance_id is None
        if generation < 0 and (is_free or (is_transactional and is_nobody)):
            return Code.NONE
        code = self.check_member(group_id, sender)
        is_early = not is_transactional and group.state is GroupState.COMPLETING
        return Code.REBALANCE_IN_PROGRESS if is_early and code is Code.NONE else code

    def leave(self, group_id: str, member_id: str, instance_id: str | None, now_ms: int) -> Code:
        group = self.groups.get(group_id)
        if group is None:
            return Code.UNKNOWN_MEMBER_ID
        if not member_id and instance_id is not None:
            member_id = group.static.get(instance_id, "")
        if group.invited.pop(member_id, None) is not None:
            self._left(group, now_ms)
            return Code.NONE
        code = check_member(group, member_id, instance_id)
        if code is not Code.NONE:
            return code
        self._remove(group, group.members[member_id])
        self._left(group, now_ms)
        return Code.NONE

    def heard(self, group_id: str, member_id: str, now_ms: int) -> None:
        """A commit of offsets is a sign of life too."""
        group = self.groups.get(group_id)
        member = None if group is None else group.members.get(member_id)
        if member is not None:
            member.session_until_ms = now_ms + member.session_timeout_ms

    # Time

    def expire(self, now_ms: int) -> None:
        for group in list(self.groups.values()):
            if group.members or group.invited:
                self._expire_members(group, now_ms)

    def _expire_members(self, group: Group, now_ms: int) -> None:
        for member_id, until_ms in list(group.invited.items()):
            if until_ms <= now_ms:
                del group.invited[member_id]
                self._left(group, now_ms)
        for member in list(group.members.values()):
            is_waited_for = member.joining is not None or member.syncing is not None
            if not is_waited_for and 0 < member.session_until_ms <= now_ms:
                self._remove(group, member)
                self._left(group, now_ms)
        if group.rebalance_until_ms > now_ms:
            return
        if group.state is GroupState.PREPARING:
            self._complete(group, now_ms)
        elif group.state is GroupState.COMPLETING:
            for member in [m for m in group.members.values() if m.syncing is None]:
                self._remove(group, member)
            self.rebalance(group, now_ms)

    # Entries

    def _persist(self, group: Group) -> None:
        self._emit(changed(group))

    def apply_changed(self, entry: GroupChanged) -> None:
        group = self.groups[entry.group] = Group(entry.group)
        group.generation = entry.generation
        group.protocol_type = entry.protocol_type
        group.protocol = entry.protocol
        group.leader = entry.leader
        group.changed_ms = entry.changed_ms
        for row in entry.members:
            member = Member(*row)
            group.members[member.member_id] = member
            if member.instance_id is not None:
                group.static[member.instance_id] = member.member_id
        group.state = GroupState.STABLE if group.members else GroupState.EMPTY

    def recovered(self, now_ms: int) -> None:
        for group in self.groups.values():
            for member in group.members.values():
                member.session_until_ms = now_ms + member.session_timeout_ms

    def known(self) -> Iterator[Entry]:
        for group in self.groups.values():
            if group.state in (GroupState.STABLE, GroupState.EMPTY):
                yield changed(group)
            else:
                # Members of a rebalance under way come again by themselves.
                yield changed(group)._replace(members=[], leader=None, protocol=None)
