"""Groups of the newer consumer protocol: no partition has two readers, and each finds one."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from conftest_tools import PROOF_KILLS, new_topic
from servers.embedded import EmbeddedServer
from table import Table

from epochal.broker.core.assignors import Reader, in_ranges, uniform
from epochal.broker.core.settings import Settings
from epochal.clock import SystemClock
from epochal.kafka.client import Client, group_coordinator
from epochal.kafka.codes import Code
from epochal.kafka.messages.consumer_group_describe import ConsumerGroupDescribeRequest
from epochal.kafka.messages.consumer_group_heartbeat import (
    ConsumerGroupHeartbeatRequest,
    TopicPartitions,
)
from epochal.kafka.messages.create_partitions import (
    CreatePartitionsRequest,
    CreatePartitionsTopic,
)
from epochal.kafka.messages.create_topics import CreatableTopic, CreateTopicsRequest
from epochal.kafka.messages.delete_topics import DeleteTopicsRequest, DeleteTopicState
from epochal.kafka.messages.heartbeat import HeartbeatRequest
from epochal.kafka.messages.incremental_alter_configs import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from epochal.kafka.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from epochal.kafka.messages.offset_fetch import OffsetFetchRequest, OffsetFetchRequestGroup
from epochal.kafka.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment

SESSION_MS, REBALANCE_MS = 10_000, 30_000
SETTINGS = Settings(consumer_session_ms=SESSION_MS)
FENCED = (Code.UNKNOWN_MEMBER_ID, Code.FENCED_MEMBER_EPOCH, Code.FENCED_INSTANCE_ID)


@dataclass
class Member:
    """A consumer, as Kafka's clients are: it reads what it owns, and gives up before it takes."""

    name: str
    topics: list[str]
    assignor: str | None = None
    instance: str | None = None
    epoch: int = 0
    owned: set[tuple[bytes, int]] = field(default_factory=set)
    says_all: bool = True
    """At first, and after an answer that did not come."""
    heard_ms: int = 0


class Consumers:
    """One group, and the members of it that are alive."""

    def __init__(self) -> None:
        self.table = Table(settings=SETTINGS)
        self.members: dict[str, Member] = {}
        self.topics: dict[str, int] = {}

    def make_topic(self, name: str, partitions: int) -> None:
        wanted = CreatableTopic(name=name, num_partitions=partitions, replication_factor=1)
        (made,) = self.table.ask(CreateTopicsRequest(topics=[wanted])).topics
        assert made.error_code == 0, made
        self.topics[name] = partitions

    def grow_topic(self, name: str, partitions: int) -> None:
        wanted = CreatePartitionsTopic(name=name, count=partitions, assignments=None)
        self.table.ask(CreatePartitionsRequest(topics=[wanted]))
        self.topics[name] = partitions

    def delete_topic(self, name: str) -> None:
        self.table.ask(DeleteTopicsRequest(topics=[DeleteTopicState(name=name)]))
        del self.topics[name]

    def add(self, name: str, *topics: str, **options: Any) -> Member:
        self.members[name] = member = Member(name, list(topics), **options)
        return member

    def send(self, member: Member, epoch: int, **fields: Any) -> Any:
        request = ConsumerGroupHeartbeatRequest(
            group_id="g",
            member_id=member.name,
            member_epoch=epoch,
            instance_id=member.instance,
            **fields,
        )
        return self.table.ask(request)

    def beat(self, member: Member, *, is_lost: bool = False) -> Code:
        """A heartbeat; its answer may be lost."""
        fields: dict[str, Any] = {}
        if member.says_all:
            fields = {
                "rebalance_timeout_ms": REBALANCE_MS,
                "subscribed_topic_names": member.topics,
                "server_assignor": member.assignor,
            }
        owned: dict[bytes, list[int]] = {}
        for topic_id, index in member.owned:
            owned.setdefault(topic_id, []).append(index)
        parts = [TopicPartitions(topic_id=one, partitions=owned[one]) for one in owned]
        answer = self.send(member, member.epoch, topic_partitions=parts, **fields)
        code = Code(answer.error_code)
        if is_lost:
            member.says_all = True
            return code
        member.heard_ms = self.table.now_ms
        if code in FENCED:
            member.epoch, member.owned, member.says_all = 0, set(), True
        elif code is Code.NONE:
            member.epoch, member.says_all = answer.member_epoch, False
            if answer.assignment is not None:
                member.owned = {
                    (one.topic_id, index)
                    for one in answer.assignment.topic_partitions
                    for index in one.partitions
                }
        return code

    def leave(self, member: Member, epoch: int = -1) -> None:
        self.send(member, epoch)
        del self.members[member.name]

    def check(self) -> None:
        """No partition has two readers that may both be alive."""
        readers: dict[tuple[bytes, int], str] = {}
        for member in self.members.values():
            for place in member.owned:
                assert place not in readers, (place, member.name, readers[place])
                readers[place] = member.name

    def settle(self) -> None:
        for _ in range(60):
            for member in list(self.members.values()):
                self.beat(member)
                self.check()
            if self.state() == "Stable":
                return
        raise AssertionError(self.described())

    def described(self) -> Any:
        return self.table.ask(ConsumerGroupDescribeRequest(group_ids=["g"])).groups[0]

    def state(self) -> str:
        return self.described().group_state

    def check_all_read(self) -> None:
        by_name = self.table.broker.state.topics.by_name
        wanted = {
            (by_name[name].topic_id, index)
            for name in {one for member in self.members.values() for one in member.topics}
            if name in by_name
            for index in range(self.topics[name])
        }
        assert wanted == {place for one in self.members.values() for place in one.owned}

    def restart(self) -> None:
        self.table = Table(self.table.disk, settings=SETTINGS, now_ms=self.table.now_ms)


