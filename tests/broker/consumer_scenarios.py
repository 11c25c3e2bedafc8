"""Conversations about groups of the newer consumer protocol, for `test_like_apache`."""

from __future__ import annotations

import struct
import time
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from conftest_tools import new_topic
from scenarios import Transcript

from epochal.broker.core.consumer_protocol import read_assignment, write_assignment
from epochal.kafka.client import group_coordinator
from epochal.kafka.cluster import Controller
from epochal.kafka.codes import Code
from epochal.kafka.messages import join_group, list_groups
from epochal.kafka.messages import offset_commit as committing
from epochal.kafka.messages import offset_fetch as offsets
from epochal.kafka.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from epochal.kafka.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    TopicPartitions,
)
from epochal.kafka.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from epochal.kafka.messages.delete_groups import DeleteGroupsRequest
from epochal.kafka.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
)
from epochal.kafka.messages.describe_groups import DescribeGroupsRequest
from epochal.kafka.messages.heartbeat import HeartbeatRequest
from epochal.kafka.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from epochal.kafka.messages.leave_group import LeaveGroupRequest, MemberIdentity
from epochal.kafka.messages.list_config_resources import ListConfigResourcesRequest
from epochal.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from epochal.kafka.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment


@dataclass
class Talk:
    """One group, and what its members send."""

    t: Transcript
    group: str = field(default_factory=lambda: f"group-{uuid.uuid4().hex[:8]}")
    names: dict[bytes, str] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    owned: dict[str, list[TopicPartitions]] = field(default_factory=dict)

    @property
    def to(self) -> Any:
        return group_coordinator(self.group)

    def send(self, member: str, epoch: int, version: int = 1, **fields: Any) -> Any:
        request = ConsumerGroupHeartbeatRequest(
            group_id=fields.pop("group_id", self.group),
            member_id=member,
            member_epoch=epoch,
            **fields,
        )
        answer = self.t.until(
            lambda: self.t.once(request, self.to, version), lambda a: a.error_code
        )
        if answer.member_epoch > 0:
            self.epochs[answer.member_id] = answer.member_epoch
            if answer.assignment is not None:
                places = answer.assignment.topic_partitions
                self.owned[answer.member_id] = [
                    TopicPartitions(topic_id=one.topic_id, partitions=one.partitions)
                    for one in places
                ]
        return answer

    def join(self, member: str, *topics: str, **fields: Any) -> Any:
        return self.send(
            member,
            0,
            rebalance_timeout_ms=fields.pop("rebalance_timeout_ms", 10_000),
            subscribed_topic_names=list(topics or (self.t.topic,)),
            topic_partitions=[],
            **fields,
        )

    def beat(self, member: str, *owned: int, ahead: int = 0, **fields: Any) -> Any:
        """A heartbeat that names the partitions of the first topic that it owns."""
        topic_id = self.topic_id(self.t.topic)
        parts = [TopicPartitions(topic_id=topic_id, partitions=list(owned))] if owned else []
        return self.send(member, self.at(member, ahead), topic_partitions=parts, **fields)

    def at(self, member: str, ahead: int = 0) -> int:
        """The newest epoch that a member has got, or one so far from it."""
        return self.epochs.get(member, 1) + ahead

    def topic_id(self, name: str) -> bytes:
        request = MetadataRequest(topics=[MetadataRequestTopic(name=name)])
        for _ in range(100):
            (topic,) = self.t.once(request, Controller()).topics
            if topic.error_code == 0:
                self.names[topic.topic_id] = name
                return topic.topic_id
            time.sleep(0.05)
        raise AssertionError(f"{name} is not there")

    def say(self, about: str, answer: Any) -> None:
        parts: object = None
        if answer.assignment is not None:
            places = answer.assignment.topic_partitions
            parts = self.shown((self.names.get(p.topic_id, "?"), p.partitions) for p in places)
        self.t.say(about, Code(answer.error_code), answer.member_epoch, parts)

    def shown(self, places: Iterable[tuple[str, list[int]]]) -> list[tuple[str, list[int]]]:
        return sorted((name.removeprefix(self.t.topic), sorted(parts)) for name, parts in places)

    def commit(self, member: str, epoch: int, version: int = 9, partition: int = 0) -> Code:
        part = committing.OffsetCommitRequestPartition(
            partition_index=partition, committed_offset=3
        )
        request = committing.OffsetCommitRequest(
            group_id=self.group,
            member_id=member,
            generation_id_or_member_epoch=epoch,
            topics=[committing.OffsetCommitRequestTopic(name=self.t.topic, partitions=[part])],
        )
        answer = self.t.once(request, self.to, version)
        return Code(answer.topics[0].partitions[0].error_code)

    def fetched(self, member: str | None, epoch: int) -> tuple[Code, list[int]]:
        asked = offsets.OffsetFetchRequestGroup(
            group_id=self.group,
            member_id=member,
            member_epoch=epoch,
            topics=[offsets.OffsetFetchRequestTopics(name=self.t.topic, partition_indexes=[0])],
        )
        (found,) = self.t.once(offsets.OffsetFetchRequest(groups=[asked]), self.to, 9).groups
        kept = [part.committed_offset for topic in found.topics for part in topic.partitions]
        return Code(found.error_code), kept

    def look(self) -> Any:
        (found,) = self.t.once(ConsumerGroupDescribeRequest(group_ids=[self.group]), self.to).groups
        return found

    def settle(self, *members: str, parts: int) -> None:
        """Let members go on with what they are given until together they read so many."""
        deadline = time.monotonic() + 60
        while True:
            for member in members:
                self.send(member, self.epochs[member], topic_partitions=self.owned[member])
            if sum(map(self.parts_of, members)) == parts and self.look().group_state == "Stable":
                return
            assert time.monotonic() < deadline, self.look()
            time.sleep(0.02)

    def parts_of(self, member: str) -> int:
        return sum(len(one.partitions) for one in self.owned[member])

    def described(self, about: str = "described") -> None:
        found = self.look()
        epochs = (found.group_epoch, found.assignment_epoch)
        self.t.say(about, Code(found.error_code), found.group_state, epochs, found.assignor_name)
        for one in sorted(found.members, key=lambda one: one.member_id):
            names = [name.removeprefix(self.t.topic) for name in one.subscribed_topic_names]
            who = (one.member_epoch, one.instance_id, one.member_type, names)
            self.t.say(f"{about} {one.member_id}", *who, *self.parts(one))

    def parts(self, member: Any) -> list[Any]:
        return [
            self.shown((p.topic_name, p.partitions) for p in kind.topic_partitions)
            for kind in (member.assignment, member.target_assignment)
        ]

    def show_readers(self, about: str) -> None:
        """What members read, without epochs: topics become known to Apache Kafka bit by bit."""
        for one in sorted(self.look().members, key=lambda one: one.member_id):
            pattern = one.subscribed_topic_regex.removeprefix(self.t.topic)
            self.t.say(about, one.member_id, pattern, *self.parts(one))

    def deleted(self) -> Code:
        (gone,) = self.t.once(DeleteGroupsRequest(groups_names=[self.group]), self.to).results
        return Code(gone.error_code)


