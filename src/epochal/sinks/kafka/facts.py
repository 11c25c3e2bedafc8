"""What a cluster says about itself: its limits, and whether this sink can keep its promise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from epochal.errors import Misconfigured, TryAgain
from epochal.kafka import faults
from epochal.kafka.client import Client
from epochal.kafka.cluster import Node, Target
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResult,
)
from epochal.kafka.messages.describe_transactions import DescribeTransactionsRequest
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from epochal.sinks.kafka import ending, rights
from epochal.sinks.kafka.ledger import Ledger
from epochal.sinks.kafka.names import Names
from epochal.sinks.kafka.shaping import check_schema
from epochal.terms import Ability

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka

TIMEOUT_WANTED_S = 3600.0
"""Long enough for a driver to come back and finish, short enough that readers are not held long."""
TIMEOUT_SMALL_S = 60.0
_TIMEOUT_DEFAULT_MS = 900_000
_MESSAGE_BYTES_DEFAULT = 1_048_588
_BROKER, _TOPIC = 4, 2
_WRITE = 4
"""The bit of the right to write to a topic."""
_NOT_TOLD = -2_147_483_648


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the driver asks once a start."""

    cluster: str
    timeout_ms: int
    timeout_max_ms: int | None
    """None where the broker does not say."""
    batch_bytes_max: int
    partitions: int


def gather(client: Client, sink: Kafka) -> Facts:
    try:
        topic = client.await_topic(sink.topic)
    except Misconfigured as error:
        raise Misconfigured(
            f"{sink.server.place}: {error.message}", error.hint or rights.GRANTS
        ) from None
    if not topic.partition_count:
        raise TryAgain(
            f"{sink.topic}: no partition has a leader: {faults.name_of(topic.error_code)}"
        )
    node = Node(min(client.cluster.addresses))
    allowed = _config(client, _BROKER, str(node.node_id), "transaction.max.timeout.ms", node)
    limit = _config(client, _TOPIC, sink.topic, "max.message.bytes", None)
    most_ms = _TIMEOUT_DEFAULT_MS if allowed is None else int(allowed)
    wanted_s = sink.transaction_timeout_s
    wanted_ms = int(1000 * (TIMEOUT_WANTED_S if wanted_s is None else wanted_s))
    return Facts(
        cluster=client.cluster.cluster_id or "",
        timeout_ms=min(wanted_ms, most_ms) if wanted_s is None else wanted_ms,
        timeout_max_ms=None if allowed is None else int(allowed),
        batch_bytes_max=_MESSAGE_BYTES_DEFAULT if limit is None else int(limit),
        partitions=topic.partition_count,
    )


def _config(client: Client, kind: int, name: str, key: str, to: Target | None) -> str | None:
    """A setting, or None where it may not be read."""
    wanted = DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=[key]
    )
    answer = client.ask(DescribeConfigsRequest(resources=[wanted]), to)
    found: DescribeConfigsResult = answer.results[0]
    if found.error_code != Code.NONE:
        return None
    return next((config.value for config in found.configs if config.name == key), None)


def check(
    client: Client, sink: Kafka, names: Names, ledger: Ledger, schema: pa.Schema | None
) -> Sequence[Ability]:
    """Raise what can't work; tell what can, with the reason."""
    _require_new_enough(client)
    facts = gather(client, sink)
    _require_writable(client, sink)
    try:
        ending.start_one(client, names.check, facts.timeout_ms)
        ledger.own(client)
    except Misconfigured as error:
        raise Misconfigured(error.message, error.hint or rights.GRANTS) from None
    if schema is not None:
        check_schema(sink, schema)
    return [_time(facts), _listing(client), _protocol(client), _proof()]


def _require_new_enough(client: Client) -> None:
    low, high = client.spoken(InitProducerIdRequest.API_KEY)
    if high < 3:
        raise Misconfigured(
            f"the brokers are older than 2.5 (InitProducerId {low} to {high}): they can't end "
            "another process's transaction safely",
            "brokers of 2.5 or newer",
        )


def _require_writable(client: Client, sink: Kafka) -> None:
    request = MetadataRequest(
        topics=[MetadataRequestTopic(name=sink.topic)],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    (told,) = client.ask(request).topics
    given = told.topic_authorized_operations
    is_missing = given != _NOT_TOLD and not given & (1 << _WRITE)
    code = Code.TOPIC_AUTHORIZATION_FAILED if is_missing else told.error_code
    rights.require(code, topic=("Write", sink.topic))


def _time(facts: Facts) -> Ability:
    seconds = facts.timeout_ms / 1000
    told = "not told" if facts.timeout_max_ms is None else f"{facts.timeout_max_ms / 1000:.0f} s"
    return Ability(
        name="time to decide",
        granted=seconds >= TIMEOUT_SMALL_S,
        because=f"a transaction may stay open for {seconds:.0f} s (transaction.max.timeout.ms of "
        f"the brokers: {told}); an epoch must be prepared, decided and committed within that",
    )


def _listing(client: Client) -> Ability:
    can = client.speaks(ListTransactionsRequest.API_KEY) and client.speaks(
        DescribeTransactionsRequest.API_KEY
    )
    return Ability(
        name="clearing up",
        granted=can,
        because="open transactions are listed by the brokers and aborted"
        if can
        else "brokers before 3.0 don't list transactions: what a killed task left open is aborted "
        "by its timeout, and holds readers back until then",
    )


def _protocol(client: Client) -> Ability:
    level = client.transaction_version()
    return Ability(
        name="newer transaction protocol",
        granted=level >= 2,
        because=f"the cluster's feature transaction.version is {level}",
    )


def _proof() -> Ability:
    return Ability(
        name="proof",
        granted=True,
        because="each transaction commits its epoch's number to a group of ours; brokers keep it "
        "for offsets.retention.minutes after the last one",
    )
