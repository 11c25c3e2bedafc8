"""What a principal needs at an Apache Kafka that asks for rights: what `grants()` says, no less."""

from __future__ import annotations

import shlex
import time
from collections.abc import Iterator

import pytest
from confluent_kafka.admin import (
    AclBinding,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)
from kafka_place import Life, Place, apache_at, some

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
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Place, str]]:
    """A place for whoever comes without a name, and the address for those who have one."""
    server = apache_at(
        tmp_path_factory.mktemp("guarded"),
        settings={
            "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
            "super.users": "User:ANONYMOUS",
        },
    )
    server.start()
    place = Place(bootstrap=server.address())
    yield place, server.address("SASL")
    place.close()
    server.kill()


def grant(place: Place, commands: list[str]) -> None:
    """What `kafka-acls.sh` does with these commands."""
    bindings = [binding for command in commands for binding in _bindings(shlex.split(command))]
    admin = AdminClient({"bootstrap.servers": place.bootstrap})
    for done in admin.create_acls(bindings).values():
        done.result(30)


def _bindings(words: list[str]) -> list[AclBinding]:
    option = next(word for word in words if word in _RESOURCES)
    is_prefix = "prefixed" in words
    principal = words[words.index("--allow-principal") + 1]
    operations = [words[at + 1] for at, word in enumerate(words) if word == "--operation"]
    return [
        AclBinding(
            _RESOURCES[option],
            words[words.index(option) + 1],
            ResourcePatternType.PREFIXED if is_prefix else ResourcePatternType.LITERAL,
            principal,
            "*",
            _OPERATIONS[operation],
            AclPermissionType.ALLOW,
        )
        for operation in operations
    ]


def _await_rights(life: Life) -> None:
    """A broker hears of a new right from its controller, a moment later."""
    deadline = time.monotonic() + 10
    while True:
        try:
            life.committer.check(some(1).schema)
        except Misconfigured:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)
        else:
            return


def test_missing_rights_are_named_at_the_start_and_those_granted_are_enough(guarded) -> None:
    place, address = guarded
    topic = place.topic(partitions=2)
    sink = place.sink(
        topic,
        bootstrap=address,
        key="id",
        username="alice",
        password="alice-secret",
        sasl_mechanism="SCRAM-SHA-256",
    )
    life = place.keep(Life(sink=sink))
    commands = sink.grants("User:alice")
    told = []
    for command in commands:
        with pytest.raises(Misconfigured) as caught:
            life.committer.check(some(1).schema)
        told.append(caught.value.message)
        assert "grants()" in caught.value.hint
        grant(place, [command])
    assert "alice-secret" not in "".join(told)
    assert any("TRANSACTIONAL_ID" in one for one in told)
    assert any("group" in one for one in told)
    _await_rights(life)
    life.write(0, some(1, 2), some(3), first=True)
    receipts = life.write(1, some(4), first=True)
    life.abort(2, life.prepare(2, some(5), first=True))
    life.commit(3, [])
    assert place.ids(topic) == [1, 2, 3, 4]
    assert life.outcome(receipts[0]) is Proof.COMMITTED
    assert [mark.epoch for mark in life.committer.newest()] == [3]
    assert not life.committer.in_doubt()
