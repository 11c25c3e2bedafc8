"""Groups of the newer consumer protocol (KIP-848): the broker distributes the partitions.

A member sends heartbeats, and each answer may change what it reads. Three epochs keep that in step:

    group epoch        raised when members, subscriptions or topics change
    assignment epoch   the group epoch for which every member has a *target*
    member epoch       the assignment epoch that a member has arrived at; commits carry it

A member is led from what it has to its target one step per heartbeat, so that no partition is
read by two:

    STABLE ──► UNREVOKED    it has partitions too many; it stays at its epoch until it no longer
      ▲  ▲        │         names them among those that it owns
      │  └────────┤
      │           ▼
      └────── UNRELEASED    it is at the new epoch, and gets the rest when others let go of it

Members of the classic protocol may belong to such a group, while its consumers are moved from one
protocol to the other: JoinGroup is their step, SyncGroup brings their partitions, their generation
is the member epoch.

A member is a value; it changes by an entry that holds all of it. Deadlines are not kept: they begin
again after a restart.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator

from epochal.broker.core.assignors import ASSIGNORS, Reader
from epochal.broker.core.configs import GroupConfigs
from epochal.broker.core.consumer_members import (
    LEAVES,
    LEAVES_FOR_A_WHILE,
    Beat,
    BeatAnswer,
    ConsumerGroup,
    Reconciliation,
    Timer,
    check_epoch,
    check_protocols,
    classic_member,
    compare_epoch,
    compiled,
    is_classic,
    reconciled,
    updated,
)
from epochal.broker.core.consumer_protocol import (
    Malformed,
    read_assignment,
    read_subscription,
    write_assignment,
)
from epochal.broker.core.entries import (
    ConsumerGroupChanged,
    ConsumerMember,
    ConsumerMemberGone,
    Entry,
    Places,
)
from epochal.broker.core.group_members import (
    CONSUMER,
    CommitCheck,
    Group,
    JoinAnswer,
    JoinRequest,
    Sender,
    SyncAnswer,
    SyncRequest,
)
from epochal.broker.core.settings import Settings
from epochal.broker.core.topics import Refused, Topics
from epochal.kafka.codes import Code

_NO_MATCH: frozenset[str] = frozenset()
_PATTERNS_KEPT = 100


class ConsumerGroups:
    def __init__(
        self,
        settings: Settings,
        topics: Topics,
        emit: Callable[[Entry], None],
        configs: GroupConfigs,
    ) -> None:
        self.groups: dict[str, ConsumerGroup] = {}
        self._settings = settings
        self._configs = configs
        self._topics = topics
        self._emit = emit
        self._matches: dict[str, frozenset[str]] = {}
        self._matches_version = -1

    # Heartbeats

    def beat(self, beat: Beat, now_ms: int) -> BeatAnswer:
        """Raises `Refused`. The group is no classic one, and the beat was checked."""
        group = self.groups.get(beat.group_id)
        if group is None:
            if beat.epoch != 0:
                raise Refused(Code.GROUP_ID_NOT_FOUND, f"Group {beat.group_id} not found.")
            group = self._make(beat.group_id, now_ms)
        if beat.epoch in (LEAVES, LEAVES_FOR_A_WHILE):
            return self._leave(group, beat, now_ms)
        self._check_room(group, beat.member_id)
        before = self._member_of(group, beat)
        now = updated(before, beat)
        after = self._advanced(group, before, now, beat.owned, now_ms)
        session_ms = self._configs.session_ms(group.group_id)
        group.deadlines[after.member_id][Timer.SESSION] = now_ms + session_ms
        has_news = beat.is_whole or after.assigned.keys() != before.assigned.keys()
        shown = frozenset(after.assigned) if has_news else None
        return BeatAnswer(after.member_id, after.epoch, shown)

    def _make(self, group_id: str, now_ms: int) -> ConsumerGroup:
        self._say(ConsumerGroupChanged(group_id, 1, 0, _hash_of([]), now_ms))
        return self.groups[group_id]

    def _check_room(self, group: ConsumerGroup, member_id: str) -> None:
        limit = self._settings.group_members_max
        if len(group.members) >= limit and member_id not in group.members:
            raise Refused(
                Code.GROUP_MAX_SIZE_REACHED,
                f"The consumer group has reached its maximum capacity of {limit} members.",
            )

    def _member_of(self, group: ConsumerGroup, beat: Beat) -> ConsumerMember:
        """The member as it was until now; a new one is not in the group yet."""
        known_id = group.static.get(beat.instance_id or "")
        if beat.epoch == 0 and known_id is not None and known_id != beat.member_id:
            old = group.members[known_id]
            if not is_classic(old) and old.epoch != LEAVES_FOR_A_WHILE:
                raise Refused(
                    Code.UNRELEASED_INSTANCE_ID,
                    f"Static member {beat.member_id} with instance id {beat.instance_id} cannot "
                    f"join the group because the instance id is owned by {known_id} member.",
                )
            return self._replace_static(group, old, beat.member_id)
        if beat.epoch == 0 and beat.member_id not in group.members:
            return ConsumerMember(group.group_id, beat.member_id)
        found = group.member(beat.member_id, beat.instance_id)
        check_epoch(found, beat)
        return found

    def _replace_static(
        self, group: ConsumerGroup, old: ConsumerMember, member_id: str
    ) -> ConsumerMember:
        """The same member in a new process: it has what the old one had."""
        self._say(ConsumerMemberGone(group.group_id, old.member_id))
        return self._put(old._replace(member_id=member_id, epoch=0, previous_epoch=0))

    def _leave(self, group: ConsumerGroup, beat: Beat, now_ms: int) -> BeatAnswer:
        member = group.member(beat.member_id, beat.instance_id)
        if beat.epoch == LEAVES_FOR_A_WHILE:
            self._put(member._replace(epoch=LEAVES_FOR_A_WHILE, revoking=frozenset()))
        else:
            self.remove(group, member, now_ms)
        return BeatAnswer(beat.member_id, beat.epoch)

    def remove(self, group: ConsumerGroup, member: ConsumerMember, now_ms: int) -> None:
        """
        The others get its partitions with their next heartbeats.

        A group of which only classic members are left stays as it is: it becomes a classic one.
        """
        self._say(ConsumerMemberGone(group.group_id, member.member_id))
        if not group.is_all_classic:
            self._raise_epoch(group, self._hash(group), now_ms)

    # Steps

    def _advanced(
        self,
        group: ConsumerGroup,
        before: ConsumerMember,
        changed: ConsumerMember,
        owned: Places | None,
        now_ms: int,
    ) -> ConsumerMember:
        """One step of a member towards the newest target."""
        self._put(changed)
        is_changed = (changed.topics, changed.pattern) != (before.topics, before.pattern)
        if is_changed or group.topics_version != self._topics.version:
            found = self._hash(group)
            if is_changed or found != group.topics_hash:
                self._raise_epoch(group, found, now_ms)
        if group.epoch > group.assignment_epoch:
            self._distribute(group)
        member = group.members[changed.member_id]
        after = self._put(reconciled(group, member, owned))
        timers = group.deadlines[after.member_id]
        if after.state != Reconciliation.UNREVOKED or is_classic(after):
            timers.pop(Timer.REVOKING, None)
        elif after != member or Timer.REVOKING not in timers:
            timers[Timer.REVOKING] = now_ms + after.rebalance_timeout_ms
        return after

    def _raise_epoch(self, group: ConsumerGroup, topics_hash: str, now_ms: int) -> None:
        epoch = group.epoch + 1
        name = group.group_id
        self._say(ConsumerGroupChanged(name, epoch, group.assignment_epoch, topics_hash, now_ms))

    def _distribute(self, group: ConsumerGroup) -> None:
        readers = {
            member.member_id: Reader(
                member.instance_id, frozenset(self._topic_ids(member)), member.target
            )
            for member in group.members.values()
        }
        by_id = self._topics.by_id
        counts = {
            topic: len(by_id[bytes.fromhex(topic)].partitions)
            for reader in readers.values()
            for topic in reader.topics
        }
        for member_id, target in ASSIGNORS[group.assignor](readers, counts).items():
            self._put(group.members[member_id]._replace(target=target))
        self._say(
            ConsumerGroupChanged(
                group.group_id, group.epoch, group.epoch, group.topics_hash, group.changed_ms
            )
        )

    # Subscriptions

    def subscribed(self, member: ConsumerMember) -> set[str]:
        """The names of the topics that it wants to read, whether they exist or not."""
        return {*member.topics, *self._matching(member.pattern)}

    def _matching(self, pattern: str) -> frozenset[str]:
        if not pattern:
            return _NO_MATCH
        is_full = len(self._matches) >= _PATTERNS_KEPT
        if is_full or self._matches_version != self._topics.version:
            self._matches.clear()
            self._matches_version = self._topics.version
        found = self._matches.get(pattern)
        if found is None:
            fits = compiled(pattern).fullmatch
            found = frozenset(name for name in self._topics.by_name if fits(name))
            self._matches[pattern] = found
        return found

    def _topic_ids(self, member: ConsumerMember) -> Iterator[str]:
        by_name = self._topics.by_name
        for name in self.subscribed(member):
            if name in by_name:
                yield by_name[name].topic_id.hex()

    def _hash(self, group: ConsumerGroup) -> str:
        group.topics_version = self._topics.version
        ids = {topic for member in group.members.values() for topic in self._topic_ids(member)}
        by_id = self._topics.by_id
        return _hash_of(f"{one} {len(by_id[bytes.fromhex(one)].partitions)}" for one in sorted(ids))

    # Members of the classic protocol

    def join(self, group: ConsumerGroup, wish: JoinRequest, new_id: str, now_ms: int) -> JoinAnswer:
        """Raises `Refused`."""
        self._check_room(group, wish.member_id)
        check_protocols(group, wish)
        if not wish.member_id and wish.must_know_id and wish.instance_id is None:
            return JoinAnswer(Code.MEMBER_ID_REQUIRED, new_id)
        try:
            subscription = read_subscription(wish.protocols[0][1])
        except Malformed as error:
            raise Refused(Code.INCONSISTENT_GROUP_PROTOCOL, str(error)) from error
        before = self._joining(group, wish, new_id)
        changed = before._replace(
            instance_id=wish.instance_id or before.instance_id,
            rack_id=subscription.rack_id or before.rack_id,
            client_id=wish.client_id,
            client_host=wish.client_host,
            rebalance_timeout_ms=wish.rebalance_timeout_ms,
            topics=tuple(sorted(set(subscription.topics))),
            pattern="",
            assignor=None,
            session_timeout_ms=wish.session_timeout_ms,
            protocols=tuple(wish.protocols),
        )
        owned = self._places(subscription.owned)
        after = self._advanced(group, before, changed, owned, now_ms)
        timers = group.deadlines[after.member_id]
        timers.pop(Timer.JOINING, None)
        timers[Timer.SESSION] = now_ms + wish.session_timeout_ms
        timers[Timer.SYNCING] = now_ms + wish.rebalance_timeout_ms
        return JoinAnswer(Code.NONE, after.member_id, after.epoch, CONSUMER, after.protocols[0][0])

    def _joining(self, group: ConsumerGroup, wish: JoinRequest, new_id: str) -> ConsumerMember:
        member_id = wish.member_id or new_id
        if wish.instance_id is not None and (wish.member_id or wish.instance_id in group.static):
            if wish.member_id:
                return group.member(member_id, wish.instance_id)
            old = group.members[group.static[wish.instance_id]]
            return self._replace_static(group, old, member_id)
        return group.members.get(member_id) or ConsumerMember(group.group_id, member_id)

    def sync(self, group: ConsumerGroup, request: SyncRequest, now_ms: int) -> SyncAnswer:
        """Raises `Refused`."""
        member = classic_member(group, request.sender)
        name = member.protocols[0][0]
        given_type, given_name = request.protocol_type, request.protocol
        if (given_type or CONSUMER) != CONSUMER or (given_name or name) != name:
            raise Refused(Code.INCONSISTENT_GROUP_PROTOCOL, f"the protocol is {name}")
        if group.epoch > member.epoch and member.state != Reconciliation.UNREVOKED:
            self._must_join(group, member, now_ms)
            raise Refused(Code.REBALANCE_IN_PROGRESS, "the member must join again")
        timers = group.deadlines[member.member_id]
        timers.pop(Timer.SYNCING, None)
        timers[Timer.SESSION] = now_ms + member.session_timeout_ms
        places = self.by_name(frozenset(member.assigned))
        assignment = write_assignment(places, like=member.protocols[0][1])
        return SyncAnswer(Code.NONE, given_type, given_name, assignment)

    def classic_beat(self, group: ConsumerGroup, sender: Sender, now_ms: int) -> Code:
        """Raises `Refused`."""
        member = classic_member(group, sender)
        group.deadlines[member.member_id][Timer.SESSION] = now_ms + member.session_timeout_ms
        missing = member.target - member.assigned.keys()
        is_free = member.state == Reconciliation.UNRELEASED and not any(
            place in group.owners for place in missing
        )
        if member.epoch < group.epoch or member.state == Reconciliation.UNREVOKED or is_free:
            self._must_join(group, member, now_ms)
            return Code.REBALANCE_IN_PROGRESS
        return Code.NONE

    def _must_join(self, group: ConsumerGroup, member: ConsumerMember, now_ms: int) -> None:
        until_ms = now_ms + member.rebalance_timeout_ms
        group.deadlines[member.member_id].setdefault(Timer.JOINING, until_ms)

    def leave(
        self, group: ConsumerGroup, member_id: str, instance_id: str | None, now_ms: int
    ) -> None:
        """By LeaveGroup, which tools use for members of either protocol. Raises `Refused`."""
        if not member_id and instance_id is not None:
            member_id = group.static.get(instance_id, "")
        self.remove(group, group.member(member_id, instance_id), now_ms)

    def adopted(self, group: Group) -> list[ConsumerMember]:
        """
        The members of a classic group, with the partitions that they have.

        Raises `Refused` where they are no consumers.
        """
        taken: set[tuple[str, int]] = set()
        members: list[ConsumerMember] = []
        for one in group.members.values():
            protocols = sorted(one.protocols, key=lambda each: each[0] != group.protocol)
            try:
                subscription = read_subscription(protocols[0][1])
                assigned = self._places(read_assignment(one.assignment)) - taken
            except Malformed as error:
                raise Refused(
                    Code.GROUP_ID_NOT_FOUND,
                    f"Cannot upgrade the classic group {group.group_id} to consumer group because "
                    f"the embedded consumer protocol is malformed: {error}.",
                ) from error
            taken |= assigned
            members.append(
                ConsumerMember(
                    group=group.group_id,
                    member_id=one.member_id,
                    instance_id=one.instance_id,
                    rack_id=subscription.rack_id,
                    client_id=one.client_id,
                    client_host=one.client_host,
                    rebalance_timeout_ms=one.rebalance_timeout_ms,
                    topics=tuple(sorted(set(subscription.topics))),
                    session_timeout_ms=one.session_timeout_ms,
                    protocols=tuple(protocols),
                    epoch=group.generation,
                    previous_epoch=group.generation,
                    assigned=dict.fromkeys(assigned, group.generation),
                    target=assigned,
                )
            )
        return members

    def adopt(self, group_id: str, epoch: int, members: list[ConsumerMember], now_ms: int) -> None:
        """Make a group of members that were a classic one."""
        self._say(ConsumerGroupChanged(group_id, epoch, epoch, "", now_ms))
        timers = self.groups[group_id].deadlines
        for member in members:
            self._put(member)
            timers[member.member_id][Timer.SESSION] = now_ms + member.session_timeout_ms

    def by_name(self, places: Places) -> dict[str, list[int]]:
        """Of topics that still exist."""
        found: dict[str, list[int]] = {}
        for topic_id, index in sorted(places):
            topic = self._topics.by_id.get(bytes.fromhex(topic_id))
            if topic is not None:
                found.setdefault(topic.name, []).append(index)
        return found

    def _places(self, named: Iterable[tuple[str, list[int]]]) -> Places:
        by_name = self._topics.by_name
        return frozenset(
            (by_name[name].topic_id.hex(), index)
            for name, indexes in named
            if name in by_name
            for index in indexes
        )

    # Offsets

    def check_commit(
        self, group: ConsumerGroup, sender: Sender, *, is_versioned: bool
    ) -> CommitCheck:
        """`is_versioned`: the request's epoch may be a member epoch (OffsetCommit 9)."""
        member_id, _, epoch = sender
        if epoch < 0 and not group.members:
            return CommitCheck(Code.NONE)
        member = group.members.get(member_id)
        if member is None:
            return CommitCheck(Code.UNKNOWN_MEMBER_ID)
        if not is_versioned and not is_classic(member):
            return CommitCheck(Code.UNSUPPORTED_VERSION)
        code = compare_epoch(member, epoch)
        # An older epoch is as good for partitions that it has had since.
        since = member.assigned.items() if 0 <= epoch < member.epoch else ()
        kept = self.by_name(frozenset(place for place, first in since if first <= epoch))
        return CommitCheck(code, frozenset((name, index) for name in kept for index in kept[name]))

    def check_fetch(self, group_id: str, member_id: str | None, epoch: int) -> Code:
        group = self.groups.get(group_id)
        if group is None or (member_id is None and epoch < 0):
            return Code.NONE
        member = group.members.get(member_id or "")
        return Code.UNKNOWN_MEMBER_ID if member is None else compare_epoch(member, epoch)

    # Time

    def expire(self, now_ms: int) -> list[ConsumerGroup]:
        """Remove members that did not come in time; returns their groups."""
        touched: list[ConsumerGroup] = []
        for group in self.groups.values():
            late = [
                member_id
                for member_id, timers in group.deadlines.items()
                if any(until_ms <= now_ms for until_ms in timers.values())
            ]
            for member_id in late:
                self.remove(group, group.members[member_id], now_ms)
            if late:
                touched.append(group)
        return touched

    def recovered(self, now_ms: int) -> None:
        for group in self.groups.values():
            group.deadlines.clear()
            session_ms = self._configs.session_ms(group.group_id)
            for member in group.members.values():
                timers = group.deadlines[member.member_id]
                timers[Timer.SESSION] = now_ms + (
                    member.session_timeout_ms if is_classic(member) else session_ms
                )
                if member.state == Reconciliation.UNREVOKED and not is_classic(member):
                    timers[Timer.REVOKING] = now_ms + member.rebalance_timeout_ms

    # Entries

    def _say(self, entry: ConsumerGroupChanged | ConsumerMemberGone) -> None:
        self.apply(entry)
        self._emit(entry)

    def _put(self, member: ConsumerMember) -> ConsumerMember:
        if self.groups[member.group].members.get(member.member_id) != member:
            self.apply(member)
            self._emit(member)
        return member

    def apply(self, entry: ConsumerGroupChanged | ConsumerMember | ConsumerMemberGone) -> None:
        group = self.groups.get(entry.group)
        match entry:
            case ConsumerGroupChanged():
                if group is None:
                    group = self.groups[entry.group] = ConsumerGroup(entry.group)
                group.epoch, group.assignment_epoch = entry.epoch, entry.assignment_epoch
                group.topics_hash, group.changed_ms = entry.topics_hash, entry.changed_ms
            case ConsumerMember() if group is not None:
                _release(group, entry.member_id)
                group.members[entry.member_id] = entry
                group.owners |= dict.fromkeys((*entry.assigned, *entry.revoking), entry.member_id)
                if entry.instance_id is not None:
                    group.static[entry.instance_id] = entry.member_id
            case ConsumerMemberGone() if group is not None:
                _release(group, entry.member_id)
                gone = group.members.pop(entry.member_id, None)
                group.deadlines.pop(entry.member_id, None)
                if gone is not None and group.static.get(gone.instance_id or "") == gone.member_id:
                    del group.static[gone.instance_id or ""]
            case _:
                pass

    def known(self) -> Iterator[Entry]:
        for group in self.groups.values():
            yield ConsumerGroupChanged(
                group.group_id,
                group.epoch,
                group.assignment_epoch,
                group.topics_hash,
                group.changed_ms,
            )
            yield from group.members.values()


def _hash_of(lines: Iterable[str]) -> str:
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=16).hexdigest()


def _release(group: ConsumerGroup, member_id: str) -> None:
    old = group.members.get(member_id)
    for place in () if old is None else (*old.assigned, *old.revoking):
        if group.owners.get(place) == member_id:
            del group.owners[place]
