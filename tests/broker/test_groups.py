"""Members of a consumer group that die at a bad moment: the rest go on as who they are."""

from __future__ import annotations

from typing import Any

import pytest
from table import Answering, Table

from epochal.kafka.codes import Code
from epochal.kafka.messages.heartbeat import HeartbeatRequest
from epochal.kafka.messages.join_group import JoinGroupRequest, JoinGroupRequestProtocol
from epochal.kafka.messages.sync_group import SyncGroupRequest, SyncGroupRequestAssignment

SESSION_MS = 10_000


class Consumers:
    """Members of one group, by the names of these tests."""

    def __init__(self) -> None:
        self.table = Table()
        self.ids: dict[str, str] = {}
        self.generation = 0

    def join(self, name: str, instance: str | None = None) -> Answering:
        request = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=SESSION_MS,
            rebalance_timeout_ms=3 * SESSION_MS,
            member_id=self.ids.get(name, ""),
            group_instance_id=instance,
            protocol_type="consumer",
            protocols=[JoinGroupRequestProtocol(name="range", metadata=b"m")],
        )
        found = self.table.begin(request)
        if found.message is not None and found.message.error_code == Code.MEMBER_ID_REQUIRED:
            self.ids[name] = found.message.member_id
            return self.join(name)
        return found

    def take(self, name: str, joined: Answering) -> Any:
        """The answer to a request to join."""
        result = joined.message
        assert result is not None, "no answer yet"
        assert result.error_code == Code.NONE, Code(result.error_code)
        self.ids[name], self.generation = result.member_id, result.generation_id
        return result

    def sync(self, name: str, *given: str) -> Answering:
        request = SyncGroupRequest(
            group_id="g",
            generation_id=self.generation,
            member_id=self.ids[name],
            protocol_type="consumer",
            protocol_name="range",
            assignments=[
                SyncGroupRequestAssignment(member_id=self.ids[one], assignment=one.encode())
                for one in given
            ],
        )
        return self.table.begin(request)

    def beat(self, name: str) -> Code:
        request = HeartbeatRequest(
            group_id="g", generation_id=self.generation, member_id=self.ids[name]
        )
        return Code(self.table.ask(request).error_code)


@pytest.fixture
def two() -> Consumers:
    """Both have joined, `a` is the leader, and nobody has an assignment yet."""
    group = Consumers()
    group.take("a", group.join("a"))
    assert group.sync("a", "a").message.assignment == b"a"
    second = group.join("b")
    assert second.message is None
    assert group.take("a", group.join("a")).leader == group.ids["a"]
    group.take("b", second)
    return group


def test_a_leader_that_dies_before_it_assigns_is_left_out_and_others_stay_who_they_are(
    two: Consumers,
) -> None:
    waiting = two.sync("b")
    assert waiting.message is None
    two.table.pass_time(SESSION_MS)
    assert waiting.message.error_code == Code.REBALANCE_IN_PROGRESS
    two.table.pass_time(SESSION_MS // 2)
    result = two.take("b", two.join("b"))
    assert result.leader == result.member_id == two.ids["b"]
    assert len(result.members) == 1
    assert two.sync("b", "b").message.assignment == b"b"
    assert two.beat("a") is Code.UNKNOWN_MEMBER_ID


def test_a_follower_that_dies_before_it_hears_of_its_assignment_is_left_out(
    two: Consumers,
) -> None:
    assert two.sync("a", "a", "b").message.assignment == b"a"
    two.table.pass_time(SESSION_MS // 2)
    assert two.beat("a") is Code.NONE
    two.table.pass_time(SESSION_MS // 2)
    assert two.beat("a") is Code.REBALANCE_IN_PROGRESS
    assert len(two.take("a", two.join("a")).members) == 1
    assert two.beat("b") is Code.UNKNOWN_MEMBER_ID


def test_a_member_that_dies_while_all_are_to_join_again_is_waited_for_only_so_long(
    two: Consumers,
) -> None:
    two.sync("b")
    two.sync("a", "a", "b")
    newcomer = two.join("c")
    again = two.join("a")
    assert (newcomer.message, again.message) == (None, None)
    two.table.pass_time(SESSION_MS)
    assert len(two.take("a", again).members) == 2
    two.take("c", newcomer)
    two.sync("c")
    assert two.sync("a", "a", "c").message.assignment == b"a"
    assert two.beat("b") is Code.UNKNOWN_MEMBER_ID


def test_members_are_who_they_were_after_a_restart(two: Consumers) -> None:
    two.sync("b")
    two.sync("a", "a", "b")
    two.table = Table(two.table.disk)
    assert {two.beat("a"), two.beat("b")} == {Code.NONE}