def members_and_epochs(t: Transcript) -> None:
    g = Talk(t)
    g.topic_id(t.topic)
    g.described("before")
    g.say("unknown group", g.beat("a"))
    g.say("a", g.join("a"))
    g.described()
    g.say("a owns", g.beat("a", 0, 1))
    g.say("a short", g.send("a", g.at("a")))
    whole = {"rebalance_timeout_ms": 10_000, "subscribed_topic_names": [t.topic]}
    g.say("a whole", g.beat("a", 0, 1, **whole))
    g.say("a future", g.beat("a", ahead=7))
    g.say("a rejoins", g.join("a"))
    g.say("stranger", g.beat("x"))
    who = [("a", g.at("a")), ("a", g.at("a", 1)), ("a", 0), ("x", g.at("a")), ("", -1)]
    t.say("commits", *(g.commit(*one) for one in who), g.commit("a", g.at("a"), 8))
    t.say("fetches", *(g.fetched(*one) for one in [*who, (None, -1), ("a", -1)]))
    g.say("b", g.join("b"))
    g.described()
    g.say("a", g.beat("a", 0, 1))
    g.described()
    g.say("b", g.beat("b"))
    g.say("a gives up", g.beat("a", 0))
    g.described()
    g.say("b", g.beat("b"))
    g.say("b owns", g.beat("b", 1))
    g.say("a, answer lost", g.beat("a", 0, ahead=-1))
    g.say("a, with more", g.beat("a", 0, 1, ahead=-1))
    g.say("a, much older", g.beat("a", 0, ahead=-2))
    for ahead in (-2, -1, 0, 1):
        epoch = g.at("a", ahead)
        kept, lost = g.commit("a", epoch), g.commit("a", epoch, partition=1)
        t.say(f"commits {ahead}", kept, lost, g.commit("b", epoch, partition=1))
        t.say(f"fetches {ahead}", g.fetched("a", epoch), g.fetched("b", epoch))
    g.described()
    t.say("deleted with members", g.deleted())
    _leaving(g)


