"""`ConsumerGroup` and its members: states, checks, and the steps of a member to its target."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import NamedTuple

import re2

from epochal.broker.core.assignors import ASSIGNORS
from epochal.broker.core.entries import ConsumerMember, Places
from epochal.broker.core.group_members import CONSUMER, JoinRequest, Sender
from epochal.broker.core.topics import Refused
from epochal.kafka.codes import Code

LEAVES = -1
LEAVES_FOR_A_WHILE = -2
"""The epoch of a static member that is expected back."""
PATTERN = re2.Options()
"""As in Kafka: no pattern takes more than linear time."""
PATTERN.log_errors = False


class Reconciliation(IntEnum):
    STABLE = 0
    UNREVOKED = 1
    UNRELEASED = 2


class Timer(Enum):
    """What a member is removed for if it does not come in time."""

    SESSION = "a sign of life"
    REVOKING = "giving up the partitions that it was asked to"
    JOINING = "joining again, as it was asked to"
    SYNCING = "asking for its partitions, after it joined"


class Beat(NamedTuple):
    """A heartbeat. None: as in an earlier one."""

    group_id: str
    member_id: str
    epoch: int
    instance_id: str | None
    rack_id: str | None
    rebalance_timeout_ms: int
    topics: list[str] | None
    pattern: str | None
    assignor: str | None
    owned: Places | None
    client_id: str
    client_host: str

    @property
    def is_whole(self) -> bool:
        has_subscription = self.topics is not None or self.pattern is not None
        is_given = self.rebalance_timeout_ms != -1 and has_subscription and self.owned is not None
        return self.epoch == 0 or is_given


class BeatAnswer(NamedTuple):
    member_id: str
    epoch: int
    assigned: Places | None = None
    """None: unchanged."""


@dataclass(slots=True, eq=False)
class ConsumerGroup:
    group_id: str
    epoch: int = 0
    assignment_epoch: int = 0
    topics_hash: str = ""
    changed_ms: int = 0
    members: dict[str, ConsumerMember] = field(default_factory=dict)
    static: dict[str, str] = field(default_factory=dict)
    """Instance id → member id."""
    owners: dict[tuple[str, int], str] = field(default_factory=dict)
    """Partitions that a member has, or has not given up yet."""
    deadlines: dict[str, dict[Timer, int]] = field(default_factory=lambda: defaultdict(dict))
    topics_version: int = -1
    """Of `Topics`, when the hash was made."""

    @property
    def state(self) -> str:
        if not self.members:
            return "Empty"
        if self.epoch > self.assignment_epoch:
            return "Assigning"
        is_stable = all(is_reconciled(one, self.assignment_epoch) for one in self.members.values())
        return "Stable" if is_stable else "Reconciling"

    @property
    def assignor(self) -> str:
        """The one that most members ask for."""
        wanted = Counter(one.assignor for one in self.members.values() if one.assignor is not None)
        return wanted.most_common(1)[0][0] if wanted else next(iter(ASSIGNORS))

    @property
    def is_all_classic(self) -> bool:
        return bool(self.members) and all(map(is_classic, self.members.values()))

    def member(self, member_id: str, instance_id: str | None = None) -> ConsumerMember:
        """Raises `Refused`."""
        if instance_id is not None:
            known = self.static.get(instance_id)
            if known is None:
                raise Refused(Code.UNKNOWN_MEMBER_ID, f"Instance id {instance_id} is unknown.")
            if known != member_id:
                raise Refused(
                    Code.FENCED_INSTANCE_ID,
                    f"Static member {member_id} with instance id {instance_id} was fenced by "
                    f"member {known}.",
                )
        found = self.members.get(member_id)
        if found is None:
            raise Refused(
                Code.UNKNOWN_MEMBER_ID,
                f"Member {member_id} is not a member of group {self.group_id}.",
            )
        return found


def is_classic(member: ConsumerMember) -> bool:
    return member.session_timeout_ms >= 0


def is_reconciled(member: ConsumerMember, epoch: int) -> bool:
    return member.state == Reconciliation.STABLE and member.epoch == epoch


def check_beat(beat: Beat, *, must_have_id: bool) -> None:
    """Raises `Refused` for what is wrong whatever the group is."""
    is_first = beat.epoch == 0
    has_subscription = beat.topics is not None or beat.pattern is not None
    for is_good, message in (
        (beat.group_id.strip(), "GroupId can't be empty."),
        (beat.instance_id is None or beat.instance_id.strip(), "InstanceId can't be empty."),
        (beat.rack_id is None or beat.rack_id.strip(), "RackId can't be empty."),
        (
            beat.member_id.strip() or (is_first and not must_have_id),
            "MemberId can't be empty.",
        ),
        (beat.epoch >= LEAVES_FOR_A_WHILE, "MemberEpoch is invalid."),
        (
            beat.epoch != LEAVES_FOR_A_WHILE or beat.instance_id is not None,
            "InstanceId can't be null.",
        ),
        (
            not is_first or beat.rebalance_timeout_ms != -1,
            "RebalanceTimeoutMs must be provided in first request.",
        ),
        (
            not is_first or beat.owned == frozenset(),
            "TopicPartitions must be empty when (re-)joining.",
        ),
        (
            not is_first or has_subscription,
            "Either SubscribedTopicNames or SubscribedTopicRegex must be non-null when "
            "(re-)joining.",
        ),
    ):
        if not is_good:
            raise Refused(Code.INVALID_REQUEST, message)
    if beat.assignor is not None and beat.assignor not in ASSIGNORS:
        raise Refused(
            Code.UNSUPPORTED_ASSIGNOR,
            f"ServerAssignor {beat.assignor} is not supported. Supported assignors: "
            f"{', '.join(ASSIGNORS)}.",
        )
    if beat.pattern:
        compiled(beat.pattern)


def compiled(pattern: str) -> re2._Regexp[str]:
    try:
        return re2.compile(pattern, PATTERN)
    except re2.error as error:
        reason = error.args[0].decode() if isinstance(error.args[0], bytes) else error
        raise Refused(
            Code.INVALID_REGULAR_EXPRESSION,
            f"SubscribedTopicRegex `{pattern}` is not a valid regular expression: {reason}.",
        ) from None


def updated(member: ConsumerMember, beat: Beat) -> ConsumerMember:
    timeout_ms = beat.rebalance_timeout_ms
    return member._replace(
        instance_id=beat.instance_id or member.instance_id,
        rack_id=beat.rack_id or member.rack_id,
        client_id=beat.client_id,
        client_host=beat.client_host,
        rebalance_timeout_ms=member.rebalance_timeout_ms if timeout_ms == -1 else timeout_ms,
        topics=member.topics if beat.topics is None else tuple(sorted(set(beat.topics))),
        pattern=member.pattern if beat.pattern is None else beat.pattern,
        assignor=beat.assignor or member.assignor,
        session_timeout_ms=-1,
        protocols=(),
    )


def check_epoch(member: ConsumerMember, beat: Beat) -> None:
    """An answer with a new epoch may have been lost: the one before it is good, too."""
    is_repeated = (
        beat.epoch == member.previous_epoch < member.epoch
        and beat.owned is not None
        and beat.owned <= member.assigned.keys()
    )
    if beat.epoch in (0, member.epoch) or is_repeated:
        return
    which = "greater" if beat.epoch > member.epoch else "smaller"
    raise Refused(
        Code.FENCED_MEMBER_EPOCH,
        f"The consumer group member has a {which} member epoch ({beat.epoch}) than the one known "
        f"by the group coordinator ({member.epoch}). The member must abandon all its partitions "
        "and rejoin.",
    )


def compare_epoch(member: ConsumerMember, epoch: int) -> Code:
    if epoch == member.epoch:
        return Code.NONE
    return Code.ILLEGAL_GENERATION if is_classic(member) else Code.STALE_MEMBER_EPOCH


def reconciled(
    group: ConsumerGroup, member: ConsumerMember, owned: Places | None
) -> ConsumerMember:
    """The member after one step towards its target."""
    if is_reconciled(member, group.assignment_epoch):
        return member
    epoch = member.epoch
    if member.state == Reconciliation.UNREVOKED:
        if owned is None or owned & member.revoking:
            return member
        epoch += 1
    kept = {place: since for place, since in member.assigned.items() if place in member.target}
    surplus = frozenset(member.assigned.keys() - member.target)
    if surplus and (owned is None or owned & surplus):
        return _at_epoch(member, epoch)._replace(
            state=Reconciliation.UNREVOKED, assigned=kept, revoking=surplus
        )
    wanted = member.target - kept.keys()
    free = [place for place in wanted if place not in group.owners]
    return _at_epoch(member, group.assignment_epoch)._replace(
        state=Reconciliation.STABLE if len(free) == len(wanted) else Reconciliation.UNRELEASED,
        assigned=kept | dict.fromkeys(free, group.assignment_epoch),
        revoking=frozenset(),
    )


def _at_epoch(member: ConsumerMember, epoch: int) -> ConsumerMember:
    if epoch == member.epoch:
        return member._replace(previous_epoch=epoch)
    return member._replace(epoch=epoch, previous_epoch=member.epoch)


def check_protocols(group: ConsumerGroup, wish: JoinRequest) -> None:
    common = {name for name, _ in wish.protocols}
    for member in group.members.values():
        if is_classic(member) and member.member_id != wish.member_id:
            common &= {name for name, _ in member.protocols}
    if wish.protocol_type != CONSUMER or not common:
        raise Refused(
            Code.INCONSISTENT_GROUP_PROTOCOL,
            f"Member {wish.member_id}'s protocols are not supported.",
        )


def classic_member(group: ConsumerGroup, sender: Sender) -> ConsumerMember:
    member_id, instance_id, generation = sender
    member = group.member(member_id, instance_id)
    if not is_classic(member):
        raise Refused(
            Code.UNKNOWN_MEMBER_ID, f"Member {member_id} does not use the classic protocol."
        )
    if generation != member.epoch:
        raise Refused(
            Code.ILLEGAL_GENERATION,
            f"The request generation id {generation} is not equal to the member epoch "
            f"{member.epoch} of member {member_id}.",
        )
    return member
