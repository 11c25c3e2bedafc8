"""The least that a principal of this sink needs, as commands that an administrator can run."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka


def grants(sink: Kafka, principal: str) -> list[str]:
    command = ["kafka-acls.sh", "--bootstrap-server", sink.bootstrap]
    command += ["--add", "--allow-principal", principal]
    ours = f"{sink.transactional_id_prefix}epochal-"
    by_prefix = ["--resource-pattern-type", "prefixed"]
    operations = ["Write", "Describe", "DescribeConfigs"]
    given = [
        [*_operations(operations), "--topic", sink.topic],
        # To read a row's own place again, where only the topic can tell how a transaction ended;
        # and what offsets of a group are kept under.
        [*_operations(["Read"]), "--topic", sink.topic],
        [*_operations(["Write", "Describe"]), "--transactional-id", ours, *by_prefix],
        [*_operations(["Read", "Describe"]), "--group", ours, *by_prefix],
    ]
    if sink.commit_offsets is not None:
        given.append([*_operations(["Read"]), "--group", sink.commit_offsets])
    return [shlex.join([*command, *words]) for words in given]


def _operations(names: list[str]) -> list[str]:
    return [word for name in names for word in ("--operation", name)]