def _leaving(g: Talk) -> None:
    t = g.t
    g.say("b leaves", g.send("b", -1))
    g.described()
    g.say("b", g.beat("b"))
    g.say("a", g.beat("a", 0))
    g.described()
    request = list_groups.ListGroupsRequest(types_filter=["Consumer"])
    (listed,) = [one for one in t.once(request, g.to).groups if one.group_id == g.group]
    t.say("listed", listed.protocol_type, listed.group_state, listed.group_type)
    (classic,) = t.once(DescribeGroupsRequest(groups=[g.group]), g.to, 6).groups
    t.say("described as a classic one", Code(classic.error_code), classic.group_state)
    g.say("a rejoins", g.join("a"))
    g.say("a changes its mind", g.beat("a", 0, 1, subscribed_topic_names=["nowhere"]))
    g.say("a gives up", g.beat("a"))
    g.described()
    g.say("a leaves", g.send("a", -1))
    g.say("a leaves again", g.send("a", -1))
    g.described()
    t.say("commit of an empty group", g.commit("", -1), g.commit("a", 1))
    t.say("deleted", g.deleted())
    g.described()


def what_is_refused(t: Transcript) -> None:
    g = Talk(t)
    whole = {
        "rebalance_timeout_ms": 10_000,
        "subscribed_topic_names": [t.topic],
        "topic_partitions": [],
    }
    for about, epoch, fields in (
        ("no group", 0, {"group_id": "", **whole}),
        ("blank group", 0, {"group_id": " ", **whole}),
        ("no timeout", 0, {**whole, "rebalance_timeout_ms": -1}),
        ("owns", 0, {**whole, "topic_partitions": None}),
        ("no topics", 0, {**whole, "subscribed_topic_names": None}),
        ("assignor", 0, {**whole, "server_assignor": "sticky"}),
        ("blank instance", 0, {**whole, "instance_id": ""}),
        ("blank rack", 0, {**whole, "rack_id": ""}),
        ("epoch -3", -3, {}),
        ("static leave without a name", -2, {}),
        ("leave of nobody", -1, {}),
        ("regex", 0, {**whole, "subscribed_topic_names": None, "subscribed_topic_regex": "(("}),
        ("both", 0, {**whole, "subscribed_topic_regex": "a["}),
    ):
        g.say(about, g.send("m", epoch, **fields))
    g.say("no id", g.send("", 0, **whole))
    g.say("no id, leaving", g.send("", -1, 0))
    g.say("empty topics", g.send("e", 0, **{**whole, "subscribed_topic_names": []}))
    given = g.send("", 0, 0, **whole)
    t.say("id given", Code(given.error_code), bool(given.member_id), given.member_epoch)


def ranges(t: Transcript) -> None:
    g = Talk(t)
    other = new_topic(t.client, 3, name=f"{t.topic}-other")
    g.topic_id(t.topic)
    g.topic_id(other)
    for member in ("c", "b", "a"):
        answer = g.join(member, t.topic, other, server_assignor="range")
        t.say(f"{member} joins", Code(answer.error_code))
    g.settle("a", "b", "c", parts=5)
    g.show_readers("three")
    g.join("z", t.topic, other, instance_id="one")
    g.settle("a", "b", "c", "z", parts=5)
    g.show_readers("a static one")
    grown = CreatePartitionsTopic(name=t.topic, count=5, assignments=None)
    t.once(CreatePartitionsRequest(topics=[grown], timeout_ms=10_000), Controller())
    g.settle("a", "b", "c", "z", parts=8)
    g.show_readers("more partitions")
    g.join("d", "nowhere", server_assignor="uniform")
    g.settle("a", "b", "c", "d", "z", parts=8)
    g.show_readers("of another mind")


def static_members(t: Transcript) -> None:
    g = Talk(t)
    g.topic_id(t.topic)
    g.say("one", g.join("a", instance_id="one"))
    g.say("two", g.join("b", instance_id="two"))
    g.settle("a", "b", parts=2)
    mine = [index for one in g.owned["a"] for index in one.partitions]
    g.say("the same name", g.join("c", instance_id="one"))
    g.say("the same name goes on", g.beat("c", instance_id="one"))
    g.say("unknown name", g.beat("a", instance_id="three"))
    g.say("leaves for a while under a wrong id", g.send("c", -2, instance_id="one"))
    g.say("leaves for a while", g.send("a", -2, instance_id="one"))
    t.say("state", g.look().group_state)
    g.say("goes on", g.beat("a", *mine, instance_id="one"))
    t.say("commits", g.commit("a", g.at("a")), g.commit("a", -2))
    g.say("two", g.beat("b", instance_id="two"))
    back = g.join("c", instance_id="one")
    found = [index for one in back.assignment.topic_partitions for index in one.partitions]
    t.say("comes back", Code(back.error_code), back.member_epoch, found == mine)
    t.say("state", g.look().group_state)
    g.say("the old process", g.beat("a", *mine, instance_id="one"))
    g.say("leaves for good", g.send("c", -1, instance_id="one"))
    g.settle("b", parts=2)
    g.described()


