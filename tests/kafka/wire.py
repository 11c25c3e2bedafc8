"""The few requests that the tests of transactions are made of."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pyarrow as pa

from epochal.kafka import batch_reader, batches
from epochal.kafka.batches import Columns, Producer
from epochal.kafka.client import Client
from epochal.kafka.cluster import Coordinator, Leader
from epochal.kafka.compression import Compression
from epochal.kafka.messages.add_partitions_to_txn import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
)
from epochal.kafka.messages.end_txn import EndTxnRequest, EndTxnResponse
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from epochal.kafka.messages.init_producer_id import InitProducerIdRequest
from epochal.kafka.messages.produce import (
    PartitionProduceData,
    ProduceRequest,
    ProduceResponse,
    TopicProduceData,
)


@dataclass(frozen=True, slots=True)
class Transaction:
    """What names one transaction: enough to end it from anywhere."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


def begin(client: Client, transactional_id: str, timeout_ms: int = 60_000) -> Transaction:
    request = InitProducerIdRequest(
        transactional_id=transactional_id,
        transaction_timeout_ms=timeout_ms,
        producer_id=-1,
        producer_epoch=-1,
    )
    answer = client.ask(request, Coordinator(transactional_id))
    assert answer.error_code == 0, answer
    return Transaction(transactional_id, answer.producer_id, answer.producer_epoch)


def add_partition(client: Client, txn: Transaction, topic: str, partition: int = 0) -> int:
    request = AddPartitionsToTxnRequest(
        v3_and_below_transactional_id=txn.transactional_id,
        v3_and_below_producer_id=txn.producer_id,
        v3_and_below_producer_epoch=txn.producer_epoch,
        v3_and_below_topics=[AddPartitionsToTxnTopic(name=topic, partitions=[partition])],
    )

    def code_of(answer: object) -> int:
        (found,) = answer.results_by_topic_v3_and_below  # type: ignore[attr-defined]
        (result,) = found.results_by_partition
        return int(result.partition_error_code)

    answer = client.ask(request, Coordinator(txn.transactional_id), code_of=code_of)
    return code_of(answer)


def produce_code(answer: ProduceResponse) -> int:
    return answer.responses[0].partition_responses[0].error_code


def produce_request(
    topic: str,
    values: list[bytes | None],
    *,
    txn: Transaction | None = None,
    sequence: int = 0,
    partition: int = 0,
    compression: Compression = Compression.NONE,
) -> ProduceRequest:
    producer = batches.ANYBODY
    if txn is not None:
        producer = Producer(
            producer_id=txn.producer_id,
            producer_epoch=txn.producer_epoch,
            base_sequence=sequence,
            is_transactional=True,
        )
    rows = Columns(value=pa.array(values, pa.binary()))
    now_ms = int(time.time() * 1000)  # older than a week, a broker deletes them sooner or later
    parts = batches.encode(
        rows, default_timestamp_ms=now_ms, compression=compression, producer=producer
    )
    data = PartitionProduceData(index=partition, records=b"".join(parts))
    return ProduceRequest(
        transactional_id=None if txn is None else txn.transactional_id,
        acks=-1,
        timeout_ms=10_000,
        topic_data=[TopicProduceData(name=topic, partition_data=[data])],
    )


def produce(
    client: Client, topic: str, values: list[bytes | None], partition: int = 0, **options: object
) -> int:
    request = produce_request(topic, values, partition=partition, **options)  # type: ignore[arg-type]
    answer = client.ask(request, Leader(topic, partition), code_of=produce_code)
    return produce_code(answer)


def end(
    client: Client, txn: Transaction, *, commit: bool, version: int | None = None
) -> EndTxnResponse:
    request = EndTxnRequest(
        transactional_id=txn.transactional_id,
        producer_id=txn.producer_id,
        producer_epoch=txn.producer_epoch,
        committed=commit,
    )
    to = Coordinator(txn.transactional_id)
    return client.ask(request, to, is_repeatable=True, version_max=version)


def _fetch_once(
    client: Client, topic: str, *, committed: bool, partition: int, offset: int
) -> FetchResponse:
    wanted = FetchPartition(partition=partition, fetch_offset=offset, partition_max_bytes=1 << 20)
    request = FetchRequest(
        max_wait_ms=10,
        min_bytes=1,
        max_bytes=1 << 20,
        isolation_level=1 if committed else 0,
        topics=[FetchTopic(topic=topic, partitions=[wanted])],
    )
    return client.ask(
        request,
        Leader(topic, partition),
        code_of=lambda answer: answer.responses[0].partitions[0].error_code,
    )


def aborted_in(client: Client, topic: str) -> list[tuple[int, int]]:
    """Producer id and first offset of what a broker names as aborted."""
    answer = _fetch_once(client, topic, committed=True, partition=0, offset=0)
    response = answer.responses[0].partitions[0].aborted_transactions or []
    return [(transaction.producer_id, transaction.first_offset) for transaction in response]


def fetch(
    client: Client, topic: str, *, committed: bool = False, partition: int = 0, offset: int = 0
) -> tuple[list[batch_reader.Batch], FetchResponse]:
    """All batches from an offset on, markers too, and the last answer."""
    found: list[batch_reader.Batch] = []
    while True:
        answer = _fetch_once(client, topic, committed=committed, partition=partition, offset=offset)
        part = answer.responses[0].partitions[0]
        assert part.error_code == 0, part
        batches_here = list(batch_reader.read(part.records or b""))
        if not batches_here:
            return found, answer
        found += batches_here
        offset = batches_here[-1].last_offset + 1


def values(found: list[batch_reader.Batch]) -> list[bytes | None]:
    rows = [batch.columns()["value"].to_pylist() for batch in found if not batch.is_control]
    return [value for batch in rows for value in batch]
