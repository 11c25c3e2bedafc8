"""The rights that a principal needs at an Apache Kafka with ACLs: those of `grants()`, no less."""

from __future__ import annotations

import itertools
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from kafka_broker import Broker, Life, apache_at, some

from epochal.errors import Misconfigured
from epochal.terms import Proof

_RESOURCES = {
    "--topic": ResourceType.TOPIC,
    "--group": ResourceType.GROUP,
    "--transactional-id": ResourceType.TRANSACTIONAL_ID,
}
_OPERATIONS = {
    "Write": AclOperation.WRITE,
    "Read": AclOperation.READ,
    "Describe": AclOperation.DESCRIBE,
    "DescribeConfigs": AclOperation.DESCRIBE_CONFIGS,
}


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, str]]:
    """A listener without authentication, and the address of one with it."""
    server = apache_at(
        tmp_path_factory.mktemp("guarded"),
        settings={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        },
    )
    server.start()
    kafka = Broker(bootstrap=server.address())
    yield kafka, server.address("SASL")
    kafka.close()
    server.kill()


def grant(kafka: Broker, commands: list[str]) -> None:
    """What `kafka-acls.sh` does with these commands."""
    bindings = [binding for command in commands for binding in _bindings(shlex.split(command))]
    _create(AdminClient({"bootstrap.servers": kafka.bootstrap}), bindings)


@contextmanager
def denied(kafka: Broker, option: str, name: str, operation: str) -> Iterator[None]:
    """For the length of a block, alice has one right less, at every broker."""
    admin = AdminClient({"bootstrap.servers": kafka.bootstrap})
    binding = _binding(option, name, "User:alice", operation, AclPermissionType.DENY)
    _create(admin, [binding])
    yield
    wanted = _filter(binding)
    for done in admin.delete_acls([wanted]).values():
        done.result(60)
    _await(lambda: not admin.describe_acls(wanted).result(60))


def _create(admin: AdminClient, bindings: list[AclBinding]) -> None:
    """Returns when the broker knows of it: changes reach it from its controller, later."""
    for done in admin.create_acls(bindings).values():
        done.result(60)
    for binding in bindings:
        _await(lambda: admin.describe_acls(_filter(binding)).result(60))  # noqa: B023  asked at once


def _await(is_so: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _bindings(words: list[str]) -> list[AclBinding]:
    option = next(word for word in words if word in _RESOURCES)
    name = words[words.index(option) + 1]
    principal = words[words.index("--allow-principal") + 1]
    is_prefix = "prefixed" in words
    operations = [words[at + 1] for at, word in enumerate(words) if word == "--operation"]
    return [
        _binding(option, name, principal, one, AclPermissionType.ALLOW, is_prefix=is_prefix)
        for one in operations
    ]


def _binding(
    option: str,
    name: str,
    principal: str,
    operation: str,
    permission: AclPermissionType,
    *,
    is_prefix: bool = True,
) -> AclBinding:
    pattern = ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL
    whom = (principal, "*", _OPERATIONS[operation], permission)
    return AclBinding(_RESOURCES[option], name, pattern, *whom)


def _filter(one: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        one.restype,
        one.name,
        one.resource_pattern_type,
        one.principal,
        one.host,
        one.operation,
        one.permission_type,
    )


def _life(kafka: Broker, address: str, topic: str) -> Life:
    sink = kafka.sink(
        topic,
        bootstrap=address,
        key="id",
        username="alice",
        password="alice-secret",
        sasl_mechanism="SCRAM-SHA-256",
        commit_offsets="billing",
    )
    return kafka.keep(Life(sink=sink))


def test_missing_rights_are_named_at_the_start_and_those_granted_are_enough(guarded) -> None:
    kafka, address = guarded
    topic = kafka.topic(partitions=2)
    life = _life(kafka, address, topic)
    messages = []
    for command in life.sink.grants("User:alice"):
        with pytest.raises(Misconfigured) as caught:
            life.committer.check(some(1).schema)
        messages.append(caught.value.message)
        assert "`epochal grants PIPELINE`" in caught.value.hint
        grant(kafka, [command])
    assert "alice-secret" not in "".join(messages)
    assert any("TRANSACTIONAL_ID" in one for one in messages)
    assert any("group" in one for one in messages)
    life.committer.check(some(1).schema)
    life.write(0, some(1, 2), some(3), first=True)
    receipts = life.write(1, some(4), first=True)
    life.abort(2, life.prepare(2, some(5), first=True))
    life.commit(3, [])
    assert kafka.ids(topic) == [1, 2, 3, 4]
    assert life.outcome(receipts[0]) is Proof.COMMITTED
    assert [mark.epoch for mark in life.committer.newest()] == [3]
    assert not life.committer.in_doubt()


def test_a_right_that_is_taken_away_is_named_by_whichever_request_misses_it(guarded) -> None:
    kafka, address = guarded
    topic = kafka.topic()
    life = _life(kafka, address, topic)
    grant(kafka, life.sink.grants("User:alice"))
    committed = life.write(0, some(1))
    life.committer.newest()  # from here on it knows whom to ask
    epochs = itertools.count(1)

    def prepares() -> None:
        life.prepare(next(epochs), some(2))

    def rehearses() -> None:
        life.rehearse(0, committed)

    def commits() -> None:
        life.commit(0, committed)

    def begins() -> None:
        kafka.keep(life.fresh()).begin(next(epochs))

    def checks() -> None:
        kafka.keep(life.fresh()).committer.check(some(1).schema)

    def looks() -> None:
        life.committer.newest()

    topics, groups, ids = "--topic", "--group", "--transactional-id"
    group, own = "epochal-ledger-", "epochal-"
    cases = [
        (topics, topic, "Write", prepares, f"Write on the topic {topic}"),
        (topics, topic, "Read", prepares, f"Read on the topic {topic}"),
        (groups, group, "Read", prepares, f"Read on the group {group}"),
        (topics, topic, "Read", checks, f"Read on the topic {topic}"),
        (groups, group, "Read", checks, f"Read on the group {group}"),
        (groups, "billing", "Read", checks, "Read on the group billing"),
        (groups, group, "Describe", looks, f"Describe on the group {group}"),
        (groups, group, "Describe", checks, f"{group}.*needs the right Describe"),
        (ids, own, "Write", prepares, f"Write on the transactional id {own}"),
        (ids, own, "Write", commits, f"Write on the transactional id {own}"),
        (ids, own, "Describe", rehearses, f"Describe on the transactional id {own}"),
        (ids, own, "Describe", checks, f"{own}.*needs the right Describe"),
        (topics, topic, "Describe", begins, topic),
    ]
    for option, name, operation, verb, expected in cases:
        with (
            denied(kafka, option, name, operation),
            pytest.raises(Misconfigured, match=expected) as caught,
        ):
            verb()
        assert "`epochal grants PIPELINE`" in caught.value.hint
    for found in life.committer.in_doubt():
        life.abort(found.handle.epoch, [found.receipt])
    life.write(next(epochs), some(3))
    assert kafka.ids(topic) == [1, 3]