def random_life(seed: int, steps: int) -> None:  # noqa: PLR0912  a case per event
    chance = random.Random(seed)
    group = Consumers()
    group.make_topic("t0", 4)
    for _ in range(steps):
        alive = list(group.members.values())
        match chance.randrange(12):
            case 0 if len(alive) < 6:
                name = f"m{chance.randrange(1000)}"
                topics = chance.sample(["t0", "t1", "t2"], chance.randint(1, 3))
                group.add(name, *topics, assignor=chance.choice([None, "uniform", "range"]))
            case 1 if alive:
                group.leave(chance.choice(alive))
            case 2 if alive:  # it dies without a word to the broker
                del group.members[chance.choice(alive).name]
            case 3:
                group.restart()
            case 4:
                missing = [one for one in ("t0", "t1", "t2") if one not in group.topics]
                if missing:
                    group.make_topic(missing[0], chance.randint(1, 5))
            case 5 if group.topics:
                name = chance.choice(sorted(group.topics))
                if chance.random() < 0.3:
                    group.delete_topic(name)
                else:
                    group.grow_topic(name, group.topics[name] + 1)
            case 6 if alive:
                member = chance.choice(alive)
                member.topics = chance.sample(["t0", "t1", "t2"], chance.randint(1, 3))
                member.says_all = True
            case 7:
                # Nobody that lives is late, so that no reader is judged dead while it reads.
                for member in alive:
                    group.beat(member)
                group.table.pass_time(SESSION_MS // 2)
            case _ if alive:
                group.beat(chance.choice(alive), is_lost=chance.random() < 0.2)
            case _:
                pass
        group.check()
    for _ in range(3):  # the dead are found
        for member in group.members.values():
            group.beat(member)
        group.table.pass_time(SESSION_MS // 2)
    if group.members:
        group.settle()
        group.check_all_read()


@pytest.mark.parametrize("seed", range(40))
def test_no_partition_has_two_readers_when_members_come_go_or_die(seed: int) -> None:
    random_life(seed, 80)


@pytest.mark.proof
@pytest.mark.parametrize("block", range(20))
def test_the_same_for_long(block: int) -> None:
    for seed in range(1000 + block * 100, 1100 + block * 100):
        random_life(seed, 200)


@pytest.fixture
def two() -> Consumers:
    group = Consumers()
    group.make_topic("t", 4)
    group.add("a", "t")
    group.add("b", "t")
    group.settle()
    assert [len(one.owned) for one in group.members.values()] == [2, 2]
    return group


def test_a_member_that_falls_silent_loses_its_partitions_to_the_others(two: Consumers) -> None:
    gone = two.members.pop("b")
    two.table.pass_time(SESSION_MS - 1)
    assert two.beat(two.members["a"]) is Code.NONE
    assert len(two.members["a"].owned) == 2
    two.table.pass_time(1)
    two.settle()
    assert len(two.members["a"].owned) == 4
    assert two.beat(gone) is Code.UNKNOWN_MEMBER_ID


def test_a_member_that_does_not_give_up_in_time_is_fenced(two: Consumers) -> None:
    stubborn = two.members["a"]
    kept = set(stubborn.owned)
    two.beat(two.add("c", "t"))
    assert two.beat(stubborn) is Code.NONE
    for _ in range(REBALANCE_MS // (SESSION_MS // 2)):
        stubborn.owned = set(kept)
        assert two.beat(stubborn) is Code.NONE
        two.beat(two.members["b"])
        two.beat(two.members["c"])
        assert not two.members["c"].owned & kept
        two.table.pass_time(SESSION_MS // 2)
    assert two.beat(stubborn) is Code.UNKNOWN_MEMBER_ID
    two.settle()
    two.check_all_read()


def test_members_go_on_as_who_they_were_after_a_restart(two: Consumers) -> None:
    before = {name: (one.epoch, set(one.owned)) for name, one in two.members.items()}
    for _ in range(2):  # from the journal, then from its snapshot
        two.restart()
        two.settle()
        assert before == {name: (one.epoch, one.owned) for name, one in two.members.items()}
    two.table.pass_time(SESSION_MS)
    assert two.state() == "Empty"


def test_a_group_has_its_own_session_and_heartbeat_also_after_a_restart() -> None:
    group = Consumers()
    group.make_topic("t", 1)
    group.table.ask(configured("g", session="60000", heartbeat="9000"))
    for _ in range(2):  # from the journal, then from its snapshot
        group.restart()
    member = group.add("a", "t")
    group.beat(member)
    assert group.send(member, member.epoch).heartbeat_interval_ms == 9_000
    group.table.pass_time(59_999)
    assert group.beat(member) is Code.NONE
    group.restart()
    group.table.pass_time(59_999)
    assert group.beat(member) is Code.NONE
    group.table.pass_time(60_000)
    assert group.beat(member) is Code.UNKNOWN_MEMBER_ID


def configured(group: str, *, session: str, heartbeat: str) -> IncrementalAlterConfigsRequest:
    values = {"consumer.session.timeout.ms": session, "consumer.heartbeat.interval.ms": heartbeat}
    rows = [
        AlterableConfig(name=name, value=value, config_operation=0)
        for name, value in values.items()
    ]
    resource = AlterConfigsResource(resource_type=32, resource_name=group, configs=rows)
    return IncrementalAlterConfigsRequest(resources=[resource])


def test_a_restart_in_the_middle_of_a_rebalance_loses_no_step(two: Consumers) -> None:
    two.add("c", "t")
    two.beat(two.members["c"])
    two.beat(two.members["a"])
    two.restart()
    two.check()
    two.settle()
    two.check_all_read()
    assert sorted(len(one.owned) for one in two.members.values()) == [1, 1, 2]


def test_a_static_member_that_is_away_keeps_its_partitions_until_its_session_ends() -> None:
    group = Consumers()
    group.make_topic("t", 2)
    group.add("a", "t", instance="one")
    group.add("b", "t", instance="two")
    group.settle()
    mine = group.members["a"].owned
    group.leave(group.members["a"], epoch=-2)
    group.beat(group.members["b"])
    group.restart()
    back = group.add("c", "t", instance="one")
    assert group.beat(back) is Code.NONE
    assert back.owned == mine
    group.leave(back, epoch=-2)
    group.table.pass_time(SESSION_MS - 1)
    group.beat(group.members["b"])
    group.table.pass_time(1)
    group.settle()
    group.check_all_read()


def test_a_classic_group_with_both_kinds_of_members_survives_a_restart(two: Consumers) -> None:
    """The same partitions in both protocols, from the journal."""
    metadata = b"\0\1\0\0\0\1\0\1t\xff\xff\xff\xff\0\0\0\0"
    join = JoinGroupRequest(
        group_id="old",
        session_timeout_ms=SESSION_MS,
        rebalance_timeout_ms=REBALANCE_MS,
        protocol_type="consumer",
        protocols=[JoinGroupRequestProtocol(name="range", metadata=metadata)],
    )
    join.member_id = two.table.ask(join).member_id
    joined = two.table.ask(join)
    all_of_it = b"\0\1\0\0\0\1\0\1t\0\0\0\4\0\0\0\0\0\0\0\1\0\0\0\2\0\0\0\3\xff\xff\xff\xff"
    sync = SyncGroupRequest(
        group_id="old",
        member_id=join.member_id,
        generation_id=joined.generation_id,
        protocol_type="consumer",
        protocol_name="range",
        assignments=[SyncGroupRequestAssignment(member_id=join.member_id, assignment=all_of_it)],
    )
    assert two.table.ask(sync).assignment == all_of_it
    newcomer = ConsumerGroupHeartbeatRequest(
        group_id="old",
        member_id="new",
        rebalance_timeout_ms=REBALANCE_MS,
        subscribed_topic_names=["t"],
        topic_partitions=[],
    )
    assert two.table.ask(newcomer).assignment.topic_partitions == []
    two.restart()
    beat = HeartbeatRequest(group_id="old", member_id=join.member_id, generation_id=1)
    assert two.table.ask(beat).error_code == Code.REBALANCE_IN_PROGRESS
    again = two.table.ask(join)
    assert again.error_code == Code.NONE
    sync.generation_id, sync.assignments = again.generation_id, []
    assert two.table.ask(sync).assignment == (
        b"\0\1\0\0\0\1\0\1t\0\0\0\2\0\0\0\0\0\0\0\1\xff\xff\xff\xff"
    )
    two.restart()
    newcomer.member_epoch, newcomer.topic_partitions = again.generation_id, []
    (given,) = two.table.ask(newcomer).assignment.topic_partitions
    assert sorted(given.partitions) == [2, 3]
    newcomer.member_epoch = -1
    assert two.table.ask(newcomer).error_code == Code.NONE
    two.restart()
    assert "old" in two.table.broker.state.groups.classic.groups
    assert "old" not in two.table.broker.state.groups.consumers.groups


@pytest.mark.parametrize("seed", range(50))
def test_uniform_shares_are_equal_and_nobody_gives_up_more_than_needed(seed: int) -> None:
    chance = random.Random(seed)
    counts = {f"t{number}": chance.randint(1, 9) for number in range(chance.randint(1, 4))}
    readers: dict[str, Reader] = {}
    for number in range(chance.randint(1, 7)):
        before = {name: one.target for name, one in readers.items()}
        readers[f"m{number}"] = Reader(None, frozenset(counts), frozenset())
        found = uniform(readers, counts)
        readers = {name: one._replace(target=found[name]) for name, one in readers.items()}
        sizes = [len(places) for places in found.values()]
        assert max(sizes) - min(sizes) <= 1
        assert sum(sizes) == sum(counts.values()) == len(frozenset().union(*found.values()))
        moved = sum(len(places - found[name]) for name, places in before.items())
        assert not before or moved == len(found[f"m{number}"])


@pytest.mark.parametrize("seed", range(50))
def test_every_partition_has_one_reader_that_wants_it(seed: int) -> None:
    chance = random.Random(seed)
    counts = {f"t{number}": chance.randint(1, 9) for number in range(chance.randint(1, 4))}
    readers = {
        f"m{number}": Reader(
            chance.choice([None, f"i{number}"]),
            frozenset(chance.sample(sorted(counts), chance.randint(0, len(counts)))),
            frozenset((topic, index) for topic in counts for index in range(number, 12, 7)),
        )
        for number in range(7)
    }
    wanted = {
        (topic, index)
        for topic in frozenset().union(*(one.topics for one in readers.values()))
        for index in range(counts[topic])
    }
    for assign in (uniform, in_ranges):
        found = assign(readers, counts)
        listed = [place for places in found.values() for place in places]
        assert len(listed) == len(set(listed))
        assert set(listed) == wanted
        for name, places in found.items():
            assert {topic for topic, _ in places} <= readers[name].topics


class Killed:
    """Members in processes of their own, a broker, and a producer that never stops."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        settings = {"consumer_session_ms": 1_500, "consumer_heartbeat_ms": 100}
        self.broker = EmbeddedServer(folder, settings=settings)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.sent = 0

    def start_member(self) -> None:
        file = self.folder / f"rows-{len(list(self.folder.glob('rows-*')))}"
        file.touch()
        program = str(Path(__file__).with_name("group_member.py"))
        arguments = [self.broker.address(), "g", "t", str(file), "consumer"]
        self.processes.append(subprocess.Popen([sys.executable, program, *arguments]))

    def kill_member(self, chance: random.Random) -> None:
        victim = self.processes.pop(chance.randrange(len(self.processes)))
        victim.kill()
        victim.wait()

    def send(self, producer: Producer, count: int) -> None:
        for _ in range(count):
            producer.produce("t", b"%d" % self.sent, partition=self.sent % 6)
            self.sent += 1
        assert producer.flush(60) == 0

    def read(self) -> set[int]:
        """Whole lines only: the last one of a killed member may be torn."""
        files = [file.read_bytes() for file in self.folder.glob("rows-*")]
        return {int(line) for data in files for line in data.split(b"\n")[:-1]}

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()
        self.broker.stop()


@pytest.mark.parametrize(
    "kills", [4, pytest.param(PROOF_KILLS, marks=pytest.mark.proof)], ids=["few", "many"]
)
def test_every_row_is_read_while_members_and_the_broker_are_killed(
    tmp_path: Path, kills: int
) -> None:
    chance = random.Random(7)
    world = Killed(tmp_path)
    world.broker.start()
    try:
        with Client(world.broker.address(), clock=SystemClock()) as client:
            new_topic(client, 6, name="t")
        producer = Producer({"bootstrap.servers": world.broker.address(), "log_level": 0})
        for _ in range(3):
            world.start_member()
        for number in range(kills):
            world.send(producer, 60)
            wait_until(lambda: len(world.read()) > world.sent // 2)
            if number % 2:
                world.broker.kill()
                world.broker.start()
            else:
                world.kill_member(chance)
                world.start_member()
        world.send(producer, 60)
        wait_until(lambda: world.read() == set(range(world.sent)))
        with Client(world.broker.address(), clock=SystemClock()) as client:
            wait_until(lambda: committed(client) == world.sent)
    finally:
        world.stop()


def committed(client: Client) -> int:
    """Rows that the group has committed, of all partitions."""
    request = OffsetFetchRequest(groups=[OffsetFetchRequestGroup(group_id="g", topics=None)])
    (found,) = client.ask(request, group_coordinator("g")).groups
    return sum(part.committed_offset for topic in found.topics for part in topic.partitions)


def wait_until(is_so: Callable[[], bool], within_s: float = 120.0) -> None:
    deadline = time.monotonic() + within_s
    while not is_so():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)
