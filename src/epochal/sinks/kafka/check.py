"""`check` and `read_limits`: what a cluster is asked before the first row."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from epochal.errors import EpochalError, Misconfigured, TryAgain
from epochal.kafka.client import Ask, Client
from epochal.kafka.cluster import Node
from epochal.kafka.codes import Code
from epochal.kafka.errors import code_name
from epochal.kafka.messages.describe_configs import (
    DescribeConfigsRequest,
    DescribeConfigsResource,
    DescribeConfigsResponse,
)
from epochal.kafka.messages.describe_transactions import DescribeTransactionsRequest
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.list_transactions import ListTransactionsRequest
from epochal.kafka.messages.metadata import MetadataRequest, MetadataRequestTopic
from epochal.kafka.record_headers import HEADERS
from epochal.sinks.kafka.errors import TransactionEnded, require_rights
from epochal.sinks.kafka.ledger import Ledger
from epochal.sinks.kafka.receipts import OpenTransaction
from epochal.sinks.kafka.records import HEADERS as HEADERS_COLUMN
from epochal.sinks.kafka.records import KEY, PARTITION, TIMESTAMP, TOPIC, VALUE, expressions
from epochal.sinks.kafka.transactional_ids import TransactionalIds
from epochal.sinks.kafka.transactions import (
    add_offsets,
    end_transactions,
    start_one,
    timeout_refused,
)
from epochal.sinks.kafka.values import Column, column_index, require_text
from epochal.terms import Ability, EpochNumber

if TYPE_CHECKING:
    from epochal.sinks.kafka.sink import Kafka

_TIMEOUT_WANTED_MS = 3_600_000
"""Long enough for a driver to restart and finish, short enough that readers don't wait for long."""
_CHECK_TIMEOUT_MS = 10_000
_TIMEOUT_SMALL_S = 60.0
_TIMEOUT_DEFAULT_MS = 900_000
_OWN_TIMEOUT_MS = 60_000
_BROKERS_WITHIN_S = 10.0
_MESSAGE_BYTES_DEFAULT = 1_048_588
_BROKER, _TOPIC = 4, 2
"""Kinds of resources that have configurations."""
_WRITE = 4
"""The bit of the right to write to a topic."""
_RIGHTS_NOT_REPORTED = -2_147_483_648


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLimits:
    """What the driver reads from the cluster at every start, and again from time to time."""

    cluster: str
    timeout_ms: int
    """Of transactions that hold rows: as long as wanted, and no longer than brokers allow."""
    timeout_max_ms: int | None
    """The shortest of all brokers; None where none reports it."""
    batch_bytes_max: int
    partitions: int

    @property
    def own_timeout_ms(self) -> int:
        """Of the driver's own transactions, which hold no row and end at once."""
        return min(_OWN_TIMEOUT_MS, self.timeout_ms)


def read_limits(client: Client, sink: Kafka) -> ClusterLimits:
    try:
        topic = client.await_topic(sink.topic)
    except Misconfigured as error:
        raise Misconfigured(f"{sink.bootstrap}: {error.message}", error.hint) from None
    if not topic.partition_count:
        raise TryAgain(f"{sink.topic}: no partition has a leader: {code_name(topic.error_code)}")
    most_ms = timeout_max_ms(client)
    return ClusterLimits(
        cluster=client.cluster.cluster_id or "",
        timeout_ms=_timeout_ms(sink, most_ms),
        timeout_max_ms=most_ms,
        batch_bytes_max=batch_bytes_max(client, sink.topic),
        partitions=topic.partition_count,
    )


def batch_bytes_max(client: Client, topic: str) -> int:
    """The largest batch that a topic accepts; brokers' default where that may not be read."""
    limit = client.ask(_config_request(_TOPIC, topic, "max.message.bytes"), code_of=_config_code)
    return _number(limit) or _MESSAGE_BYTES_DEFAULT


