"""ListPartitionReassignments: one broker never moves a partition."""

from __future__ import annotations

from epochal.broker.broker import Call
from epochal.kafka.messages.list_partition_reassignments import (
    ListPartitionReassignmentsRequest,
    ListPartitionReassignmentsResponse,
)

VERSIONS = range(1)


def handle(
    _call: Call, _request: ListPartitionReassignmentsRequest
) -> ListPartitionReassignmentsResponse:
    return ListPartitionReassignmentsResponse(error_message=None)