def patterns(t: Transcript) -> None:
    """A group for each: Apache Kafka looks for topics again after ten seconds only."""
    other = new_topic(t.client, 3, name=f"{t.topic}-other")

    def ask(about: str, pattern: str, parts: int, *names: str) -> None:
        g = Talk(t)
        g.topic_id(t.topic)
        g.topic_id(other)
        g.owned["a"] = []
        answer = g.send(
            "a",
            0,
            subscribed_topic_regex=pattern,
            subscribed_topic_names=list(names) or None,
            rebalance_timeout_ms=10_000,
            topic_partitions=[],
        )
        t.say(about, Code(answer.error_code))
        g.settle("a", parts=parts)
        g.show_readers(about)
        g.send("a", g.at("a"), subscribed_topic_regex="", subscribed_topic_names=[t.topic])
        g.settle("a", parts=2)
        g.show_readers("names only")
        t.say("no pattern", Code(g.send("a", g.at("a"), subscribed_topic_regex="[").error_code))

    ask("whole names", f"{t.topic}", 2)
    ask("of one", f"{t.topic}-o.*", 3)
    ask("of both", f"{t.topic}.*", 5)
    ask("with a name", f"{t.topic}.*r", 5, t.topic)


def settings_of_groups(t: Transcript) -> None:
    g = Talk(t)
    session, heartbeat = "consumer.session.timeout.ms", "consumer.heartbeat.interval.ms"

    def alter(about: str, *steps: tuple[str, str | None, int], **wanted: Any) -> None:
        rows = [AlterableConfig(name=n, value=v, config_operation=o) for n, v, o in steps]
        group = wanted.pop("group", g.group)
        resource = AlterConfigsResource(resource_type=32, resource_name=group, configs=rows)
        request = IncrementalAlterConfigsRequest(resources=[resource], **wanted)
        (answer,) = t.once(request, Controller()).responses
        t.say(about, Code(answer.error_code))

    def rows() -> list[tuple[str, str | None, int, bool]]:
        asked = DescribeConfigsResource(
            resource_type=32, resource_name=g.group, configuration_keys=[session, heartbeat]
        )
        (found,) = t.once(DescribeConfigsRequest(resources=[asked]), Controller()).results
        return sorted((r.name, r.value, r.config_source, r.read_only) for r in found.configs)

    def described(about: str, before: object) -> object:
        """A broker knows of a change a moment after the controller."""
        for _ in range(100):
            now = rows()
            if now != before:
                break
            time.sleep(0.05)
        t.say(about, *now)
        return now

    first = described("before", None)
    alter("unknown", ("no.such", "1", 0))
    alter("no number", (session, "soon", 0))
    alter("session too short", (session, "1000", 0))
    alter("session too long", (session, "600000", 0))
    alter("heartbeat too short", (heartbeat, "10", 0))
    alter("heartbeat too long", (heartbeat, "50000", 0))
    alter("one of two is wrong", (session, "50000", 0), (heartbeat, "1", 0))
    alter("null", (session, None, 0))
    alter("appended", (session, "1", 2))
    alter("of no group", (session, "50000", 0), group="")
    alter("rehearsed", (session, "50000", 0), validate_only=True)
    alter("not there", (session, None, 1))
    alter("both", (session, "50000", 0), (heartbeat, "7000", 0))
    both = described("both", first)
    joined = g.join("a")
    t.say("heartbeat", Code(joined.error_code), joined.heartbeat_interval_ms)
    alter("deleted", (heartbeat, None, 1))
    described("deleted", both)
    listed = ListConfigResourcesRequest(resource_types=[32])
    found = t.once(listed, Controller()).config_resources
    t.say("listed", g.group in [one.resource_name for one in found])


