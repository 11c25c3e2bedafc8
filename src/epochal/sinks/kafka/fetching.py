"""Reading a topic's own batches."""

from __future__ import annotations

from epochal.kafka.client import Client
from epochal.kafka.cluster import Leader
from epochal.kafka.messages.fetch import FetchPartition, FetchRequest, FetchResponse, FetchTopic
from epochal.kafka.messages.fetch import PartitionData as Fetched

_FETCH_BYTES = 1 << 20


def fetch(client: Client, at: Leader, offset: int) -> Fetched:
    """
    What a partition holds from an offset on. Uncommitted too: a transaction of somebody else must
    not hide what is behind it.
    """
    wanted = FetchPartition(
        partition=at.partition, fetch_offset=offset, partition_max_bytes=_FETCH_BYTES
    )
    request = FetchRequest(
        max_wait_ms=10,
        min_bytes=1,
        max_bytes=_FETCH_BYTES,
        isolation_level=0,
        topics=[FetchTopic(topic=at.topic, partitions=[wanted])],
    )
    answer: FetchResponse = client.ask(
        request, at, code_of=lambda told: told.responses[0].partitions[0].error_code
    )
    return answer.responses[0].partitions[0]