def _timeout_ms(sink: Kafka, most_ms: int | None) -> int:
    """
    Where no broker reports its limit, the time that is asked for by name is tried; `check` then
    shows whether it is allowed.
    """
    if sink.transaction_timeout_s is None:
        return min(_TIMEOUT_WANTED_MS, most_ms or _TIMEOUT_DEFAULT_MS)
    wanted_ms = int(1000 * sink.transaction_timeout_s)
    return wanted_ms if most_ms is None else min(wanted_ms, most_ms)


def timeout_max_ms(client: Client) -> int | None:
    """
    The shortest `transaction.max.timeout.ms` of all brokers, as each may coordinate one of our ids.
    One that is away is passed over.
    """
    asks = [
        Ask(
            request=_config_request(_BROKER, str(node.node_id), "transaction.max.timeout.ms"),
            to=node,
            code_of=_config_code,
        )
        for node in map(Node, sorted(client.cluster.addresses))
    ]
    answers = client.ask_all(asks, timeout_s=_BROKERS_WITHIN_S)
    failed = [answer for answer in answers if isinstance(answer, EpochalError)]
    if failed and len(failed) == len(answers):
        raise failed[0]
    found = [_number(answer) for answer in answers if not isinstance(answer, EpochalError)]
    return min((one for one in found if one is not None), default=None)


def _config_request(kind: int, name: str, key: str) -> DescribeConfigsRequest:
    wanted = DescribeConfigsResource(
        resource_type=kind, resource_name=name, configuration_keys=[key]
    )
    return DescribeConfigsRequest(resources=[wanted])


def _config_code(answer: DescribeConfigsResponse) -> int:
    return answer.results[0].error_code


def _number(answer: DescribeConfigsResponse) -> int | None:
    """A setting that is a number, or None where it may not be read."""
    if _config_code(answer) != Code.NONE:
        return None
    return next((int(one.value) for one in answer.results[0].configs if one.value), None)


def check(
    client: Client,
    sink: Kafka,
    ids: TransactionalIds,
    ledger: Ledger,
    schema: pa.Schema | None,
) -> Sequence[Ability]:
    """Raise `Misconfigured` where this sink can't work; return what the cluster can promise."""
    _require_new_enough(client)
    limits = read_limits(client, sink)
    _require_allowed(sink, limits)
    _require_writable(client, sink)
    _require_offsets(client, sink, ids, limits)
    ledger.owner(client, EpochNumber(0))
    if schema is not None:
        check_schema(sink, schema)
    return [_time(limits), _listing(client), _protocol(client), _proof()]


def _require_new_enough(client: Client) -> None:
    low, high = client.supported_versions(InitProducerIdRequest.API_KEY)
    if high < 3:
        raise Misconfigured(
            f"the brokers are older than 2.5 (InitProducerId {low} to {high}): they can't end "
            "another process's transaction safely",
            "brokers of 2.5 or newer",
        )


def _require_offsets(
    client: Client, sink: Kafka, ids: TransactionalIds, limits: ClusterLimits
) -> None:
    """
    Commit offsets in a transaction that is aborted. An epoch without rows does that after its
    decision only, and a right that is missing must not come out then (I3).

    The sink's own time is asked for first, as brokers may refuse it. The transaction gets a short
    one: of a driver that is killed here before it has claimed nobody knows the uid, so only the
    brokers can end it.
    """
    start_one(client, ids.check, limits.timeout_ms)
    timeout_ms = min(limits.timeout_ms, _CHECK_TIMEOUT_MS)
    producer_id, producer_epoch = start_one(client, ids.check, timeout_ms)
    txn = OpenTransaction(
        transactional_id=ids.check,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        is_v2=client.transaction_version() >= 2,
    )
    own = [ids.group, ids.claim_group]
    groups = own if sink.commit_offsets is None else [*own, sink.commit_offsets]
    try:
        # Ended by another process, that is: by its own check of the same sink.
        with suppress(TransactionEnded):
            for group in groups:
                add_offsets(client, txn, group, {sink.topic: {0: (0, "")}})
    finally:
        end_transactions(client, [txn], is_commit=False)