@dataclass
class Classic:
    """A member of the classic protocol, in the same group."""

    g: Talk
    member: str = ""
    generation: int = -1
    owned: list[int] = field(default_factory=list)

    def metadata(self) -> bytes:
        name = self.g.t.topic.encode()
        named = struct.pack(f">ih{len(name)}s", 1, len(name), name)
        owned = struct.pack(">i", 0)
        if self.owned:
            parts = struct.pack(f">{len(self.owned) + 1}i", len(self.owned), *self.owned)
            owned = named + parts
        return struct.pack(">h", 1) + named + struct.pack(">i", -1) + owned

    def join(self, about: str) -> None:
        for _ in range(2):
            request = join_group.JoinGroupRequest(
                group_id=self.g.group,
                session_timeout_ms=10_000,
                rebalance_timeout_ms=10_000,
                member_id=self.member,
                protocol_type="consumer",
                protocols=[
                    join_group.JoinGroupRequestProtocol(name="range", metadata=self.metadata())
                ],
            )
            answer = self.g.t.once(request, self.g.to)
            self.member = answer.member_id
            if answer.error_code != Code.MEMBER_ID_REQUIRED:
                break
        self.generation = answer.generation_id
        is_leader = answer.leader == self.member
        self.g.t.say(about, Code(answer.error_code), answer.protocol_name, is_leader)

    def sync(self, about: str, *given: int) -> None:
        """With these partitions for itself, where it is the leader."""
        places = write_assignment({self.g.t.topic: given}, like=self.metadata())
        mine = SyncGroupRequestAssignment(member_id=self.member, assignment=places)
        request = SyncGroupRequest(
            group_id=self.g.group,
            generation_id=self.generation,
            member_id=self.member,
            protocol_type="consumer",
            protocol_name="range",
            assignments=[mine] if given else [],
        )
        answer = self.g.t.once(request, self.g.to)
        if answer.error_code == 0:
            found = read_assignment(answer.assignment)
            self.owned = [index for _, parts in found for index in parts]
        self.g.t.say(about, Code(answer.error_code), self.owned)

    def beat(self, about: str) -> None:
        request = HeartbeatRequest(
            group_id=self.g.group, generation_id=self.generation, member_id=self.member
        )
        self.g.t.say(about, Code(self.g.t.once(request, self.g.to).error_code))

    def leave(self, about: str, member: str = "") -> None:
        who = MemberIdentity(member_id=member or self.member)
        answer = self.g.t.once(LeaveGroupRequest(group_id=self.g.group, members=[who]), self.g.to)
        self.g.t.say(about, Code(answer.error_code), *(Code(m.error_code) for m in answer.members))


def both_protocols_in_one_group(t: Transcript) -> None:
    g = Talk(t)
    g.topic_id(t.topic)
    old = Classic(g)
    old.join("a classic member")
    old.sync("its assignment", 0, 1)
    t.say("commit", g.commit(old.member, old.generation))
    g.say("a heartbeat of nobody", g.beat("b"))
    g.say("a member of the newer protocol", g.join("b"))
    t.say("kinds", g.look().group_state, sorted(one.member_type for one in g.look().members))
    t.say("commits", g.commit(old.member, old.generation), g.commit(old.member, 77))
    old.beat("the classic one hears of it")
    old.join("joins again")
    old.sync("gives up one")
    old.beat("must join again")
    old.join("joins again")
    old.sync("has the rest")
    old.beat("is done")
    g.settle("b", parts=1)
    t.say("together", sorted([*old.owned, *(i for one in g.owned["b"] for i in one.partitions)]))
    second = Classic(g)
    second.join("another classic member")
    second.sync("it has nothing")
    second.leave("it leaves")
    g.say("another of the newer protocol", g.join("d"))
    old.leave("a tool removes one", "d")
    g.say("the last of the newer protocol leaves", g.send("b", -1))
    g.described("no longer of that kind")
    (classic,) = t.once(DescribeGroupsRequest(groups=[g.group]), g.to, 6).groups
    t.say("a classic one", Code(classic.error_code), classic.group_state, len(classic.members))
    old.beat("must join again")
    old.join("joins again")
    old.sync("all of it", 0, 1)
    old.leave("leaves")
    g.say("the newer protocol again", g.join("c"))
    g.settle("c", parts=2)
    g.say("and leaves", g.send("c", -1))
    old.member, old.owned = "", []
    old.join("a classic one again")
    (classic,) = t.once(DescribeGroupsRequest(groups=[g.group]), g.to, 6).groups
    t.say("state", classic.group_state)


ALL = (
    members_and_epochs,
    what_is_refused,
    ranges,
    static_members,
    patterns,
    settings_of_groups,
    both_protocols_in_one_group,
)
