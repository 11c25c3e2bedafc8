"""DescribeCluster: this broker, or all members of its cluster."""

from __future__ import annotations

from epochal.broker.broker import AuthorizedOperations, Call
from epochal.kafka.codes import Code
from epochal.kafka.messages.describe_cluster import (
    DescribeClusterBroker,
    DescribeClusterRequest,
    DescribeClusterResponse,
)

VERSIONS = range(3)
_BROKERS = 1


def handle(call: Call, request: DescribeClusterRequest) -> DescribeClusterResponse:
    if request.endpoint_type != _BROKERS:
        code = Code.MISMATCHED_ENDPOINT_TYPE
        return DescribeClusterResponse(error_code=code, endpoint_type=request.endpoint_type)
    if request.include_cluster_authorized_operations:
        operations = AuthorizedOperations.CLUSTER
    else:
        operations = DescribeClusterResponse().cluster_authorized_operations
    return DescribeClusterResponse(
        cluster_authorized_operations=operations,
        cluster_id=call.broker.state.cluster_id,
        controller_id=call.leader.node_id,
        brokers=[
            DescribeClusterBroker(broker_id=node.node_id, host=node.host, port=node.port)
            for node in call.nodes
        ],
    )
