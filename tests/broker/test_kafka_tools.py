"""Apache Kafka's own command-line tools, run on our broker as a user runs them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest_tools import new_topic
from servers.embedded import EmbeddedServer
from servers.jvm import QUICK
from servers.kafka import RELEASE
from servers.maven import dependencies
from servers.programs import program
from wire import begin, produce

from epochal.clock import SystemClock
from epochal.kafka.client import Client, group_coordinator
from epochal.kafka.messages import offset_commit as committing

CALLS = {
    "kafka-topics --list": ("TopicCommand", ["--list"], "tools"),
    "kafka-topics --describe": ("TopicCommand", ["--describe", "--topic", "tools"], "Partition: 1"),
    "kafka-topics --alter": (
        "TopicCommand",
        ["--alter", "--topic", "tools", "--partitions", "4"],
        "",
    ),
    "kafka-configs --describe (topic)": (
        "ConfigCommand",
        ["--describe", "--all", "--topic", "tools"],
        "retention.ms",
    ),
    "kafka-configs --describe (broker)": (
        "ConfigCommand",
        ["--describe", "--all", "--broker", "1"],
        "log.dirs",
    ),
    "kafka-configs --alter (topic)": (
        "ConfigCommand",
        ["--alter", "--topic", "tools", "--add-config", "retention.ms=86400000"],
        "Completed updating config",
    ),
    "kafka-consumer-groups --describe": (
        "consumer.group.ConsumerGroupCommand",
        ["--describe", "--group", "readers"],
        "CURRENT-OFFSET",
    ),
    "kafka-consumer-groups --delete-offsets": (
        "consumer.group.ConsumerGroupCommand",
        ["--delete-offsets", "--group", "readers", "--topic", "tools:0"],
        "Successful",
    ),
    "kafka-get-offsets": ("GetOffsetShell", ["--topic", "tools"], "tools:0:1"),
    "kafka-transactions list": ("TransactionsCommand", ["list"], "of-tools"),
    "kafka-transactions describe": (
        "TransactionsCommand",
        ["describe", "--transactional-id", "of-tools"],
        "Empty",
    ),
    "kafka-log-dirs": ("LogDirsCommand", ["--describe", "--topic-list", "tools"], '"partition"'),
    "kafka-leader-election": (
        "LeaderElectionCommand",
        ["--election-type", "preferred", "--topic", "tools", "--partition", "0"],
        "Valid replica already elected",
    ),
    "kafka-reassign-partitions --list": (
        "reassign.ReassignPartitionsCommand",
        ["--list"],
        "No partition reassignments found",
    ),
    "kafka-metadata-quorum describe": (
        "MetadataQuorumCommand",
        ["describe", "--status"],
        "LeaderId:",
    ),
    "kafka-cluster cluster-id": ("ClusterTool", ["cluster-id"], "Cluster ID:"),
    "kafka-broker-api-versions": ("BrokerApiVersionsCommand", [], "Produce(0)"),
    "kafka-features describe": ("FeatureCommand", ["describe"], "transaction.version"),
    "kafka-groups --list": ("GroupsCommand", ["--list"], "readers"),
    "kafka-console-consumer": (
        "consumer.ConsoleConsumer",
        ["--topic", "tools", "--from-beginning", "--max-messages", "1"],
        "row",
    ),
}
"""What is typed → class, arguments, and a piece of what it prints."""


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    server = EmbeddedServer(tmp_path_factory.mktemp("tools"))
    server.start()
    with Client(server.address(), clock=SystemClock()) as client:
        topic = new_topic(client, 2, name="tools")
        assert produce(client, topic, [b"row"]) == 0
        begin(client, "of-tools")
        part = committing.OffsetCommitRequestPartition(partition_index=0, committed_offset=1)
        request = committing.OffsetCommitRequest(
            group_id="readers",
            generation_id_or_member_epoch=-1,
            topics=[committing.OffsetCommitRequestTopic(name=topic, partitions=[part])],
        )
        client.ask(request, group_coordinator("readers"))
    yield server.address()
    server.stop()


@pytest.mark.proof
@pytest.mark.parametrize("call", CALLS)
def test_a_tool_of_apache_kafka_does_its_work(address: str, call: str, tmp_path: Path) -> None:
    name, arguments, expected = CALLS[call]
    jars = dependencies(
        f"kafka-cli-{RELEASE}",
        f"org.apache.kafka:kafka-tools:{RELEASE}",
        f"org.apache.kafka:kafka_2.13:{RELEASE}",
        "org.apache.logging.log4j:log4j-slf4j-impl:2.25.4",
    )
    package = "kafka.admin" if name == "ConfigCommand" else "org.apache.kafka.tools"
    where = ["--bootstrap-server", address]
    # Tools with subcommands take it before them, but one.
    has_subcommand = bool(arguments) and not arguments[0].startswith("-") and name != "ClusterTool"
    command = [*where, *arguments] if has_subcommand else [*arguments, *where]
    ran = subprocess.run(
        [
            program("java", "default-jre-headless"),
            *QUICK,
            "-cp",
            f"{jars}/*",
            f"{package}.{name}",
            *command,
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=tmp_path,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert expected in ran.stdout, ran.stdout + ran.stderr