def _require_allowed(sink: Kafka, limits: ClusterLimits) -> None:
    wanted_s, most_ms = sink.transaction_timeout_s, limits.timeout_max_ms
    if wanted_s is not None and most_ms is not None and 1000 * wanted_s > most_ms:
        raise timeout_refused(1000 * wanted_s)


def _require_writable(client: Client, sink: Kafka) -> None:
    request = MetadataRequest(
        topics=[MetadataRequestTopic(name=sink.topic)],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    (topic,) = client.ask(request, code_of=lambda answer: answer.topics[0].error_code).topics
    rights = topic.topic_authorized_operations
    is_missing = rights != _RIGHTS_NOT_REPORTED and not rights & (1 << _WRITE)
    code = Code.TOPIC_AUTHORIZATION_FAILED if is_missing else topic.error_code
    require_rights(code, topic=("Write", sink.topic))


def _time(limits: ClusterLimits) -> Ability:
    seconds = limits.timeout_ms / 1000
    most_ms = limits.timeout_max_ms
    most = "not reported" if most_ms is None else f"{most_ms / 1000:.0f} s"
    is_enough = seconds >= _TIMEOUT_SMALL_S
    return Ability(
        name="time to decide",
        granted=is_enough,
        because=f"a transaction may stay open for {seconds:.0f} s (transaction.max.timeout.ms of "
        f"the brokers: {most}); within that, from the first record of an epoch's first task, all "
        "tasks must be done and the epoch decided and committed"
        + (
            ""
            if is_enough
            else f"; less than {_TIMEOUT_SMALL_S:.0f} s is too short for a cold start, where tasks "
            "wait for Python workers to start one after the other"
        ),
    )


def _listing(client: Client) -> Ability:
    can = client.supports(ListTransactionsRequest.API_KEY) and client.supports(
        DescribeTransactionsRequest.API_KEY
    )
    return Ability(
        name="clearing up",
        granted=can,
        because="open transactions are listed by the brokers and aborted"
        if can
        else "brokers before 3.0 don't list transactions: one that a killed task left open is "
        "aborted by its timeout, and readers wait until then",
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
        because="each transaction commits its epoch's number to a consumer group; brokers keep it "
        "for offsets.retention.minutes after the last one",
    )


def check_schema(sink: Kafka, schema: pa.Schema) -> None:
    """Refuse columns that are missing, or whose types don't fit their use."""
    is_projected = VALUE in schema.names
    if sink.order_by and not is_projected:
        raise Misconfigured(
            "Kafka: order_by= sorts on Spark; rows of a session keep the order they are written in",
            "leave order_by out, and write the rows in order",
        )
    if not is_projected:
        sink.encoding.check(schema)
    elif isinstance(sink.encoding, Column):
        require_text(schema.field(VALUE).type, "value", sink.encoding.expression)
    for name, (option, given) in expressions(sink).items():
        index = column_index(schema, option, name if is_projected else given)
        kind = schema.field(index).type
        if name == KEY:
            require_text(kind, option, given)
        else:
            accepts, wanted = _ACCEPTED[name]
            if not accepts(kind):
                raise Misconfigured(
                    f"Kafka: {option} must be {wanted}, and {given!r} is {kind}",
                    "cast it in the query, or name another column",
                )


def _is_headers(kind: pa.DataType) -> bool:
    try:
        pa.array([], kind).cast(HEADERS)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, TypeError):
        return False
    return True


def _is_instant(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_integer(kind))


_ACCEPTED: Mapping[str, tuple[Callable[[pa.DataType], bool], str]] = {
    HEADERS_COLUMN: (_is_headers, "an array of struct<key, value> or a map"),
    TOPIC: (pa.types.is_string, "text"),
    PARTITION: (pa.types.is_integer, "an integer"),
    TIMESTAMP: (_is_instant, "a timestamp, or milliseconds since 1970"),
}
"""Types that a column may have, by its use."""
