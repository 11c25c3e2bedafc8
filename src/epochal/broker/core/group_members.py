"""`Group` and `Member`: the state of a consumer group, and questions about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from epochal.broker.core.consumer_protocol import Malformed, read_subscription
from epochal.broker.core.entries import GroupChanged
from epochal.kafka.codes import Code

NO_GENERATION = -1
CONSUMER = "consumer"
"""The type of protocol whose metadata is a subscription."""


class GroupState(Enum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


class JoinAnswer(NamedTuple):
    code: Code
    member_id: str = ""
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str = ""
    members: Sequence[tuple[str, str | None, bytes]] = ()
    """For the leader: member id, instance id, metadata."""
    is_assignment_skipped: bool = False


class SyncAnswer(NamedTuple):
    code: Code
    protocol_type: str | None = None
    protocol: str | None = None
    assignment: bytes = b""


class CommitCheck(NamedTuple):
    """Whether a client may commit offsets."""

    code: Code
    but_for: frozenset[tuple[str, int]] = frozenset()
    """Topics and partitions that it may commit nevertheless."""


Answer = JoinAnswer | SyncAnswer
Token = Callable[[Answer], None]
"""Called with the answer, once."""


class Sender(NamedTuple):
    """The member that a request says it comes from."""

    member_id: str
    instance_id: str | None
    generation: int
    """Of a member of the newer protocol: its epoch."""


class JoinRequest(NamedTuple):
    """A request to join, as in its newest version."""

    group_id: str
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: list[tuple[str, bytes]]
    must_know_id: bool
    """Whether a new member first gets its id, and joins again with it."""
    may_skip_assignment: bool


class SyncRequest(NamedTuple):
    """A request for the assignment of its sender, or the leader's with all of them."""

    group_id: str
    sender: Sender
    protocol_type: str | None
    protocol: str | None
    assignments: dict[str, bytes]
    """Member id → what it is assigned."""


@dataclass(slots=True, eq=False)
class Member:
    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: list[tuple[str, bytes]]
    assignment: bytes = b""
    joining: Token | None = None
    syncing: Token | None = None
    session_until_ms: int = 0

    def metadata(self, protocol: str | None) -> bytes:
        return next((data for name, data in self.protocols if name == protocol), b"")


@dataclass(slots=True, eq=False)
class Group:
    group_id: str
    state: GroupState = GroupState.EMPTY
    generation: int = 0
    protocol_type: str | None = None
    protocol: str | None = None
    leader: str | None = None
    members: dict[str, Member] = field(default_factory=dict)
    static: dict[str, str] = field(default_factory=dict)
    """Instance id → member id."""
    invited: dict[str, int] = field(default_factory=dict)
    """Ids given to new members that have not joined with them yet → until when."""
    rebalance_until_ms: int = 0
    changed_ms: int = 0


def changed(group: Group) -> GroupChanged:
    return GroupChanged(
        group.group_id,
        group.generation,
        group.protocol_type,
        group.protocol,
        group.leader,
        [
            (
                member.member_id,
                member.instance_id,
                member.client_id,
                member.client_host,
                member.session_timeout_ms,
                member.rebalance_timeout_ms,
                member.protocols,
                member.assignment,
            )
            for member in group.members.values()
        ],
        group.changed_ms,
    )


def check_member(group: Group, member_id: str, instance_id: str | None) -> Code:
    if instance_id is not None:
        known = group.static.get(instance_id)
        if known is None:
            return Code.UNKNOWN_MEMBER_ID
        if known != member_id:
            return Code.FENCED_INSTANCE_ID
    return Code.NONE if member_id in group.members else Code.UNKNOWN_MEMBER_ID


def can_agree(group: Group, wish: JoinRequest) -> bool:
    """Whether there would still be a protocol that all members support."""
    others = [m for m in group.members.values() if m.member_id != wish.member_id]
    if wish.instance_id is not None:
        others = [m for m in others if m.instance_id != wish.instance_id]
    if not others:
        return True
    if group.protocol_type != wish.protocol_type:
        return False
    common = {name for name, _ in wish.protocols}
    for member in others:
        common &= {name for name, _ in member.protocols}
    return bool(common)


def chosen(group: Group) -> str:
    """Every member votes for its first choice among the protocols that all support."""
    names = [[name for name, _ in member.protocols] for member in group.members.values()]
    common = set(names[0]).intersection(*names)
    votes = Counter(next(name for name in listed if name in common) for listed in names)
    return votes.most_common(1)[0][0]


def subscription(member: Member) -> list[str]:
    """The topics that a consumer's metadata names; none where it can't be read."""
    for _, data in member.protocols[:1]:
        try:
            return read_subscription(data).topics
        except Malformed:
            return []
    return []


def update(member: Member, wish: JoinRequest, token: Token | None) -> None:
    if token is not None:
        member.joining = token
    member.protocols = wish.protocols
    member.session_timeout_ms = wish.session_timeout_ms
    member.rebalance_timeout_ms = wish.rebalance_timeout_ms
    member.client_id, member.client_host = wish.client_id, wish.client_host


def synced(group: Group, member: Member) -> SyncAnswer:
    return SyncAnswer(Code.NONE, group.protocol_type, group.protocol, member.assignment)
